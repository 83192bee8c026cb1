"""Rows of JSON, JSONL and CSV files as a data set, every value of the type that it has in its file.

Arrow gives a column one type, so a column that mixes texts and numbers is kept as JSON, value by value.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
from datasets import Dataset, DatasetInfo, Features, IterableDataset, Json, List, Value, concatenate_datasets

from vgr_trl.data.read.readers import FOLDER, UNREADABLE, read_files
from vgr_trl.errors import DataError

TYPES = {str: "string", int: "int64", float: "float64", bool: "bool", type(None): "string"}

Kind = Any
"""A type of `TYPES`, [the kind of a list's items], {name: the kind of an object's value}, or `Mixed`."""


class Mixed:
    """The kind of values that have no one kind."""


def table_of(paths: Sequence[Path], with_folders: bool = False) -> Dataset:
    """Return the rows of JSON, JSONL and CSV files; a broken one has its reason in the column `UNREADABLE`.

    Args:
        paths: the files.
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
    features = Features({name: _feature(kind) for name, kind in kinds.items()})
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


def with_column(dataset: Dataset, name: str, values: Sequence[Any]) -> Dataset:
    """Return `dataset` with `values` as the column `name`, each of its own type, in place of one that is there."""
    kind: Kind = type(None)
    for value in values:
        kind = merged(kind, kind_of(value))
    feature = _feature(kind)
    kept = dataset.remove_columns(name) if name in dataset.column_names else dataset
    if not isinstance(feature, Json):
        return kept.add_column(name, list(values), feature=feature)
    stored = pyarrow.array([_as_json(value) for value in values], pyarrow.string())
    column = pyarrow.ExtensionArray.from_storage(pyarrow.json_(), stored)
    made = Dataset(pyarrow.table({name: column}), DatasetInfo(features=Features({name: feature})))
    return concatenate_datasets([kept, made], axis=1)


def rows_of(paths: Sequence[Path], with_folders: bool = False) -> Iterator[dict[str, Any]]:
    """Yield the rows of files, and under `UNREADABLE` the reason where there is none."""
    for origin, record in read_files(paths):
        if isinstance(record, str):
            yield {UNREADABLE: record}
        else:
            yield {**record, FOLDER: str(Path(origin.file).absolute().parent)} if with_folders else dict(record)


def kind_of(value: Any) -> Kind:
    """Return the kind of a value out of JSON."""
    if isinstance(value, list):
        found: Kind = type(None)
        for item in value:
            found = merged(found, kind_of(item))
        return Mixed if found is Mixed else [found]
    if isinstance(value, Mapping):
        kinds = {name: kind_of(item) for name, item in value.items()}
        return Mixed if not kinds or Mixed in kinds.values() else kinds
    return type(value)


def merged(one: Kind, other: Kind) -> Kind:
    """Return the kind of a column with values of both; objects have one only if they have the same names."""
    if one is type(None) or one is other:
        return other
    if other is type(None):
        return one
    if isinstance(one, list) and isinstance(other, list):
        inner = merged(one[0], other[0])
        return Mixed if inner is Mixed else [inner]
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        kinds = {name: merged(one[name], other[name]) for name in one}
        return Mixed if Mixed in kinds.values() else kinds
    return Mixed


def _feature(kind: Kind) -> Any:
    if isinstance(kind, list):
        return List(_feature(kind[0]))
    if isinstance(kind, dict):
        return {name: _feature(inner) for name, inner in kind.items()}
    return Json() if kind is Mixed else Value(TYPES[kind])


def _stored(
    files: Sequence[tuple[str, int, int]], mixed: Sequence[str], with_folders: bool
) -> Iterator[dict[str, Any]]:
    """The rows as they are stored; size and time of the files are given so that those of an older file are not found.

    What `Json` is given as a text it takes for JSON, so the text "1" has to be written as JSON first.
    """
    for row in rows_of([Path(name) for name, _, _ in files], with_folders):
        yield {**row, **{name: _as_json(row[name]) for name in mixed if name in row}}


def _as_json(value: Any) -> str | None:
    return None if value is None else json.dumps(value)
