"""Rows from files, folders and the hub, in memory that does not grow with their number."""

import csv
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import Any

import pyarrow.parquet
import yaml
from datasets import Dataset, DatasetDict, Features, IterableDataset, Json, load_dataset, load_from_disk
from datasets.config import HF_DATASETS_CACHE
from datasets.exceptions import DataFilesNotFoundError, DatasetGenerationError, DatasetNotFoundError
from huggingface_hub import repo_exists
from huggingface_hub.constants import HF_HUB_CACHE
from huggingface_hub.file_download import repo_folder_name
from pyarrow.lib import ArrowException

from vgr_trl.data.columns import UNREADABLE, Origin, Record, as_json, feature_of, kind_of, undecoded
from vgr_trl.data.images import FOLDER, downloaded, path_within
from vgr_trl.utils import ConfigError, DataError, MissingSplitError, VGRError, error_text

HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
CARDS = ("README.md", ".huggingface.yaml")
BATCH_ROWS = 16
SAVED = ("dataset_dict.json", "dataset_info.json")  # what `save_to_disk` leaves in a folder
MEANT = dict.fromkeys(("train", "training"), "train")  # word of a name → split, as `datasets` calls it
MEANT |= dict.fromkeys(("validation", "valid", "val", "dev"), "validation")
MEANT |= dict.fromkeys(("test", "testing", "eval", "evaluation"), "test")

Rows = Iterator[tuple[int, Any]]
"""Places in a file and what is there: a row, or a text that says why there is none."""


def has_card_with_files(folder: Path) -> bool:
    """Return whether a card of a local data set names its files: `datasets` would read them wherever they are.

    Raises:
        DataError: one lies outside of `folder`, or is an address.
    """
    files = list[str]()
    for name in CARDS:
        try:
            text = (folder / name).read_text(encoding="utf-8")
            head = re.match(r"\s*---\n+(.*?)\n+---(?:\n|$)", text, re.DOTALL) if name.endswith(".md") else None
            card = yaml.safe_load((head[1] if head else "") if name.endswith(".md") else text)
        except (OSError, UnicodeError, yaml.YAMLError):  # `datasets` has its own words for these
            continue
        configs = card.get("configs") if isinstance(card, dict) else None
        for config in filter(lambda config: isinstance(config, dict), configs if isinstance(configs, list) else []):
            files += _texts([config.get("data_files"), config.get("data_dir")])
    for file in files:
        try:
            if "://" in file:
                raise DataError(f"{file} is an address")
            path_within(folder.absolute(), file)
        except DataError as error:
            raise DataError(f"A card says that rows are in {file[:200]}, which is not in {folder}.") from error
    return bool(files)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from _texts([one for name, one in value.items() if name != "split"])
    elif isinstance(value, list):
        for one in value:
            yield from _texts(one)


def parse_data_files(text: str) -> dict[str, list[Path]]:
    """Return split → files of `train=a.jsonl+b.jsonl,test=c.parquet`; a split may be named again for another file.

    A file without a split is of the split `train`. A name with `*` or `?` stands for the files that it fits.

    Raises:
        ConfigError: a split or a file has no name.
    """
    files: dict[str, list[Path]] = {}
    for part in text.split(","):
        name, path = part.split("=", 1) if "=" in part else ("train", part)
        names = [path.strip()] if Path(path.strip()).exists() else [one.strip() for one in path.split("+")]
        if not name.strip() or not path.strip() or not all(names):
            raise ConfigError(f"data_files is {text!r}: give train=a.jsonl+b.jsonl,test=c.parquet.")
        for one in names:
            files.setdefault(name.strip(), []).extend(map(Path, (set(one) & set("*?") and sorted(glob(one))) or [one]))
    return files


@contextmanager
def readable(source: Any, name: str, only_reads: bool = False) -> Iterator[None]:
    """Turn what reading `source` raises, at the start or in the midst of a stream, into a `DataError`.

    Args:
        name: of the option that says so.
        only_reads: whether nothing else happens in the block, so that errors of values are the data's too.
    """
    try:
        yield
    except VGRError:
        raise
    except (DatasetNotFoundError, ConnectionError) as error:
        raise DataError(f"No data set is found at {source} ({error_text(error, 300)}): check {name}.") from error
    except (DatasetGenerationError, ArrowException, OSError, ValueError, RecursionError, StopIteration) as error:
        is_of_system = isinstance(error, OSError) and error.errno is not None  # a full disk for example
        is_of_data = isinstance(error, DatasetGenerationError | ArrowException | UnicodeError | DataFilesNotFoundError)
        if is_of_system or not (only_reads or is_of_data or isinstance(error, OSError)):
            raise
        cause = error_text(error.__cause__ or error, 300)
        raise DataError(f"{source} cannot be read ({cause}): check {name}, and that it is complete.") from error


def why_not_on_hub(name: str, kind: str) -> str | None:
    """Return why a model or a dataset (`kind`) is neither in the caches nor on the hub; None where it is.

    The hub is asked once: where it does not answer, its libraries ask six times for each file.
    """
    cached = Path(HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type=kind)
    if cached.exists() or (Path(HF_DATASETS_CACHE) / name.replace("/", "___")).exists():
        return None
    try:
        return None if repo_exists(name, repo_type=kind) else f"it has no {kind} {name}"
    except Exception as error:  # no connection, by whichever library of HTTP
        return error_text(error)


def read_files(paths: Sequence[Path]) -> Iterator[Record]:
    """Yield the rows of Parquet, JSONL, JSON and CSV files in order; of a broken line, why it is none.

    Raises:
        DataError: a file does not exist, is empty, of another kind, or cannot be read.
    """
    for path in paths:
        require_file(path, READERS)
        place = 0
        try:
            for place, row in READERS[path.suffix.lower()](path):
                yield Origin(str(path), place), row
        except (ArrowException, OSError, ValueError, OverflowError, RecursionError, csv.Error) as error:
            where = f"The file {path} cannot be read beyond row {place}"
            raise DataError(f"{where} ({error_text(error)}): check that it is complete.") from error


def require_file(path: Path, suffixes: Iterable[str]) -> None:
    """Raise `DataError` if a file does not exist, is empty, a folder, or of another kind than `suffixes`."""
    problem = None
    if path.is_dir():
        problem = f"is a folder: give its files ({path}/*), or the folder as dataset_path"
    elif path.suffix.lower() not in suffixes:
        problem = f"is none of {', '.join(suffixes)}"
    elif not path.is_file():
        problem = "does not exist"
    elif path.stat().st_size == 0:
        problem = "is empty"
    if problem is not None:
        raise DataError(f"The file {path} {problem}.")


def _parquet(path: Path) -> Rows:
    # Buffered, a column is read page by page: a file of one huge row group does not fill the memory.
    options = {"buffer_size": 2**20, "pre_buffer": False, "page_checksum_verification": True}
    with pyarrow.parquet.ParquetFile(path, **options) as file:
        yield from enumerate(
            row for batch in file.iter_batches(BATCH_ROWS, use_threads=False) for row in batch.to_pylist()
        )


def _jsonl(path: Path) -> Rows:
    with path.open("rb") as file:
        for place, line in enumerate(file):
            try:
                if text := line.decode("utf-8-sig").strip():
                    yield place, _object(json.loads(text))
            except UnicodeDecodeError:
                yield place, "the line is not UTF-8"
            except (ValueError, RecursionError) as error:
                yield place, f"the line is not JSON ({error})"


def _json(path: Path) -> Rows:
    """Yield a list of objects, or one object per line."""
    with path.open("rb") as file:
        is_list = file.read(1024).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"["
    yield from enumerate(map(_object, json.loads(path.read_text(encoding="utf-8-sig")))) if is_list else _jsonl(path)


def _csv(path: Path) -> Rows:
    """Yield rows under the names of the first line: every value a text, an empty one None."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        lines = csv.reader(file, strict=True)
        names = next(lines, [])
        if len(set(names)) != len(names) or "" in names:
            raise ValueError(f"its columns are {names}: give each a name of its own")
        for place, values in enumerate(line for line in lines if line):
            if len(values) == len(names):
                yield place, {name: text or None for name, text in zip(names, values, strict=True)}
            else:
                yield place, f"the line has {len(values)} values for {len(names)} columns"


READERS: dict[str, Callable[[Path], Rows]] = {".parquet": _parquet, ".jsonl": _jsonl, ".json": _json, ".csv": _csv}


def _object(value: Any) -> dict[str, Any] | str:
    if not isinstance(value, dict):
        return f"the row is a {type(value).__name__}, not an object with columns"
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:  # JSON may name half of a pair, as \\ud800, which no file could hold
        return f"its text {error.object[max(0, error.start - 10) : error.end]!a} has characters that are not Unicode"
    return value


@dataclass(frozen=True)
class Source:
    """One of a hub name, a folder and files, and which part of it.

    Attributes:
        dataset_name: name on the hub.
        dataset_path: folder with Parquet, JSONL, JSON or CSV files, at any depth, or written by `save_to_disk`.
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
        one_source(dataset_name=self.dataset_name, dataset_path=self.dataset_path, data_files=self.data_files)

    def __str__(self) -> str:
        return self.dataset_name or self.dataset_path or " ".join(self.data_files)

    def records(self, config: str | None = None) -> Iterator[Record]:
        """Yield the rows, images undecoded, of configuration `config` (None: the source's own).

        Raises:
            DataError: there is nothing to read, or it cannot be read.
        """
        config = config or self.config
        if self._is_table():
            return self._table_records(config)
        paths = self._paths(config)
        for path in paths:
            require_file(path, READERS)  # a missing file is named before the first row is worked on
        return read_files(paths)

    def identity(self) -> dict[str, Any]:
        """Return what the rows depend on: the names, and size and time of local files."""
        files = [path for _, path in self._named_files()]
        if self.dataset_path and not self._is_table():
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
            return self._named_files()[0][1].absolute().parent
        return Path(self.dataset_path or downloaded()).absolute()

    def _is_table(self) -> bool:
        return bool(self.dataset_name) or (bool(self.dataset_path) and is_saved(Path(str(self.dataset_path))))

    def _table_records(self, config: str | None) -> Iterator[Record]:
        with readable(self, "the name", only_reads=True):
            if self.dataset_name:
                rows = load_dataset(self.dataset_name, name=config, split=self.split, streaming=True)
            else:
                rows = load_from_disk(str(self.dataset_path))
            if isinstance(rows, DatasetDict):
                rows = split_of(rows, self.split, str(self))
            for number, row in enumerate(undecoded(rows)):
                yield Origin(str(self), number), row

    def _paths(self, config: str | None) -> list[Path]:
        if not self.data_files:
            return files_in(Path(str(self.dataset_path)), config, self.split)
        files = self._named_files()
        if config is None or (config == self.config and not any(name for name, _ in files)):
            return [path for _, path in files]
        paths = [path for name, path in files if name == config]
        if not paths:
            raise DataError(f"data_files names no {config}, which is needed too: give it as {config}=FILE.")
        return paths

    def _named_files(self) -> list[tuple[str | None, Path]]:
        """Return the files with the configuration that each is named for."""
        found = [re.fullmatch(r"(?:([\w-]+)=)?(.*)", file, re.DOTALL) for file in self.data_files]
        return [(match[1], Path(match[2])) for match in found if match]


def one_source(**given: Any) -> str:
    """Return which of the options is given; raise `ConfigError` unless it is exactly one."""
    names = [name for name, value in given.items() if value]
    if len(names) != 1:
        raise ConfigError(f"Data come from one of {', '.join(given)}, but {' and '.join(names) or 'none'} was given.")
    return names[0]


def split_of(loaded: Any, split: str, source: str) -> Any:
    """Return the rows of `split`; raise `MissingSplitError` if there is none."""
    if split not in loaded:
        raise MissingSplitError(source, sorted(loaded), split)
    return loaded[split]


def is_saved(folder: Path) -> bool:
    """Return whether `save_to_disk` has written `folder`."""
    return any((folder / name).exists() for name in SAVED)


def files_in(folder: Path, config: str | None, split: str) -> list[Path]:
    """Return the files of `folder` with rows of a configuration and a split, in the order of their names.

    Raises:
        DataError: there are none.
    """
    if not folder.is_dir():
        raise DataError(f"dataset_path is {folder}, which is not a folder; for single files use data_files.")
    files = [file for file in row_files(folder) if config is None or _is_of(file.relative_to(folder), config)]
    if not files:
        of = "" if config is None else f" of {config!r} in a subfolder of that name"
        raise DataError(f"{folder} has no {' or '.join(READERS)} file{of}.")
    words = splits_in(folder, files)
    return split_of(splits_of(files, folder), MEANT.get(split, split), str(folder)) if words else files


def splits_in(folder: Path, files: Sequence[Path] | None = None) -> list[str]:
    """Return the splits that the names of the files in `folder` say, none where they say nothing."""
    found = row_files(folder) if files is None else files
    return sorted({word for file in found for word in split_words(file, folder)[-1:]})


def splits_of(files: Sequence[Path], folder: Path) -> dict[str, list[Path]]:
    """Return split → files, as `datasets` names the splits; all are `train` where the names say nothing."""
    found: dict[str, list[Path]] = {}
    for file in files:
        for word in split_words(file, folder)[-1:]:
            found.setdefault(MEANT[word], []).append(file)
    return found or {"train": list(files)}


def has_config(folder: Path, config: str) -> bool:
    """Return whether `folder` has files of a configuration."""
    return any(_is_of(file.relative_to(folder), config) for file in row_files(folder))


def row_files(folder: Path) -> list[Path]:
    """Return the files with rows anywhere in `folder`, in the order of their names."""
    return sorted(
        path
        for path in folder.rglob("*")
        if path.suffix.lower() in READERS
        and path.is_file()
        and path.name != "skipped.jsonl"
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )


def _is_of(path: Path, config: str) -> bool:
    """Whether a file belongs to a configuration: by a folder of its name, or by how its own name starts."""
    return config in path.parts[:-1] or re.match(re.escape(config) + r"(?![a-zA-Z])", path.name) is not None


def split_words(path: Path, folder: Path) -> list[str]:
    """Return the words of a path within `folder` that name splits; the last decides (`train_val_split_train.jsonl`)."""
    return [word for word in re.split(r"[^a-z]+", str(path.relative_to(folder)).lower()) if word in MEANT]


def table_of(paths: Sequence[Path], with_folders: bool = False) -> Dataset:
    """Return the rows of JSON, JSONL and CSV files; a broken one has its reason in the column `UNREADABLE`.

    Args:
        with_folders: whether each row names the folder of its file in the column `FOLDER`.

    Raises:
        DataError: a file does not exist, is empty or cannot be read, or the files have no rows.
    """
    kinds: dict[str, set[Any]] = {}
    for row in _rows(paths, with_folders):
        for name, value in row.items():
            kinds.setdefault(name, set()).add(kind_of(value))
    if not kinds:
        raise DataError(f"{' and '.join(map(str, paths))} has no rows: give a file with at least one.")
    features = Features({name: feature_of(found) for name, found in kinds.items()})
    # Size and time, so that the cache of an older file is not found. Tuples: lists would be taken for shards.
    given = {
        "paths": tuple(path.absolute() for path in paths),
        "with_folders": with_folders,
        "mixed": tuple(name for name, feature in features.items() if isinstance(feature, Json)),
        "states": tuple((path.stat().st_size, path.stat().st_mtime_ns) for path in paths),
    }
    made = Dataset.from_generator(_rows, features=features, gen_kwargs=given)
    assert isinstance(made, Dataset)
    return made


def stream_of(paths: Sequence[Path], with_folders: bool = False) -> IterableDataset:
    """Return the rows of such files as a stream; a broken one has its reason under `UNREADABLE` alone."""
    given = {"paths": tuple(paths), "with_folders": with_folders}
    return IterableDataset.from_generator(_rows, gen_kwargs=given)


def _rows(
    paths: Sequence[Path], with_folders: bool, mixed: Sequence[str] = (), states: Any = None
) -> Iterator[dict[str, Any]]:
    """Yield the rows of files, columns of `mixed` as JSON; of a broken one its reason as `UNREADABLE`."""
    for origin, record in read_files(paths):
        row = {UNREADABLE: record} if isinstance(record, str) else {**record}
        row.pop(FOLDER, None)  # which only we say
        if with_folders and UNREADABLE not in row:
            row[FOLDER] = str(Path(origin.file).absolute().parent)
        yield {**row, **{name: as_json(row[name]) for name in mixed if name in row}}
