"""Load data from the hub, from folders and from files.

`datasets` reads Parquet, Arrow, saved data sets, image folders and the hub. JSON, JSONL and CSV are read here: their
readers in `datasets` give a column one type, so that "1" beside 1 becomes a number, 007 becomes 7 and NA nothing; and
one broken line stops them.
"""

import csv
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from glob import glob
from pathlib import Path
from typing import Any, cast

import yaml
from datasets import (
    Dataset,
    Features,
    IterableDataset,
    Json,
    List,
    Value,
    concatenate_datasets,
    load_dataset,
    load_from_disk,
)
from datasets.config import HF_DATASETS_CACHE
from datasets.exceptions import DataFilesNotFoundError, DatasetGenerationError, DatasetNotFoundError
from huggingface_hub import repo_exists
from huggingface_hub.constants import HF_HUB_CACHE
from huggingface_hub.file_download import repo_folder_name
from pyarrow.dataset import ParquetFragmentScanOptions
from pyarrow.lib import ArrowException

from vgr_trl.data.images import FOLDER, path_within
from vgr_trl.data.read_row import KEYS, UNREADABLE
from vgr_trl.utils import ConfigError, DataError, MissingSplitError, VGRError, error_text

MMMU_PRO = "MMMU/MMMU_Pro", "standard (10 options)"  # a hub name, and the configuration that is read by default
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
CARDS = ("README.md", ".huggingface.yaml")
SAVED = ("dataset_dict.json", "dataset_info.json")  # what `save_to_disk` leaves in a folder
METADATA = ("metadata.jsonl", "metadata.csv")  # what `datasets` knows of the images beside it
BUILDERS = {".parquet": "parquet", ".jsonl": "text", ".json": "text", ".csv": "text", ".arrow": "arrow"}
MEANT = dict.fromkeys(("train", "training"), "train")  # word of a name → split, as `datasets` calls it
MEANT |= dict.fromkeys(("validation", "valid", "val", "dev"), "validation")
MEANT |= dict.fromkeys(("test", "testing", "eval", "evaluation"), "test")

Files = dict[str, list[Path]]  # by split


def load_split(
    split: str,
    *,
    dataset_name: str | None = None,
    dataset_config: str | None = None,
    dataset_path: str | None = None,
    data_files: str | Mapping[str, Sequence[Path]] | None = None,
    streaming: bool = False,
    with_folders: bool = True,
) -> Dataset | IterableDataset:
    """Return one split of the data set that one of the three sources names.

    Args:
        dataset_config: configuration of a hub data set, or the subfolder or start of the file names that stands for it.
        dataset_path: folder with files of one kind, with images and metadata, or written by `save_to_disk`.
        data_files: as `parse_data_files` takes it, or returns it. Parquet, JSON, JSONL, CSV or Arrow.
        with_folders: whether rows name the folder of their file in the column `FOLDER` where files of a split lie in
            several.

    Raises:
        ConfigError: not exactly one source is given, or `data_files` is malformed.
        DataError: the source or the split does not exist, cannot be read, or is empty.
    """
    given = {"dataset_name": dataset_name, "dataset_path": dataset_path, "data_files": data_files}
    name = require_one_source(**given)
    with readable(given[name], name, only_reads=True):
        if data_files:
            files = parse_data_files(data_files) if isinstance(data_files, str) else data_files
            return _load_files(split_of(files, split, "data_files"), streaming, with_folders)
        source = str(given[name])
        splits = _splits(source, dataset_config, streaming, is_folder=dataset_path is not None)
        return _loaded(split_of(splits, split, source), streaming, with_folders)


def load_path(
    path: str, split: str | None = None, *, config: str | None = None, streaming: bool = False
) -> tuple[str, dict[str, Callable[[], Dataset | IterableDataset]]]:
    """Return which split of the file, the folder or the hub data set `path` is asked for, and how to load each.

    Args:
        path: a file as in `load_split`, a folder as there, or a name on the hub where there is neither.
        split: its name; None: `train`, or the only one. A file has one, of any name.

    Raises:
        DataError: there is nothing at `path`, it cannot be read, or the split is not known.
    """
    is_folder = bool(path) and Path(path).is_dir()
    with readable(path, "the path", only_reads=True):
        if Path(path).is_file():
            splits: Mapping[Any, Any] = {split or "train": [Path(path)]}
        elif is_folder or HUB_NAME.fullmatch(path):
            splits = _splits(path, config, streaming, is_folder)
        else:
            raise DataError(f"There is no file and no folder {path}: give one, or a name on the hub.")
        if split is None and "train" not in splits and len(splits) > 1:
            raise DataError(f"{path} has the splits {sorted(splits)}: name one of them.")
        chosen = split or ("train" if "train" in splits else next(iter(splits)))
        chosen = chosen if chosen in splits else MEANT.get(chosen, chosen)
        split_of(splits, chosen, path)
    return chosen, {name: partial(_readable_split, of, path, streaming) for name, of in splits.items()}


def _readable_split(of: Any, path: str, streaming: bool) -> Any:
    with readable(path, "the path", only_reads=True):
        return _loaded(of, streaming)


def _splits(source: str, config: str | None, streaming: bool, is_folder: bool) -> Mapping[Any, Any]:
    """Return the files, or the rows, of each split of a folder or a hub data set."""
    folder = Path(source)
    if not is_folder:
        if not folder.exists() and (why := why_not_on_hub(source, "dataset")) is not None:
            raise ConnectionError(why)
        config = MMMU_PRO[1] if config is None and source == MMMU_PRO[0] else config
        return cast("Files", _keeping_types(load_dataset(source, name=config, streaming=streaming), source))
    if not folder.is_dir():
        raise DataError(f"dataset_path is {folder}, which is not a folder; for single files use data_files.")
    if is_saved(folder):
        saved = load_from_disk(source)
        return {"train": saved} if isinstance(saved, Dataset) else saved
    files = row_files(folder)
    if not files or _has_card_with_files(folder) or any(file.name in METADATA for file in files):
        return cast("Files", _keeping_types(load_dataset(source, streaming=streaming), source))
    files = [file for file in files if config and _is_of(file.relative_to(folder), config)] or files
    if len({BUILDERS[file.suffix.lower()] for file in files}) > 1:
        files = [file for file in files if file.suffix.lower() != ".json"]  # which may be about the others
    if len({BUILDERS[file.suffix.lower()] for file in files}) > 1:
        found = " and ".join(map(str, files))[:500]
        raise DataError(f"Files of different kinds, {found}, are no one set: name those to read by data_files.")
    return splits_of(files, folder)


def _loaded(of: Any, streaming: bool, with_folders: bool = True) -> Any:
    """Return the rows of a split of `_splits`; they do not say themselves where their files lie."""
    if isinstance(of, list):
        return _load_files(of, streaming, with_folders)
    return of.remove_columns([FOLDER]) if FOLDER in (of.column_names or ()) else of


def _load_files(paths: Sequence[Path], streaming: bool, with_folders: bool = True) -> Any:
    for path in paths:
        require_file(path, BUILDERS)
    with_folders = with_folders and len({path.absolute().parent for path in paths}) > 1
    kinds = {BUILDERS[path.suffix.lower()] for path in paths}
    if kinds == {"text"}:
        return (_stream_of if streaming else _table_of)(paths, with_folders)
    if len(kinds) > 1 or with_folders:
        tables = [_load_file(path, streaming, with_folders) for path in paths]
        return concatenate_datasets(tables) if len(tables) > 1 else tables[0]
    files, options = {"train": list(map(str, paths))}, dict[str, Any]()
    if kinds == {"parquet"}:  # written sets have checksums: a changed byte would be another row
        options["fragment_scan_options"] = ParquetFragmentScanOptions(page_checksum_verification=True)
    rows = load_dataset(kinds.pop(), data_files=files, split="train", streaming=streaming, **options)
    return _loaded(_keeping_types(rows, paths[0]), streaming)


def _load_file(path: Path, streaming: bool, with_folders: bool) -> Any:
    rows = _load_files([path], streaming, with_folders=False)
    folder = str(path.absolute().parent)
    if not with_folders:
        return rows
    return rows.map(lambda row: {FOLDER: folder}) if streaming else rows.add_column(FOLDER, [folder] * len(rows))


def _keeping_types(loaded: Any, source: Any) -> Any:
    """Refuse a column that `datasets` has read as JSON because its types are mixed: there "1" has become 1."""
    for dataset in loaded.values() if isinstance(loaded, dict) else [loaded]:
        for name in (*KEYS.answer, *KEYS.choices):
            feature = (dataset.features or {}).get(name)
            if isinstance(feature.feature if isinstance(feature, List) else feature, Json):
                mixed = f"The column `{name}` of {source} mixes texts and numbers, which would all become numbers"
                raise DataError(f"{mixed}: give its JSONL files by data_files, or write the column as texts.")
    return loaded


# Where data lie


def require_one_source(**given: Any) -> str:
    """Return which of the options is given; raise `ConfigError` unless it is exactly one."""
    names = [name for name, value in given.items() if value]
    if len(names) != 1:
        raise ConfigError(f"Data come from one of {', '.join(given)}, but {' and '.join(names) or 'none'} was given.")
    return names[0]


def parse_data_files(text: str) -> Files:
    """Return split → files of `train=a.jsonl+b.jsonl,test=c.parquet`; a split may be named again for another file.

    A file without a split is of the split `train`. A name with `*` or `?` stands for the files that it fits.

    Raises:
        ConfigError: a split or a file has no name.
    """
    files: Files = {}
    for part in text.split(","):
        name, path = part.split("=", 1) if "=" in part else ("train", part)
        names = [path.strip()] if Path(path.strip()).exists() else [one.strip() for one in path.split("+")]
        if not name.strip() or not path.strip() or not all(names):
            raise ConfigError(f"data_files is {text!r}: give train=a.jsonl+b.jsonl,test=c.parquet.")
        for one in names:
            files.setdefault(name.strip(), []).extend(map(Path, (set(one) & set("*?") and sorted(glob(one))) or [one]))
    return files


def split_of(splits: Any, split: str, source: str) -> Any:
    """Return what belongs to `split`, also by another word for it; raise `MissingSplitError` if there is none."""
    name = split if split in splits else MEANT.get(split, split)
    if name not in splits:
        raise MissingSplitError(source, sorted(splits), split)
    return splits[name]


def is_saved(folder: Path) -> bool:
    """Return whether `save_to_disk` has written `folder`."""
    return any((folder / name).exists() for name in SAVED)


def splits_of(files: Sequence[Path], folder: Path) -> Files:
    """Return split → files by the last word of each path that names a split; all are `train` where none does.

    `datasets` would put `train_val_split_train.jsonl` into two splits.
    """
    found: Files = {}
    for file in files:
        words = re.split(r"[^a-z]+", str(file.relative_to(folder)).lower())
        for word in [word for word in words if word in MEANT][-1:]:
            found.setdefault(MEANT[word], []).append(file)
    return found or {"train": list(files)}


def row_files(folder: Path) -> list[Path]:
    """Return the files with rows anywhere in `folder`, in the order of their names."""
    return sorted(
        path
        for path in folder.rglob("*")
        if path.suffix.lower() in BUILDERS
        and path.is_file()
        and path.name != "skipped.jsonl"
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )


def has_config(folder: Path, config: str) -> bool:
    """Return whether `folder` has files of a configuration."""
    return any(_is_of(file.relative_to(folder), config) for file in row_files(folder))


def _is_of(path: Path, config: str) -> bool:
    """Whether a file belongs to a configuration: by a folder of its name, or by how its own name starts."""
    return config in path.parts[:-1] or re.match(re.escape(config) + r"(?![a-zA-Z])", path.name) is not None


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


def _has_card_with_files(folder: Path) -> bool:
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


# JSON, JSONL and CSV

FEATURES = {
    str: Value("string"), int: Value("int64"), float: Value("float64"), bool: Value("bool"), list: List(Value("string"))
}  # fmt: skip


def _table_of(paths: Sequence[Path], with_folders: bool) -> Dataset:
    """Return the rows of files; a broken one has its reason in the column `UNREADABLE`, mixed columns become JSON."""
    kinds: dict[str, set[Any]] = {}
    for row in _rows(paths, with_folders):
        for name, value in row.items():
            is_texts = isinstance(value, list) and all(isinstance(item, str) for item in value)
            kinds.setdefault(name, set()).add(list if is_texts else Json if isinstance(value, list) else type(value))
    if not kinds:
        raise DataError(f"{' and '.join(map(str, paths))} has no rows: give a file with at least one.")
    found = {name: {*values} - {type(None)} or {str} for name, values in kinds.items()}
    features = {name: FEATURES.get(next(iter(of)), Json()) if len(of) == 1 else Json() for name, of in found.items()}
    # Size and time, so that the cache of an older file is not found. Tuples: lists would be taken for shards.
    given = {
        "paths": tuple(path.absolute() for path in paths),
        "with_folders": with_folders,
        "mixed": tuple(name for name, feature in features.items() if isinstance(feature, Json)),
        "states": tuple((path.stat().st_size, path.stat().st_mtime_ns) for path in paths),
    }
    return cast("Dataset", Dataset.from_generator(_rows, features=Features(features), gen_kwargs=given))


def _stream_of(paths: Sequence[Path], with_folders: bool) -> IterableDataset:
    return IterableDataset.from_generator(_rows, gen_kwargs={"paths": tuple(paths), "with_folders": with_folders})


def _rows(
    paths: Sequence[Path], with_folders: bool, mixed: Sequence[str] = (), states: Any = None
) -> Iterator[dict[str, Any]]:
    """Yield the rows of files, columns of `mixed` as JSON; of a broken one its reason as `UNREADABLE`."""
    for path in paths:
        try:
            for row in _csv(path) if path.suffix.lower() == ".csv" else _json(path):
                row.pop(FOLDER, None)  # which only we say
                if with_folders and UNREADABLE not in row:
                    row[FOLDER] = str(path.absolute().parent)
                texts = {name: None if row[name] is None else json.dumps(row[name]) for name in mixed if name in row}
                yield {**row, **texts}
        except (OSError, ValueError, RecursionError, csv.Error) as error:
            problem = f"The file {path} cannot be read ({error_text(error)}): check that it is complete."
            raise DataError(problem) from error


def _json(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a list, or of one line each."""
    with path.open("rb") as file:
        is_list = file.read(1024).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"["
        file.seek(0)
        if is_list and path.suffix.lower() == ".json":
            yield from map(_object, json.loads(file.read().decode("utf-8-sig")))
            return
        for line in file:
            try:
                if text := line.decode("utf-8-sig").strip():
                    yield _object(json.loads(text))
            except UnicodeDecodeError:
                yield {UNREADABLE: "the line is not UTF-8"}
            except (ValueError, RecursionError) as error:
                yield {UNREADABLE: f"the line is not JSON ({error})"}


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        return {UNREADABLE: f"the row is a {type(value).__name__}, not an object with columns"}
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:  # JSON may name half of a pair, as \\ud800, which no file could hold
        text = f"{error.object[max(0, error.start - 10) : error.end]!a}"
        return {UNREADABLE: f"its text {text} has characters that are not Unicode"}
    return value


def _csv(path: Path) -> Iterator[dict[str, Any]]:
    """Yield rows under the names of the first line: every value a text, an empty one None."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        lines = csv.reader(file, strict=True)
        names = next(lines, [])
        if len(set(names)) != len(names) or "" in names:
            raise ValueError(f"its columns are {names}: give each a name of its own")
        for values in filter(None, lines):
            if len(values) == len(names):
                yield {name: text or None for name, text in zip(names, values, strict=True)}
            else:
                yield {UNREADABLE: f"the line has {len(values)} values for {len(names)} columns"}
