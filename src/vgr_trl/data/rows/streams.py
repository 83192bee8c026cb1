"""A stream of rows, from which those that cannot be used are left out as it is read."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from datasets import IterableDataset
from transformers.utils import logging

from vgr_trl.data.rows.columns import PLACE, UNREADABLE, undecoded
from vgr_trl.data.rows.naming import renamed_row, require_columns
from vgr_trl.data.rows.reading import Keys
from vgr_trl.data.rows.skipped import SkippedRow
from vgr_trl.errors import DataError

logger = logging.get_logger(__name__)

SHUFFLE_BUFFER = 1000  # rows of a stream that wait, their images undecoded


def prepare_stream(
    dataset: IterableDataset,
    split: str,
    needs_solution: bool,
    keys: Keys,
    examine: Callable[[Mapping[str, Any]], str | None],
    ready: Callable[[Mapping[str, Any]], dict[str, Any]],
    gone: Sequence[str],
    on_skipped: Callable[[SkippedRow], None] | None,
    shuffle_seed: int | None,
) -> IterableDataset:
    """Return `dataset` with its rows made ready, and without those that cannot be used.

    Args:
        examine: tells why an undecoded row cannot be used, None if it can.
        ready: makes a usable undecoded row ready.
        gone: columns that a ready row does not have, unless it has them anew.
        on_skipped: called once for each row that is left out; None: a warning.
        shuffle_seed: draw each row from the next `SHUFFLE_BUFFER`, undecoded; None: keep the order.

    Raises:
        DataError: the stream has no rows, lacks the needed columns, or no row can be used.
    """
    first = next(iter(undecoded(dataset)), None)
    if first is None:
        raise DataError(f"The {split} stream has no rows: give a data set with at least one.")
    first = next((row for row in undecoded(dataset) if row.get(UNREADABLE) is None), first)
    if first.get(UNREADABLE) is None:
        require_columns(first, split, needs_solution, keys, dataset.features)
    sieve = Sieve(split, examine, on_skipped)

    def usable(row: Mapping[str, Any]) -> bool:
        return sieve.keeps(row, row[PLACE])

    # Without the old columns, a map keeps those that have another name now.
    numbered = undecoded(dataset).map(partial(_numbered, keys=keys), with_indices=True, remove_columns=list(first))
    sieve.require_row(numbered.filter(usable))
    if shuffle_seed is not None:
        numbered = numbered.shuffle(seed=shuffle_seed, buffer_size=SHUFFLE_BUFFER)
    return numbered.filter(usable).map(ready, remove_columns=list(gone))


class Sieve:
    """What rows of a stream are left out by, each told once however often the stream is read.

    Args:
        split: its name, for messages.
        examine, on_skipped: as in `prepare_stream`.
    """

    def __init__(
        self,
        split: str,
        examine: Callable[[Mapping[str, Any]], str | None],
        on_skipped: Callable[[SkippedRow], None] | None = None,
    ) -> None:
        self.split, self.examine, self.on_skipped = split, examine, on_skipped
        self._heard: set[Any] = set()

    def keeps(self, row: Mapping[str, Any], index: int) -> bool:
        """Return whether `row` can be used; tell that the row at the place `index` is left out otherwise."""
        reason = self.examine(row)
        if reason is None:
            return True
        name = index if row.get("id") is None else (str(row["id"]), reason)  # the place changes with the files' order
        if name not in self._heard:
            self._heard.add(name)
            if self.on_skipped is not None:
                self.on_skipped(SkippedRow(self.split, index, row.get("id"), reason))
            else:
                logger.warning(f"Left out {self.split} row {index} of the stream: {reason}.")
        return False

    def require_row(self, kept: IterableDataset) -> None:
        """Raise `DataError` if `kept`, what is left of the stream, has no row."""
        if next(iter(kept), None) is None:
            raise DataError(
                f"None of the {len(self._heard)} rows of the {self.split} stream can be used: see the reasons above."
            )


def _numbered(row: Mapping[str, Any], index: int, keys: Keys) -> dict[str, Any]:
    return {**renamed_row(row, keys), PLACE: index}
