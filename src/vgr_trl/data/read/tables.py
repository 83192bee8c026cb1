"""Rows of JSON, JSONL and CSV files as a data set, every value of the type that it has in its file."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset, Features, IterableDataset, Json

from vgr_trl.data.read.readers import read_files
from vgr_trl.data.rows.columns import FOLDER, UNREADABLE
from vgr_trl.data.rows.kinds import Kind, as_json, feature_of, kind_of, merged
from vgr_trl.errors import DataError


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
