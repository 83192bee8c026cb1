"""Rows of files, one after the other, in memory that does not grow with the file."""

import csv
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import pyarrow.parquet
from pyarrow.lib import ArrowException

from vgr_trl.data.rows.questions import Origin, Record
from vgr_trl.errors import DataError, words_of

BATCH_ROWS = 16
LONGEST_LINE = 64 * 2**20  # bytes of one JSONL row; without a limit a file without line ends would fill the memory
OTHER_ENCODINGS = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}  # by the mark at the start of a file
WHITE_SPACE = b"\xef\xbb\xbf \t\r\n"  # with the mark that some editors put at the start of UTF-8


def read_files(paths: Sequence[Path]) -> Iterator[Record]:
    """Yield the rows of Parquet, JSONL, JSON and CSV files in order; of a broken line, why it is none.

    Raises:
        DataError: a file does not exist, is empty, of another kind, or cannot be read.
    """
    for path in paths:
        yield from reader_of(path)(path)


def reader_of(path: Path) -> Callable[[Path], Iterator[Record]]:
    """Return the reader of the file, by its suffix.

    Raises:
        DataError: it does not exist, is empty, a folder or of another kind.
    """
    reader = READERS.get(path.suffix.lower())
    if path.is_dir():
        raise DataError(f"The file {path} is a folder: give its files, or the folder as dataset_path.")
    if reader is None:
        raise DataError(f"The file {path} is none of {', '.join(READERS)}.")
    if not path.is_file():
        raise DataError(f"The file {path} does not exist.")
    if path.stat().st_size == 0:
        raise DataError(f"The file {path} is empty.")
    return reader


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
    _require_utf8(path)
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
    _require_utf8(path)
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
    _require_utf8(path)
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
        value = _loads(line)
    except UnicodeDecodeError:
        return "the line is not UTF-8"
    except (ValueError, RecursionError) as error:
        return f"the line is not JSON ({error})"
    return _object(value)


def _require_utf8(path: Path) -> None:
    try:
        with path.open("rb") as file:
            encoding = OTHER_ENCODINGS.get(file.read(2))
    except OSError as error:
        raise _unreadable(path, 0, error) from error
    if encoding is not None:
        raise DataError(f"The file {path} is written in {encoding}: save it as UTF-8.")


def _loads(data: bytes) -> Any:
    return json.loads(data.decode("utf-8-sig"), object_pairs_hook=_without_repetition, parse_int=_whole_number)


def _whole_number(digits: str) -> int:
    """Numbers beyond 64 bits have no place in a table; a reader that kept them as floats would change them."""
    if len(digits) > 20 or not -(2**63) <= int(digits) < 2**63:
        raise ValueError(f"the whole number {digits[:20]}… has more than 64 bits: write it as a text")
    return int(digits)


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """JSON lets the last of two equal names win, which would be a guess at what was meant."""
    found = dict(pairs)
    if len(found) != len(pairs):
        repeated = next(name for name, _ in pairs if [other for other, _ in pairs].count(name) > 1)
        raise ValueError(f"the name {repeated[:40]!a} occurs twice")
    return found


def _object(value: Any) -> dict[str, Any] | str:
    if not isinstance(value, dict):
        return f"the row is a {type(value).__name__}, not an object with columns"
    text = _not_unicode(value)
    return value if text is None else f"its text {text[:40]!a} has characters that are not Unicode"


def _not_unicode(value: Any) -> str | None:
    """The first text in a value that no file could hold: JSON may name half of a pair, as \\ud800."""
    if isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            return value
        return None
    items = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else ()
    return next((found for item in items if (found := _not_unicode(item)) is not None), None)


def _unreadable(path: Path, row: int, error: Exception) -> DataError:
    return DataError(f"The file {path} cannot be read beyond row {row} ({words_of(error)}): check that it is whole.")


READERS: dict[str, Callable[[Path], Iterator[Record]]] = {
    ".parquet": read_parquet,
    ".jsonl": read_jsonl,
    ".json": read_json,
    ".csv": read_csv,
}
