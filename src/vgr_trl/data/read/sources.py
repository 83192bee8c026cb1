"""Where the rows to convert come from: a name on the hub, a local folder, or files."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyarrow.lib import ArrowException

from vgr_trl.data.read.readers import READERS, count_rows, read_files, reader_of
from vgr_trl.data.rows.images.places import downloaded
from vgr_trl.data.rows.questions import Origin, Record
from vgr_trl.errors import ConfigError, DataError, words_of

SAVED = ("dataset_dict.json", "dataset_info.json")  # what `save_to_disk` leaves in a folder
MEANT = dict.fromkeys(("train", "training"), "train")  # word of a name -> split, as `datasets` calls it
MEANT |= dict.fromkeys(("validation", "valid", "val", "dev"), "validation")
MEANT |= dict.fromkeys(("test", "testing"), "test")


@dataclass(frozen=True)
class Source:
    """One of a hub name, a folder and files, and which part of it.

    Attributes:
        dataset_name: name on the hub.
        dataset_path: folder with Parquet, JSONL or JSON files, also one level down, or written by `save_to_disk`.
        data_files: files; `config=path` for a set in several configurations.
        config: configuration of a hub data set, or the subfolder or start of the file names that stands for it.
        split: of a hub data set, or of a folder whose file names say their split.

    Raises:
        ConfigError: not exactly one of the three is given.
    """

    dataset_name: str | None = None
    dataset_path: str | None = None
    data_files: Sequence[str] = ()
    config: str | None = None
    split: str = "train"

    def __post_init__(self) -> None:
        names = ("dataset_name", "dataset_path", "data_files")
        given = [name for name in names if getattr(self, name)]
        if len(given) != 1:
            got = " and ".join(given) if given else "none"
            raise ConfigError(f"Data come from one of {', '.join(names)}, but {got} was given.")

    def __str__(self) -> str:
        return self.dataset_name or self.dataset_path or " ".join(self.data_files)

    def records(self, config: str | None = None) -> Iterator[Record]:
        """Yield the rows, images undecoded, of configuration `config` (None: the source's own).

        Raises:
            DataError: there is nothing to read, or it cannot be read.
        """
        config = config or self.config
        if self.dataset_name:
            return _hub_records(self.dataset_name, config, self.split)
        if self._is_saved():
            return _saved_records(str(self.dataset_path), self.split)
        paths = self._paths(config)
        for path in paths:
            reader_of(path)  # a missing file is named before the first row is worked on
        return read_files(paths)

    def count(self, config: str | None = None) -> int | None:
        """Return the number of rows where it is known without reading them."""
        if self.dataset_name or self._is_saved():
            return None
        return count_rows(self._paths(config or self.config))

    def identity(self) -> dict[str, Any]:
        """Return what the rows depend on: the names, and size and time of local files."""
        files = [Path(_path_of(file)) for file in self.data_files]
        if self.dataset_path and not self._is_saved():
            files = row_files(Path(self.dataset_path))
        states = [(str(path.resolve()), path.stat()) for path in files if path.exists()]
        return {
            "source": self.dataset_name or [name for name, _ in states] or str(Path(str(self.dataset_path)).resolve()),
            "files": [[state.st_size, state.st_mtime_ns] for _, state in states],
            "config": self.config,
            "split": self.split,
        }

    def folder(self) -> Path:
        """Return the folder that relative image paths start from, and that none leads out of."""
        if self.data_files:
            return Path(_path_of(self.data_files[0])).absolute().parent
        return Path(self.dataset_path or downloaded()).absolute()

    def _is_saved(self) -> bool:
        return self.dataset_path is not None and any((Path(self.dataset_path) / name).exists() for name in SAVED)

    def _paths(self, config: str | None) -> list[Path]:
        if not self.data_files:
            return files_in(Path(str(self.dataset_path)), config, self.split)
        named = [file.split("=", 1) for file in self.data_files if re.match(r"[\w-]+=", file)]
        if config is None or (not named and config == self.config):
            return [Path(_path_of(file)) for file in self.data_files]
        paths = [Path(path) for name, path in named if name == config]
        if not paths:
            names = ", ".join(sorted({name for name, _ in named})) or "no configuration"
            raise DataError(f"data_files names {names}, but {config} is needed too: give it as {config}=FILE.")
        return paths


def files_in(folder: Path, config: str | None, split: str) -> list[Path]:
    """Return the files of `folder` with rows of a configuration and a split, in the order of their names.

    Raises:
        DataError: there are none.
    """
    if not folder.is_dir():
        raise DataError(f"dataset_path is {folder}, which is not a folder; for single files use data_files.")
    files = row_files(folder)
    if config is not None:
        files = [file for file in files if _is_of(file.relative_to(folder), config)]
        if not files:
            raise DataError(f"{folder} has no {' or '.join(READERS)} file of {config!r} in a subfolder of that name.")
    if not files:
        raise DataError(f"{folder} has no {' or '.join(READERS)} file.")
    splits = {file: _words_of(file.relative_to(folder)) & set(MEANT) for file in files}
    if not any(splits.values()):
        return files
    chosen = [file for file in files if split in splits[file]]
    if not chosen:
        found = sorted({name for names in splits.values() for name in names})
        raise DataError(f"{folder} has files of the splits {found}, but not of {split!r}: name one of them.")
    return chosen


def splits_in(folder: Path) -> list[str]:
    """Return the splits that the names of the files in `folder` say, none where they say nothing."""
    return sorted({word for file in row_files(folder) for word in _words_of(file.relative_to(folder)) & set(MEANT)})


def splits_of(files: Sequence[Path], folder: Path) -> dict[str, list[Path]]:
    """Return split → files, as `datasets` names the splits; all are `train` where the names say nothing."""
    found: dict[str, list[Path]] = {}
    for file in files:
        for split in sorted({MEANT[word] for word in _words_of(file.relative_to(folder)) & set(MEANT)}):
            found.setdefault(split, []).append(file)
    return found or {"train": list(files)}


def has_config(folder: Path, config: str) -> bool:
    """Return whether `folder` has files of a configuration."""
    return any(_is_of(file.relative_to(folder), config) for file in row_files(folder))


def row_files(folder: Path) -> list[Path]:
    """Return the files with rows anywhere in `folder`, in the order of their names."""
    found = [path for path in folder.rglob("*") if path.suffix.lower() in READERS and path.is_file()]
    return sorted(
        path
        for path in found
        if path.name != "skipped.jsonl" and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )


def _is_of(path: Path, config: str) -> bool:
    """Whether a file belongs to a configuration: by a folder of its name, or by how its own name starts."""
    return config in path.parts[:-1] or re.match(re.escape(config) + r"(?![a-zA-Z])", path.name) is not None


def _words_of(path: Path) -> set[str]:
    return {word for part in path.with_suffix("").parts for word in re.split(r"[^a-z]+", part.lower())}


def _path_of(file: str) -> str:
    return file.split("=", 1)[1] if re.match(r"[\w-]+=", file) else file


def _hub_records(name: str, config: str | None, split: str) -> Iterator[Record]:
    import datasets
    from datasets.exceptions import DatasetsError

    number = 0
    try:
        rows = datasets.load_dataset(name, name=config, split=split, streaming=True)
        for number, row in enumerate(rows if rows.features is None else rows.decode(False)):
            yield Origin(name, number), row
    except (DatasetsError, OSError, ValueError, RuntimeError) as error:
        raise DataError(
            f"{name} cannot be read beyond row {number} ({words_of(error, 300)}): check name and network."
        ) from error


def _saved_records(folder: str, split: str) -> Iterator[Record]:
    import datasets
    from datasets.exceptions import DatasetsError

    from vgr_trl.data.rows.columns import undecoded

    number = 0
    try:
        saved = datasets.load_from_disk(folder)
        if isinstance(saved, datasets.DatasetDict):
            if split not in saved:
                raise DataError(f"{folder} has the splits {sorted(saved)}, but not {split!r}: name one of them.")
            saved = saved[split]
        for number, row in enumerate(undecoded(saved)):
            yield Origin(folder, number), row
    except DataError:
        raise
    except (DatasetsError, ArrowException, AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        raise DataError(
            f"{folder} cannot be read beyond row {number} ({words_of(error, 300)}): check that it is whole."
        ) from error
