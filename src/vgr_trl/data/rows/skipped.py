"""Rows that were left out, and the file that lists them."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers.utils import logging

from vgr_trl.errors import DataError

logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class SkippedRow:
    """A row that was left out."""

    split: str
    row: int
    id: Any
    reason: str


def skipped_rows(
    split: str, reasons: Sequence[str | None], ids: Sequence[Any] | None = None, places: Sequence[int] | None = None
) -> list[SkippedRow]:
    """Return the rows that something speaks against.

    Args:
        reasons: why each row of the split cannot be used, None where it can.
        ids, places: of the rows; None: where they stand.

    Raises:
        DataError: no row is left.
    """
    places = range(len(reasons)) if places is None else places
    ids = places if ids is None else ids
    skipped = [
        SkippedRow(split, places[row], ids[row], reason) for row, reason in enumerate(reasons) if reason is not None
    ]
    if len(skipped) == len(reasons):
        raise DataError(
            f"None of the {len(reasons)} rows of the {split} data can be used; the first: {skipped[0].reason}."
        )
    return skipped


def report_skipped(skipped: Sequence[SkippedRow], path: Path) -> None:
    """Write the rows left out to `path`, one JSON object per line, and warn with the count and the first reason."""
    if not skipped:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(_json_line(row) for row in skipped), encoding="utf-8")
    logger.warning(
        f"Left out {len(skipped)} rows that cannot be used, listed with their reasons in {path}; the first: "
        f"{skipped[0].split} row {skipped[0].row}: {skipped[0].reason}."
    )


def append_skipped(row: SkippedRow, path: Path) -> None:
    """Add a row that a stream left out to `path`, and warn."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(_json_line(row))
    logger.warning(f"Left out {row.split} row {row.row}, listed in {path}: {row.reason}.")


def _json_line(row: SkippedRow) -> str:
    return json.dumps(asdict(row), default=str) + "\n"
