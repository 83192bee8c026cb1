"""Loading a data set from the hub, a folder or files."""

from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, IterableDataset, load_dataset, load_from_disk
from datasets.exceptions import DataFilesNotFoundError, DatasetGenerationError, DatasetNotFoundError
from pyarrow.lib import ArrowException

from vgr_trl.errors import ConfigError, DataError

BUILDERS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".csv": "csv", ".arrow": "arrow"}


def load_split(
    split: str,
    *,
    dataset_name: str | None = None,
    dataset_config: str | None = None,
    dataset_path: str | None = None,
    data_files: str | None = None,
    streaming: bool = False,
) -> Dataset | IterableDataset:
    """Return one split of the data set that one of the three sources names.

    Args:
        split: its name, `train` for example.
        dataset_name: name on the hub.
        dataset_config: configuration of a hub data set.
        dataset_path: folder with files of one kind, with images and metadata, or written by `save_to_disk`.
        data_files: `train=a.parquet,test=b.parquet`, or one file, which is then the split `train`. Parquet, JSON,
            JSONL, CSV or Arrow.
        streaming: read rows as they are needed.

    Raises:
        ConfigError: not exactly one source is given, or `data_files` is malformed.
        DataError: the source or the split does not exist, cannot be read, or is empty.
    """
    given = {"dataset_name": dataset_name, "dataset_path": dataset_path, "data_files": data_files}
    named = [name for name, value in given.items() if value]
    if len(named) != 1:
        got = " and ".join(named) if named else "none"
        raise ConfigError(f"Data come from one of dataset_name, dataset_path and data_files, but {got} was given.")
    try:
        if data_files:
            return _from_files(split, parse_data_files(data_files), streaming)
        if dataset_path:
            return _pick(split, _from_folder(Path(dataset_path), streaming), dataset_path)
        return _pick(split, load_dataset(dataset_name, name=dataset_config, streaming=streaming), str(dataset_name))
    except (DatasetNotFoundError, ConnectionError) as error:
        raise DataError(f"No data set is found at {given[named[0]]} ({error}): check {named[0]}.") from error
    except (DatasetGenerationError, ArrowException, UnicodeError, DataFilesNotFoundError) as error:
        cause = error.__cause__ or error
        raise DataError(f"{given[named[0]]} cannot be read ({cause}): check that the file is whole.") from error


def parse_data_files(text: str) -> dict[str, Path]:
    """Return split → file of `train=a.parquet,test=b.parquet`; a single file is the split `train`."""
    parts = [part.strip() for part in text.split(",")]
    pairs = [part.split("=", 1) if "=" in part else ["train", part] for part in parts]
    files = {name.strip(): Path(path.strip()) for name, path in pairs}
    if len(files) != len(parts) or any(not name or path == Path() for name, path in files.items()):
        raise ConfigError(f"data_files is {text!r}: give train=a.parquet,test=b.parquet with each split once.")
    return files


def _from_files(split: str, files: dict[str, Path], streaming: bool) -> Any:
    if split not in files:
        raise DataError(f"data_files names the splits {sorted(files)}, but the split {split!r} is asked for.")
    path = files[split]
    if not path.is_file():
        raise DataError(f"The file {path} of data_files does not exist.")
    builder = BUILDERS.get(path.suffix.lower())
    if builder is None:
        raise DataError(f"The file {path} is none of {', '.join(BUILDERS)}.")
    if path.stat().st_size == 0:
        raise DataError(f"The file {path} is empty.")
    return load_dataset(builder, data_files={split: str(path)}, split=split, streaming=streaming)


def _from_folder(path: Path, streaming: bool) -> Any:
    if not path.is_dir():
        raise DataError(f"dataset_path is {path}, which is not a folder; for single files use data_files.")
    if (path / "dataset_dict.json").exists() or (path / "dataset_info.json").exists():
        return load_from_disk(str(path))
    if not any(path.iterdir()):
        raise DataError(f"dataset_path is {path}, which is empty.")
    return load_dataset(str(path), streaming=streaming)


def _pick(split: str, loaded: Any, source: str) -> Any:
    if isinstance(loaded, Dataset):
        loaded = DatasetDict(train=loaded)
    if split not in loaded:
        raise DataError(f"{source} has the splits {sorted(loaded)}, but not {split!r}: name one of them.")
    return loaded[split]
