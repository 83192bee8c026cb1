"""Further prompts of the training set, the same on every process, continued after an interruption."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch

from vgr_trl.errors import DataError


class PromptStream:
    """Draws rows of a data set again and again, without an end.

    A data set with a length is shuffled anew for each pass over it. A stream is read in its own order and started
    again at its end; after an interruption it is read again up to where it was.

    Args:
        dataset: rows, by number or one after the other.
        seed: of the order.
    """

    def __init__(self, dataset: Any, seed: int = 0) -> None:
        self.dataset, self.seed = dataset, seed
        self.drawn = 0  # rows so far
        self._rows: Iterator[Any] | None = None

    def draw(self, count: int) -> list[Any]:
        """Return the next `count` rows.

        Raises:
            DataError: the data set has no rows.
        """
        if self._rows is None:
            self._rows = self._from(self.drawn)
        rows = list(islice(self._rows, count))
        self.drawn += len(rows)
        return rows

    def _from(self, start: int) -> Iterator[Any]:
        if hasattr(self.dataset, "__len__"):
            return self._shuffled(start)
        return islice(self._read(), start, None)

    def _shuffled(self, start: int) -> Iterator[Any]:
        length = len(self.dataset)
        if length == 0:
            raise DataError("The data set has no rows to draw further prompts from.")
        turn, skipped = divmod(start, length)
        while True:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + turn)
            for index in torch.randperm(length, generator=generator).tolist()[skipped:]:
                yield self.dataset[index]
            turn, skipped = turn + 1, 0

    def _read(self) -> Iterator[Any]:
        while True:
            empty = True
            for row in self.dataset:
                empty = False
                yield row
            if empty:
                raise DataError("The data set has no rows to draw further prompts from.")

    def state_dict(self) -> dict[str, int]:
        """Return where the stream is."""
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue where `state_dict` was taken, with the same data set and seed."""
        self.drawn, self._rows = state["drawn"], None
