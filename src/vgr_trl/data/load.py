"""Load data from the hub, from folders and from files.

`datasets` reads Parquet, Arrow, saved data sets, image folders and the hub. JSON, JSONL and CSV are read here: their
readers in `datasets` give a column one type, so that "1" beside 1 becomes a number, 007 becomes 7 and NA nothing; and
one broken line stops them.
"""

import csv
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from glob import glob
from itertools import groupby
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
    load_dataset_builder,
    load_from_disk,
)
from datasets.exceptions import DataFilesNotFoundError, DatasetGenerationError, DatasetNotFoundError
from huggingface_hub import DatasetCard
from pyarrow.dataset import ParquetFragmentScanOptions
from pyarrow.lib import ArrowException

from vgr_trl.atomic_files import is_disk_full
from vgr_trl.data.images import FOLDER, downloaded, images_of, path_within, videos_of
from vgr_trl.data.prompts import PLACEHOLDER
from vgr_trl.data.read_row import DIALOGUES, KEYS, REWARD_MODEL, UNREADABLE, undecoded
from vgr_trl.errors import ConfigError, DataError, MissingSplitError, VGRError, error_text

MMMU_PRO = "MMMU/MMMU_Pro", "standard (10 options)"  # a hub name, and the configuration that is read by default
SAVED = ("dataset_dict.json", "dataset_info.json")  # written by `save_to_disk`
METADATA = ("metadata.jsonl", "metadata.csv")  # files of an image folder
BUILDERS = {".parquet": "parquet", ".jsonl": "text", ".json": "text", ".csv": "text", ".arrow": "arrow"}
MEANT = dict.fromkeys(("train", "training"), "train")  # word of a name → split, as `datasets` calls it
MEANT |= dict.fromkeys(("validation", "valid", "val", "dev"), "validation")
MEANT |= dict.fromkeys(("test", "testing", "eval", "evaluation"), "test")

Files = dict[str, list[Path]]  # by split
Check = Callable[[Any, str], object] | None  # takes the rows of a file, as a stream, and the name of the file


def load_split(
    split: str,
    *,
    dataset_name: str | None = None,
    dataset_config: str | None = None,
    dataset_path: str | None = None,
    data_files: str | Mapping[str, Sequence[Path]] | None = None,
    streaming: bool = False,
    with_folders: bool = True,
    check: Check = None,
) -> Dataset | IterableDataset:
    """Return a split of the data set that one of three sources names.

    Args:
        split: name of the split.
        dataset_name: name on the hub.
        dataset_config: configuration of a hub data set, or the subfolder or start of the file names that stands for it.
        dataset_path: folder with files of one kind, with images and metadata, or written by `save_to_disk`.
        data_files: argument or return value of `parse_data_files`. Parquet, JSON, JSONL, CSV or Arrow.
        streaming: whether to return a stream.
        with_folders: whether rows name the folder of their file in `FOLDER` if files of a split are in several folders.
        check: called for each of several files of different columns, before they are joined.

    Raises:
        ConfigError: not exactly one source is given, or `data_files` is malformed.
        DataError: the source or the split does not exist, cannot be read, or is empty.
    """
    sources = {"dataset_name": dataset_name, "dataset_path": dataset_path, "data_files": data_files}
    names = [name for name, value in sources.items() if value]
    if len(names) != 1:
        raise ConfigError(f"Give one of {', '.join(sources)}; given: {' and '.join(names) or 'none'}.")
    source: Any = sources[names[0]]
    with readable(source, names[0], only_reads=True):
        if dataset_path and not Path(dataset_path).is_dir():
            raise DataError(f"dataset_path is {dataset_path}, which is not a folder; for single files use data_files.")
        files = parse_data_files(data_files) if isinstance(data_files, str) else data_files
        splits = files or _find_splits(source, dataset_config, streaming)
        return _read(splits[_named_split(splits, split, str(source))], streaming, with_folders, check)


def load_path(
    path: str, split: str | None = None, *, config: str | None = None, streaming: bool = False, check: Check = None
) -> tuple[str, dict[str, Callable[[], Dataset | IterableDataset]]]:
    """Return the name of the chosen split, and for each split a function that loads it.

    Args:
        path: a file, a folder or a hub data set.
        split: name of the split; None: the only split, or `train`. The split of a file has any name.
        config: configuration of a hub data set.
        streaming: whether to load streams.
        check: check of a split, see `load_split`.

    Raises:
        DataError: the data or the split cannot be found or read, also when a split is loaded.
    """
    with readable(path, "the path", only_reads=True):
        is_file = Path(path).is_file()
        splits = {split or "train": [Path(path)]} if is_file else _find_splits(path, config, streaming)
        chosen = _named_split(splits, split or (next(iter(splits)) if len(splits) == 1 else "train"), path)

    def load(name: str) -> Any:
        with readable(path, "the path", only_reads=True):
            return _read(splits[name], streaming, check=check)

    return chosen, {name: partial(load, name) for name in splits}


def _find_splits(source: str, config: str | None, streaming: bool) -> Mapping[str, Any]:
    """Return the files, or the rows, of each split of a folder or a hub data set."""
    folder = Path(source)
    if not folder.is_dir():
        config = MMMU_PRO[1] if config is None and source == MMMU_PRO[0] else config
    elif any((folder / name).exists() for name in SAVED):
        saved = load_from_disk(source)
        return {"train": saved} if isinstance(saved, Dataset) else saved
    else:
        files, has_card = row_files(folder), _has_card_with_files(folder, config)
        if files and not has_card and not any(file.name in METADATA for file in files):
            if config:  # a subfolder, or how the names of files start
                start = re.compile(re.escape(config) + r"(?![a-zA-Z])")
                named = [f for f in files if config in f.relative_to(folder).parts[:-1] or start.match(f.name)]
                files = named or files
            if len({*map(_kind, files)}) > 1:  # JSON may describe the other files
                files = [file for file in files if file.suffix.lower() != ".json"]
            if len({*map(_kind, files)}) > 1:
                paths = " and ".join(map(str, files))[:500]
                raise DataError(f"{paths} are of different kinds: give the files to read as data_files.")
            return splits_of(files, folder)
    return cast("Mapping[str, Any]", load_dataset(source, name=config, streaming=streaming))


def _read(rows_or_files: Any, streaming: bool, with_folders: bool = True, check: Check = None) -> Any:
    """Return the rows of a split that `_find_splits` found."""
    if not isinstance(rows_or_files, list):
        return _checked(rows_or_files)
    for path in rows_or_files:
        if path.suffix.lower() not in BUILDERS or not path.is_file() or not path.stat().st_size:
            raise DataError(f"The file {path} does not exist, is empty, or is none of {', '.join(BUILDERS)}.")
    with_folders = with_folders and len({path.absolute().parent for path in rows_or_files}) > 1

    def group(path: Path) -> tuple[str, str | None]:
        return _kind(path), str(path.absolute().parent) if with_folders and _kind(path) != "text" else None

    tables = list[Any]()
    for (kind, folder), members in groupby(rows_or_files, group):
        paths = tuple(members)
        for path in paths if kind == "text" else paths[:1]:  # `datasets` wants the same columns in the others
            if check is not None and len(rows_or_files) > 1:
                check(undecoded(_read([path], streaming=True)), path.name)
        if kind == "text":
            args: dict[str, Any] = {"paths": paths, "with_folders": with_folders}
            tables.append(IterableDataset.from_generator(_rows, gen_kwargs=args) if streaming else _table_of(**args))
            continue
        options = dict[str, Any]()
        if kind == "parquet":  # written sets have checksums: a changed byte would be another row
            options["fragment_scan_options"] = ParquetFragmentScanOptions(page_checksum_verification=True)
        files = {"train": list(map(str, paths))}
        rows = _checked(load_dataset(kind, data_files=files, split="train", streaming=streaming, **options))
        if folder and streaming:
            rows = rows.map(partial(dict, **{FOLDER: folder}))
        elif folder:
            rows = rows.add_column(FOLDER, [folder] * len(rows))
        tables.append(rows)
    return concatenate_datasets(tables) if len(tables) > 1 else tables[0]


def _checked(rows: Any) -> Any:
    """Return rows that `datasets` has read, or raise `DataError` if it turned texts of mixed columns into numbers."""
    for name in (*KEYS["solution"], *KEYS["choices"]):
        feature = (rows.features or {}).get(name)
        if isinstance(feature.feature if isinstance(feature, List) else feature, Json):
            mixed = f"The column `{name}` mixes texts and numbers, which would all become numbers"
            raise DataError(f"{mixed}: give the JSONL files with data_files, or write the column as texts.")
    rows = rows.remove_columns([FOLDER]) if FOLDER in (rows.column_names or ()) else rows
    types = {name: kind for name, kind in (rows.features or {}).items() if name in (*DIALOGUES, "prompt", REWARD_MODEL)}
    return rows.map(lift_nested) if re.search("'(image|ground_truth)'", str(types)) else rows


def lift_nested(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return columns for values inside others: images in parts of messages (Qwen, unsloth) and verl's ground truth."""
    lifted, model = dict[str, Any](), row.get(REWARD_MODEL)
    if isinstance(model, Mapping) and model.get("ground_truth") is not None:
        lifted[f"{REWARD_MODEL}.ground_truth"] = model["ground_truth"]
    name = next((name for name in ("prompt", *DIALOGUES) if isinstance(row.get(name), list)), None)
    if name is None or images_of(row) or videos_of(row):
        return lifted
    images, turns = list[Any](), list[Any]()
    for turn in row[name]:
        parts = turn.get("content") if isinstance(turn, Mapping) else None
        if isinstance(parts, list):
            kinds = [part.get("type") if isinstance(part, Mapping) else None for part in parts]
            if not {*kinds} <= {"image", "text"}:
                return lifted
            images += [part["image"] for part in parts if part["type"] == "image" and part.get("image") is not None]
            texts = [PLACEHOLDER if part["type"] == "image" else str(part.get("text") or "") for part in parts]
            turn = {**turn, "content": "".join(texts)}
        turns.append(turn)
    return {**lifted, name: turns, "images": images} if images else lifted


# Where data lie


def parse_data_files(text: str) -> Files:
    """Return split → files for a text like `train=a.jsonl+b.jsonl,test=c.parquet`.

    Files without a split belong to `train`, a split may be named again, and `*` and `?` stand for any characters.

    Raises:
        ConfigError: the name of a split or file is missing.
    """
    files: Files = {}
    for part in text.split(","):
        name, path = part.split("=", 1) if "=" in part else ("train", part)
        names = [path.strip()] if Path(path.strip()).exists() else [part.strip() for part in path.split("+")]
        if not name.strip() or not all(names):
            raise ConfigError(f"data_files is {text!r}: give train=a.jsonl+b.jsonl,test=c.parquet.")
        for pattern in names:
            matching = sorted(glob(pattern)) if set(pattern) & set("*?") else []
            files.setdefault(name.strip(), []).extend(map(Path, matching or [pattern]))
    return files


def _named_split(splits: Mapping[str, Any], split: str, source: str) -> str:
    """Return the name of a split, also for another word with its meaning, or raise `MissingSplitError`."""
    name = split if split in splits else MEANT.get(split, split)
    if name not in splits:
        raise MissingSplitError(source, sorted(splits), split)
    return name


def splits_of(files: Sequence[Path], folder: Path) -> Files:
    """Return split → files by the last word of each path that names a split, or all files as `train`.

    `datasets` would put `train_val_split_train.jsonl` into two splits.
    """
    splits: Files = {}
    for file in files:
        words = re.split(r"[^a-z]+", str(file.relative_to(folder)).lower())
        for word in [word for word in words if word in MEANT][-1:]:
            splits.setdefault(MEANT[word], []).append(file)
    return splits or {"train": list(files)}


def row_files(folder: Path) -> list[Path]:
    """Return the files with rows anywhere in a folder, sorted by name, without hidden files."""
    files = (path for path in folder.rglob("*") if path.suffix.lower() in BUILDERS and path.is_file())
    hidden = re.compile(r"(^|/)\.|(^|/)skipped\.jsonl$")
    return sorted(path for path in files if not hidden.search(path.relative_to(folder).as_posix()))


def _kind(path: Path) -> str:
    return BUILDERS[path.suffix.lower()]


def _has_card_with_files(folder: Path, config: str | None) -> bool:
    """Return whether a card in a folder names files, or raise `DataError` if it names files outside the folder."""
    card, more = folder / "README.md", folder / ".huggingface.yaml"
    about = DatasetCard.load(card, ignore_metadata_errors=True).data.to_dict() if card.is_file() else {}
    about |= (yaml.safe_load(more.read_text(encoding="utf-8")) or {}) if more.is_file() else {}
    if not (configs := about.get("configs")):
        return False
    if "://" in str(configs):
        raise DataError(f"The data set card in {folder} names a URL: only files in the folder are read.")
    named = load_dataset_builder(str(folder), name=config).config.data_files or {}
    for file in (file for files in named.values() for file in files):
        try:
            path_within(folder.absolute(), file)
        except DataError as error:
            raise DataError(f"The data set card names {file[:200]}, which is outside {folder}.") from error
    return True


@contextmanager
def readable(source: Any, name: str, only_reads: bool = False) -> Iterator[None]:
    """Convert errors of reading data in this block into a `DataError`.

    Args:
        source: the data, for messages.
        name: the option that names the data.
        only_reads: whether the block only reads, so that a `ValueError` also comes from the data.
    """
    try:
        yield
    except VGRError:
        raise
    except (DatasetNotFoundError, ConnectionError) as error:
        raise DataError(f"No data set is found at {source} ({error_text(error, 300)}): check {name}.") from error
    except (DatasetGenerationError, ArrowException, OSError, ValueError, RecursionError, StopIteration) as error:
        cause, cache = error.__cause__ or error, downloaded()
        if is_disk_full(error) or (isinstance(cause, OSError) and str(cause.filename).startswith(str(cache))):
            problem = f"{cache}, the cache of data sets, cannot be written ({error_text(cause, 300)})"
            raise DataError(f"{problem}: free space there, or set HF_DATASETS_CACHE to another folder.") from error
        is_of_system = isinstance(error, OSError) and error.errno is not None
        of_data = (DatasetGenerationError, ArrowException, UnicodeError, DataFilesNotFoundError, OSError)
        if is_of_system or not (only_reads or isinstance(error, of_data)):
            raise
        hint = f"; or delete its copy in {cache}" if isinstance(error, ArrowException | OSError) else ""
        problem = f"{source} cannot be read ({error_text(cause, 300)})"
        raise DataError(f"{problem}: check {name}, and that it is complete{hint}.") from error


# JSON, JSONL and CSV

FEATURES = {str: Value("string"), int: Value("int64"), float: Value("float64"), bool: Value("bool"),
            "texts": List(Value("string"))}  # fmt: skip


def _table_of(paths: tuple[Path, ...], with_folders: bool) -> Dataset:
    """Return the rows of files, with mixed columns as JSON, and with the reason of a broken row in `UNREADABLE`."""
    kinds: dict[str, set[Any]] = {}
    for row in _rows(paths, with_folders):
        for name, value in row.items():
            is_texts = isinstance(value, list) and all(isinstance(item, str) for item in value)
            kinds.setdefault(name, set()).add("texts" if is_texts else type(value))
    if not kinds:
        raise DataError(f"{' and '.join(map(str, paths))} has no rows: give a file with at least one.")
    features = Features()
    for name, types in kinds.items():
        kind, *further_kinds = types - {type(None)} or {str}
        features[name] = Json() if further_kinds or kind not in FEATURES else FEATURES[kind]
    # Size and time, so that the cache of an older file is not found. Tuples: lists would be taken for shards.
    arguments = {
        "paths": tuple(path.absolute() for path in paths),
        "with_folders": with_folders,
        "mixed": tuple(name for name, feature in features.items() if isinstance(feature, Json)),
        "states": tuple((path.stat().st_size, path.stat().st_mtime_ns) for path in paths),
    }
    return cast("Dataset", Dataset.from_generator(_rows, features=features, gen_kwargs=arguments))


def _rows(
    paths: Sequence[Path], with_folders: bool, mixed: Sequence[str] = (), states: Any = None
) -> Iterator[dict[str, Any]]:
    """Yield the rows of files; `mixed` columns become JSON, a broken row its reason in `UNREADABLE`."""
    for path in paths:
        try:
            for row in _csv(path) if path.suffix.lower() == ".csv" else _json(path):
                row.pop(FOLDER, None)  # a row may not choose it
                if with_folders and UNREADABLE not in row:
                    row[FOLDER] = str(path.absolute().parent)
                row |= lift_nested(row)
                yield row | {name: json.dumps(row[name]) for name in mixed if row.get(name) is not None}
        except (OSError, ValueError, RecursionError, csv.Error) as error:
            problem = f"The file {path} cannot be read ({error_text(error)}): check that it is complete."
            raise DataError(problem) from error


def _json(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file with a list, or with an object in each line."""
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
    except UnicodeEncodeError:  # JSON may name half of a surrogate pair, which no file could hold
        return {UNREADABLE: "its text has characters that are not Unicode"}
    return value


def _csv(path: Path) -> Iterator[dict[str, Any]]:
    """Yield rows with the names of the first line, and texts as values, or None for an empty text."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.DictReader(file, strict=True)
        names = list(rows.fieldnames or ())
        if len(set(names)) != len(names) or "" in names:
            raise ValueError(f"its columns are {names}: give each column a different name")
        for row in rows:
            if None in row or None in row.values():  # DictReader's mark of a longer or a shorter line
                yield {UNREADABLE: "the line has another number of values than there are columns"}
            else:
                yield {name: text or None for name, text in row.items()}
