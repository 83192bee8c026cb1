"""The types of columns of JSON and CSV, every value of the type that it has in its file.

Arrow gives a column one type, so a column that mixes texts and numbers is kept as JSON, value by value.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow
from datasets import Dataset, DatasetInfo, Features, Json, List, Value, concatenate_datasets

TYPES = {str: "string", int: "int64", float: "float64", bool: "bool", type(None): "string"}

Kind = Any
"""A type of `TYPES`, [the kind of a list's items], {name: the kind of an object's value}, or `Mixed`."""


class Mixed:
    """The kind of values that have no one kind."""


def with_column(dataset: Dataset, name: str, values: Sequence[Any]) -> Dataset:
    """Return `dataset` with `values` as the column `name`, each of its own type, in place of one that is there."""
    kind: Kind = type(None)
    for value in values:
        kind = merged(kind, kind_of(value))
    feature = feature_of(kind)
    kept = dataset.remove_columns(name) if name in dataset.column_names else dataset
    if not isinstance(feature, Json):
        return kept.add_column(name, list(values), feature=feature)
    stored = pyarrow.array([as_json(value) for value in values], pyarrow.string())
    column = pyarrow.ExtensionArray.from_storage(pyarrow.json_(), stored)
    made = Dataset(pyarrow.table({name: column}), DatasetInfo(features=Features({name: feature})))
    return concatenate_datasets([kept, made], axis=1)


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


def feature_of(kind: Kind) -> Any:
    """Return the feature of a column whose values are of this kind."""
    if isinstance(kind, list):
        return List(feature_of(kind[0]))
    if isinstance(kind, dict):
        return {name: feature_of(inner) for name, inner in kind.items()}
    return Json() if kind is Mixed else Value(TYPES[kind])


def as_json(value: Any) -> str | None:
    """Return a value as `Json` stores it: what it is given as a text it takes for JSON."""
    return None if value is None else json.dumps(value)
