"""Rows that were left out, and the file that lists them."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers.utils import logging

logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class SkippedRow:
    """A row that was left out."""

    split: str
    row: int
    id: Any
    reason: str


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
