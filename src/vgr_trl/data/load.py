"""The data that training reads: from the hub, folders or files, with a train/test split if there is none."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from datasets import (
    Dataset,
    IterableDataset,
    Json,
    List,
    concatenate_datasets,
    load_dataset,
    load_from_disk,
)

from vgr_trl.data import public_sets
from vgr_trl.data.columns import KEYS, undecoded
from vgr_trl.data.images import FOLDER, IMAGE_COLUMNS, folder_of, image_bytes, images_of
from vgr_trl.data.merge import Row, split
from vgr_trl.data.prompts import texts_of
from vgr_trl.data.read import (
    HUB_NAME,
    MEANT,
    has_card_with_files,
    is_saved,
    one_source,
    parse_data_files,
    readable,
    require_file,
    row_files,
    split_of,
    split_words,
    splits_of,
    stream_of,
    table_of,
    why_not_on_hub,
)
from vgr_trl.utils import DataError

TEST_SHARE = 0.1
# `datasets` reads the columns of texts as if all were of one type (pandas makes numbers of digits and nothing of `NA`).
BUILDERS = {".parquet": "parquet", ".jsonl": "text", ".json": "text", ".csv": "text", ".arrow": "arrow"}
METADATA = ("metadata.jsonl", "metadata.csv")  # what `datasets` knows of the images beside it


def load_split(
    split: str,
    *,
    dataset_name: str | None = None,
    dataset_config: str | None = None,
    dataset_path: str | None = None,
    data_files: str | None = None,
    streaming: bool = False,
    with_folders: bool = True,
) -> Dataset | IterableDataset:
    """Return one split of the data set that one of the three sources names.

    Args:
        dataset_path: folder with files of one kind, with images and metadata, or written by `save_to_disk`.
        data_files: as `parse_data_files` takes it. Parquet, JSON, JSONL, CSV or Arrow.
        with_folders: whether rows name the folder of their file in the column `FOLDER` where files of a split lie in
            several.

    Raises:
        ConfigError: not exactly one source is given, or `data_files` is malformed.
        DataError: the source or the split does not exist, cannot be read, or is empty.
    """
    given = {"dataset_name": dataset_name, "dataset_path": dataset_path, "data_files": data_files}
    name = one_source(**given)
    source = str(given[name])
    with readable(source, name, only_reads=True):
        if data_files:
            files = split_of(parse_data_files(data_files), split, "data_files")
            return _from_files(files, streaming, with_folders)
        return _without_folder(split_of(_splits(name, source, dataset_config, streaming), split, source))


def load_path(
    path: str, split: str | None = None, *, config: str | None = None, streaming: bool = False
) -> tuple[str, Dataset | IterableDataset]:
    """Return a split of the file, the folder or the hub data set that `path` is, with its name.

    Args:
        path: a file as in `load_split`, a folder as there, or a name on the hub where there is neither.
        split: its name; None: `train`, or the only one. A file has one, of any name.

    Raises:
        DataError: there is nothing at `path`, it cannot be read, or the split is not known.
    """
    is_folder = bool(path) and Path(path).is_dir()
    with readable(path, "the path", only_reads=True):
        if Path(path).is_file():
            return split or "train", _from_files([Path(path)], streaming)
        if not is_folder and not HUB_NAME.fullmatch(path):
            raise DataError(f"There is no file and no folder {path}: give one, or a name on the hub.")
        loaded = _splits("dataset_path" if is_folder else "dataset_name", path, config, streaming)
        chosen = split or ("train" if "train" in loaded else next(iter(loaded)))
        if split is None and chosen != "train" and len(loaded) > 1:
            raise DataError(f"{path} has the splits {sorted(loaded)}: name one of them.")
        return chosen, _without_folder(split_of(loaded, chosen, path))


def _splits(name: str, source: str, config: str | None, streaming: bool) -> Mapping[Any, Any]:
    """Return the splits of a folder or a hub data set."""
    if name == "dataset_path":
        return _from_folder(Path(source), streaming)
    if config is None and source == public_sets.MMMU_PRO_HUB_NAME:
        config = public_sets.HUB_CONFIG  # as in conversion
    if not Path(source).exists() and (why := why_not_on_hub(source, "dataset")) is not None:
        raise ConnectionError(why)
    return cast("Mapping[Any, Any]", _keeping_types(load_dataset(source, name=config, streaming=streaming), source))


def _from_files(paths: Sequence[Path], streaming: bool, with_folders: bool = True) -> Any:
    for path in paths:
        require_file(path, BUILDERS)
    with_folders = with_folders and len({path.absolute().parent for path in paths}) > 1
    if all(BUILDERS[path.suffix.lower()] == "text" for path in paths):
        return (stream_of if streaming else table_of)(paths, with_folders)
    tables = [_from_file(path, streaming, with_folders) for path in paths]
    return concatenate_datasets(tables) if len(tables) > 1 else tables[0]


def _from_file(path: Path, streaming: bool, with_folders: bool) -> Any:
    builder = BUILDERS[path.suffix.lower()]
    if builder == "text":
        return (stream_of if streaming else table_of)([path], with_folders)
    rows = load_dataset(builder, data_files={"train": str(path)}, split="train", streaming=streaming)
    rows = _without_folder(_keeping_types(rows, path))
    folder = str(path.absolute().parent)
    if not with_folders:
        return rows
    return rows.map(lambda row: {FOLDER: folder}) if streaming else rows.add_column(FOLDER, [folder] * len(rows))


def _from_folder(path: Path, streaming: bool) -> Mapping[Any, Any]:
    if not path.is_dir():
        raise DataError(f"dataset_path is {path}, which is not a folder; for single files use data_files.")
    if is_saved(path):
        saved = load_from_disk(str(path))
        return {"train": saved} if isinstance(saved, Dataset) else saved
    files = row_files(path)
    kinds = {BUILDERS[file.suffix.lower()] for file in files}
    has_metadata = any(file.name in METADATA for file in files)
    if kinds == {"text"} and not has_metadata:
        read = stream_of if streaming else table_of
        return {split: read(paths) for split, paths in splits_of(files, path).items()}
    # Of files of several kinds `datasets` would read one; a JSON file may be about the others.
    tables = [file for file in files if file.suffix.lower() != ".json"]
    kinds = {BUILDERS[file.suffix.lower()] for file in tables}
    by_split = None
    if not has_card_with_files(path) and not has_metadata:
        if len(kinds) > 1:
            found = " and ".join(map(str, files))[:500]
            raise DataError(f"Files of different kinds, {found}, are no one set: name those to read by data_files.")
        # `datasets` would put a file whose path names two splits into both.
        if any(len({MEANT[word] for word in split_words(file, path)}) > 1 for file in tables):
            by_split = {split: list(map(str, paths)) for split, paths in splits_of(tables, path).items()}
    loaded = load_dataset(str(path), data_files=by_split, streaming=streaming)
    return cast("Mapping[Any, Any]", _keeping_types(loaded, path))


def _keeping_types(loaded: Any, source: Any) -> Any:
    """Refuse a column that `datasets` has read as JSON because its types are mixed: there "1" has become 1."""
    for dataset in loaded.values() if isinstance(loaded, dict) else [loaded]:
        for name in (*KEYS.answer, *KEYS.choices):
            feature = (dataset.features or {}).get(name)
            if isinstance(feature.feature if isinstance(feature, List) else feature, Json):
                mixed = f"The column `{name}` of {source} mixes texts and numbers, which would all become numbers"
                raise DataError(f"{mixed}: give its JSONL files by data_files, or write the column as texts.")
    return loaded


def _without_folder(rows: Any) -> Any:
    """Rows that do not say themselves where their files lie."""
    return rows.remove_columns([FOLDER]) if FOLDER in (rows.column_names or ()) else rows


def train_test_split(
    dataset: Dataset, seed: int, root: Path = Path(), most: int | None = None
) -> tuple[Dataset, Dataset]:
    """Return the rows to train on, and a tenth to evaluate on; rows that share an image (or a question) stay together.

    Args:
        dataset: as `prepare_rows` gives it.
        seed: of the choice, which depends on nothing else but the images.
        most: rows to evaluate on, where a tenth would be more.

    Raises:
        DataError: all rows share images.
    """
    wanted = ("prompt", *IMAGE_COLUMNS, FOLDER)
    stored = undecoded(dataset.with_format(None))
    stored = stored.select_columns([name for name in wanted if name in stored.column_names])
    rows = [Row(0, place, _digests(row, root), "", "") for place, row in enumerate(stored)]
    train, test = split(rows, min(TEST_SHARE, (most or len(rows)) / len(rows)), seed)
    return dataset.select([row.position for row in train]), dataset.select([row.position for row in test[:most]])


def _digests(row: Mapping[str, Any], root: Path) -> tuple[str, ...]:
    shown = [image_bytes(value, folder_of(row, root)) for value in images_of(row)]
    what = shown or ["\0".join(texts_of(row["prompt"][-1:])).encode()]
    return tuple(hashlib.sha256(data).hexdigest() for data in what)
