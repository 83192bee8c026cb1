"""Rows from files, folders and the hub, in memory that does not grow with their number."""

import csv
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import IO, Any

import pyarrow.parquet
import yaml
from datasets import Dataset, DatasetDict, Features, IterableDataset, Json, load_dataset, load_from_disk
from datasets.config import HF_DATASETS_CACHE
from datasets.exceptions import (
    DataFilesNotFoundError,
    DatasetGenerationError,
    DatasetNotFoundError,
    DatasetsError,
)
from huggingface_hub import get_hf_file_metadata, hf_hub_url
from huggingface_hub.constants import HF_HUB_CACHE
from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, HfHubHTTPError, RepositoryNotFoundError
from huggingface_hub.file_download import repo_folder_name
from pyarrow.lib import ArrowException

from vgr_trl.data.columns import (
    FOLDER,
    UNREADABLE,
    Kind,
    Origin,
    Record,
    as_json,
    feature_of,
    kind_of,
    merged,
    undecoded,
)
from vgr_trl.data.images import downloaded, path_within
from vgr_trl.utils import ConfigError, DataError, VGRError, error_text

HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
CARDS = ("README.md", ".huggingface.yaml")
BATCH_ROWS = 16
LONGEST_LINE = 64 * 2**20  # bytes of one JSONL row; without a limit a file without line ends would fill the memory
WHITE_SPACE = b"\xef\xbb\xbf \t\r\n"  # with the mark that some editors put at the start of UTF-8
SAVED = ("dataset_dict.json", "dataset_info.json")  # what `save_to_disk` leaves in a folder
MEANT = dict.fromkeys(("train", "training"), "train")  # word of a name -> split, as `datasets` calls it
MEANT |= dict.fromkeys(("validation", "valid", "val", "dev"), "validation")
MEANT |= dict.fromkeys(("test", "testing"), "test")


def read_card(folder: Path) -> dict[str, list[str]]:
    """Return which files and folders the cards of a local data set name: `datasets` would read them wherever they are.

    Raises:
        DataError: one lies outside of `folder`, or is an address.
    """
    found: dict[str, list[str]] = {}
    for name in CARDS:
        try:
            text = (folder / name).read_text(encoding="utf-8")
            head = re.match(r"\s*---\n+(.*?)\n+---(?:\n|$)", text, re.DOTALL) if name.endswith(".md") else None
            said = yaml.safe_load((head[1] if head else "") if name.endswith(".md") else text)
        except (OSError, UnicodeError, yaml.YAMLError):  # `datasets` has its own words for these
            continue
        configs = said.get("configs") if isinstance(said, dict) else None
        for config in filter(lambda config: isinstance(config, dict), configs if isinstance(configs, list) else []):
            found.setdefault(name, []).extend(_texts([config.get("data_files"), config.get("data_dir")]))
    for name, files in found.items():
        for file in files:
            try:
                if "://" in file:
                    raise DataError(f"{file} is an address")
                path_within(folder.absolute(), file)
            except DataError as error:
                raise DataError(
                    f"{name} of {folder} says that its rows are in {file[:200]}, which is not in that folder, and is "
                    "not read: remove that, or give the files by data_files."
                ) from error
    return found


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for one in value:
            yield from _texts(one)
    elif isinstance(value, dict):
        yield from _texts([one for name, one in value.items() if name != "split"])


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
    for split, paths in files.items():
        if len({path.resolve() for path in paths}) != len(paths):
            raise ConfigError(f"data_files is {text!r}, which names a file of {split} twice: name each once.")
    return files


@contextmanager
def readable(source: str | None, name: str, only_reads: bool = False) -> Iterator[None]:
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
        cause = error.__cause__ or error
        raise DataError(
            f"{source} cannot be read ({error_text(cause, 300)}): check {name}, and that it is complete."
        ) from error


def why_not_on_hub(name: str, kind: str) -> str | None:
    """Return why a model or a dataset (`kind`) is neither in the caches nor on the hub; None where it is.

    The hub is asked once: where it does not answer, its libraries ask six times for each file.
    """
    cached = Path(HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type=kind)
    if cached.exists() or (Path(HF_DATASETS_CACHE) / name.replace("/", "___")).exists():
        return None
    try:
        get_hf_file_metadata(hf_hub_url(name, "README.md", repo_type=kind))
    except EntryNotFoundError:
        return None
    except HfHubHTTPError as error:
        is_missing = isinstance(error, RepositoryNotFoundError) and not isinstance(error, GatedRepoError)
        return f"it has no {kind} {name}" if is_missing else None
    except Exception as error:  # no connection, by whichever library of HTTP
        return " ".join(str(error).split())[:200] or type(error).__name__
    return None


def read_files(paths: Sequence[Path]) -> Iterator[Record]:
    """Yield the rows of Parquet, JSONL, JSON and CSV files in order; of a broken line, why it is none.

    Raises:
        DataError: a file does not exist, is empty, of another kind, or cannot be read.
    """
    for path in paths:
        require_file(path, READERS)
        yield from READERS[path.suffix.lower()](path)


def require_file(path: Path, suffixes: Iterable[str]) -> None:
    """Raise `DataError` if a file does not exist, is empty, a folder or of another kind than `suffixes`."""
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


def count_rows(paths: Sequence[Path]) -> int | None:
    """Return how many rows the files have, None where that is not known without reading them."""
    if any(path.suffix.lower() != ".parquet" for path in paths):
        return None
    try:
        return sum(int(pyarrow.parquet.read_metadata(path).num_rows) for path in paths)
    except (ArrowException, OSError, ValueError):
        return None  # the reader says why


def read_parquet(path: Path) -> Iterator[Record]:
    """Yield the rows of a Parquet file; see `read_files`."""
    row = 0
    try:
        # Buffered, a column is read page by page: a file of one huge row group does not fill the memory.
        with pyarrow.parquet.ParquetFile(
            path, buffer_size=2**20, pre_buffer=False, page_checksum_verification=True
        ) as file:
            for batch in file.iter_batches(BATCH_ROWS, use_threads=False):
                for record in batch.to_pylist():
                    yield Origin(str(path), row), record
                    row += 1
    except (ArrowException, OSError, ValueError, OverflowError) as error:
        raise _unreadable(path, row, error) from error


def read_jsonl(path: Path) -> Iterator[Record]:
    """Yield the rows of a file with one JSON object per line; empty lines are passed over."""
    row = 0
    try:
        with path.open("rb") as file:
            for row, line in enumerate(_lines(file)):
                if line is None:
                    yield Origin(str(path), row), f"the line has more than {LONGEST_LINE} bytes"
                elif line.strip(WHITE_SPACE):
                    yield Origin(str(path), row), parse_object(line)
    except OSError as error:
        raise _unreadable(path, row, error) from error


def _lines(file: IO[bytes]) -> Iterator[bytes | None]:
    """Yield the lines of `file`, None for one that is too long to be kept."""
    while line := file.readline(LONGEST_LINE):
        if len(line) < LONGEST_LINE or line.endswith(b"\n"):
            yield line
            continue
        while (rest := file.readline(LONGEST_LINE)) and not rest.endswith(b"\n"):
            pass
        yield None


def read_json(path: Path) -> Iterator[Record]:
    """Yield the rows of a JSON file: a list of objects, or one object per line."""
    try:
        with path.open("rb") as file:
            start = file.read(1024).lstrip(WHITE_SPACE)[:1]
        if start != b"[":
            yield from read_jsonl(path)
            return
        rows = _loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise _unreadable(path, 0, error) from error
    for row, value in enumerate(rows):
        yield Origin(str(path), row), _object(value)


def read_csv(path: Path) -> Iterator[Record]:
    """Yield the rows of a CSV file under the names of its first line: every value a text, an empty one None."""
    row, limit = 0, csv.field_size_limit(LONGEST_LINE)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines = csv.reader(file, strict=True)
            names = next(lines, [])
            if len(set(names)) != len(names) or "" in names:
                raise DataError(f"The file {path} names its columns {names}: give each a name of its own.")
            for row, values in enumerate(line for line in lines if line):
                if len(values) == len(names):
                    yield Origin(str(path), row), {name: text or None for name, text in zip(names, values, strict=True)}
                else:
                    yield Origin(str(path), row), f"the line has {len(values)} values for {len(names)} columns"
    except (OSError, UnicodeError, csv.Error) as error:
        raise _unreadable(path, row, error) from error
    finally:
        csv.field_size_limit(limit)


def parse_object(line: bytes) -> dict[str, Any] | str:
    """Return the JSON object that `line` holds, or in one sentence why it holds none."""
    try:
        return _object(_loads(line))
    except UnicodeDecodeError:
        return "the line is not UTF-8"
    except (ValueError, RecursionError) as error:
        return f"the line is not JSON ({error})"


def _loads(data: bytes) -> Any:
    return json.loads(data.decode("utf-8-sig"), parse_int=_integer)


def _integer(digits: str) -> int:
    """Numbers beyond 64 bits have no place in a table; a reader that kept them as floats would change them."""
    if len(digits) > 20 or not -(2**63) <= int(digits) < 2**63:
        raise ValueError(f"the integer {digits[:20]}… has more than 64 bits: write it as a text")
    return int(digits)


def _object(value: Any) -> dict[str, Any] | str:
    if not isinstance(value, dict):
        return f"the row is a {type(value).__name__}, not an object with columns"
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:  # JSON may name half of a pair, as \\ud800, which no file could hold
        return f"its text {error.object[max(0, error.start - 10) : error.end]!a} has characters that are not Unicode"
    return value


def _unreadable(path: Path, row: int, error: Exception) -> DataError:
    return DataError(
        f"The file {path} cannot be read beyond row {row} ({error_text(error)}): check that it is complete."
    )


READERS: dict[str, Callable[[Path], Iterator[Record]]] = {
    ".parquet": read_parquet,
    ".jsonl": read_jsonl,
    ".json": read_json,
    ".csv": read_csv,
}


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
            return _dataset_records(self.dataset_name, self._from_hub, config)
        if self._is_saved():
            return _dataset_records(str(self.dataset_path), self._from_disk, config)
        paths = self._paths(config)
        for path in paths:
            require_file(path, READERS)  # a missing file is named before the first row is worked on
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

    def _from_hub(self, config: str | None) -> Any:
        return load_dataset(str(self.dataset_name), name=config, split=self.split, streaming=True)

    def _from_disk(self, config: str | None) -> Any:
        saved = load_from_disk(str(self.dataset_path))
        if isinstance(saved, DatasetDict) and self.split not in saved:
            raise DataError(f"{self} has the splits {sorted(saved)}, but not {self.split!r}: name one of them.")
        return saved[self.split] if isinstance(saved, DatasetDict) else saved

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


def _dataset_records(name: str, load: Callable[[str | None], Any], config: str | None) -> Iterator[Record]:
    """Yield the rows of what `load` gives, images undecoded."""
    number = 0
    try:
        for number, row in enumerate(undecoded(load(config))):
            yield Origin(name, number), row
    except DataError:
        raise
    except (DatasetsError, ArrowException, AttributeError, KeyError, OSError, RuntimeError, TypeError, ValueError) as e:
        raise DataError(
            f"{name} cannot be read beyond row {number} ({error_text(e, 300)}): "
            "check the name, and that it is complete."
        ) from e


def table_of(paths: Sequence[Path], with_folders: bool = False) -> Dataset:
    """Return the rows of JSON, JSONL and CSV files; a broken one has its reason in the column `UNREADABLE`.

    Args:
        with_folders: whether each row names the folder of its file in the column `FOLDER`.

    Raises:
        DataError: a file does not exist, is empty or cannot be read, or the files have no rows.
    """
    kinds: dict[str, Kind] = {}
    for row in rows_of(paths, with_folders):
        for name, value in row.items():
            kinds[name] = merged(kinds.get(name, type(None)), kind_of(value))
    if not kinds:
        raise DataError(f"{' and '.join(map(str, paths))} has no rows: give a file with at least one.")
    features = Features({name: feature_of(kind) for name, kind in kinds.items()})
    files = [(str(path.absolute()), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    mixed = tuple(name for name, feature in features.items() if isinstance(feature, Json))
    # Tuples: lists would be taken for shards, each to be read on its own.
    given = {"files": tuple(files), "mixed": mixed, "with_folders": with_folders}
    made = Dataset.from_generator(_stored, features=features, gen_kwargs=given)
    assert isinstance(made, Dataset)
    return made


def stream_of(paths: Sequence[Path], with_folders: bool = False) -> IterableDataset:
    """Return the rows of such files as a stream; a broken one has its reason under `UNREADABLE` alone."""
    given = {"paths": tuple(paths), "with_folders": with_folders}
    return IterableDataset.from_generator(rows_of, gen_kwargs=given)


def rows_of(paths: Sequence[Path], with_folders: bool = False) -> Iterator[dict[str, Any]]:
    """Yield the rows of files, and under `UNREADABLE` the reason where there is none."""
    for origin, record in read_files(paths):
        if isinstance(record, str):
            yield {UNREADABLE: record}
        else:
            row = {name: value for name, value in record.items() if name != FOLDER}
            yield {**row, FOLDER: str(Path(origin.file).absolute().parent)} if with_folders else row


def _stored(
    files: Sequence[tuple[str, int, int]], mixed: Sequence[str], with_folders: bool
) -> Iterator[dict[str, Any]]:
    """The rows as they are stored; size and time of the files are given so that those of an older file are not found.

    What `Json` is given as a text it takes for JSON, so the text "1" has to be written as JSON first.
    """
    for row in rows_of([Path(name) for name, _, _ in files], with_folders):
        yield {**row, **{name: as_json(row[name]) for name in mixed if name in row}}
