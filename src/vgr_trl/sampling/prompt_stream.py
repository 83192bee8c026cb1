"""Further prompts of the training set, away from those of the epoch; the same on every process."""

import hashlib
from collections.abc import Callable, Collection, Iterator
from itertools import islice
from typing import Any

import torch

from vgr_trl.errors import DataError

AHEAD = 32  # rollouts that a stream is read ahead of the epoch, at least where it is long enough


def _any_row(row: Any) -> bool:
    return True


class PromptStream:
    """Draws rows of a data set again and again, and keeps away from those that the epoch draws.

    A data set with a length is shuffled anew for each pass over it, independently of the order of the epochs. Left out
    is what the epoch has drawn and what is drawn within a quarter of the data before or after; where nothing else
    remains, only the latter; then nothing.

    A stream is read in its own order, `AHEAD` rollouts ahead of the epoch (half of its rows, if it is short), and
    started again at its end; after an interruption it is read again up to where it was.

    Args:
        dataset: rows, by number or one after the other.
        seed: of the order.
        batch: rows that the epoch draws for a rollout.
        order: epoch -> numbers of the rows that it draws, in order; None: it is not known.
    """

    def __init__(
        self, dataset: Any, seed: int = 0, *, batch: int = 1, order: Callable[[int], list[int]] | None = None
    ) -> None:
        self.dataset, self.seed, self.batch, self.order = dataset, seed, batch, order
        self.drawn = 0  # rows passed so far, left out or not
        self.length: int | None = len(dataset) if hasattr(dataset, "__len__") else None  # of a stream, once it ended
        self._rows: Iterator[Any] | None = None
        self._ends = 0

    def draw(self, count: int, rollout: int = 0, usable: Callable[[Any], bool] = _any_row) -> list[Any]:
        """Return the next `count` rows, fewer if a pass over the data finds no more.

        Args:
            count: at least 1.
            rollout: how many rollouts have begun before the one at hand, over all epochs.
            usable: whether to return a row; called once for each in question.

        Raises:
            DataError: the data set has no rows.
        """
        if self.length == 0:
            raise DataError("The data set has no rows to draw further prompts from.")
        rows = self._by_number(rollout) if hasattr(self.dataset, "__len__") else self._ahead(rollout)
        return list(islice(filter(usable, rows), count))

    # With a length

    def _by_number(self, rollout: int) -> Iterator[Any]:
        length = len(self.dataset)
        self._rows = self._rows or self._shuffled(*divmod(self.drawn, length))
        for avoided in self._avoided(rollout):
            for _ in range(2 * length if len(avoided) < length else 0):  # the rest of a pass and all of another
                self.drawn += 1
                if (index := next(self._rows)) not in avoided:
                    yield self.dataset[index]

    def _shuffled(self, turn: int, passed: int) -> Iterator[int]:
        while True:
            name = hashlib.sha256(f"further prompts {self.seed} {turn}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(name[:8], "big") >> 1)
            yield from torch.randperm(len(self.dataset), generator=generator).tolist()[passed:]
            turn, passed = turn + 1, 0

    def _avoided(self, rollout: int) -> list[Collection[int]]:
        """Numbers to leave out, the most desirable choice first."""
        rollouts = len(self.dataset) // self.batch  # per epoch, which drops the rest
        if self.order is None or rollouts == 0:
            return [()]
        epoch, place = divmod(rollout, rollouts)
        before = self.order(epoch - 1) if epoch else []
        order = before + self.order(epoch) + self.order(epoch + 1)
        now, quarter = len(before) + place * self.batch, max(1, rollouts // 4) * self.batch
        soon = order[now : now + self.batch + quarter]
        recently = order[max(0, now - quarter) : now]
        return [{*order[len(before) : now], *recently, *soon}, {*recently, *soon}, ()]

    # Without one

    def _ahead(self, rollout: int) -> Iterator[Any]:
        self._rows = self._rows or self._read(self.drawn % (self.length or self.drawn + 1))
        last = self._ends + 2
        while self._ends < last:
            row = next(self._rows)
            away = self._is_away(rollout)
            self.drawn += 1
            if away and self._ends < last:
                yield row

    def _is_away(self, rollout: int) -> bool:
        """Whether the row at hand is far from those that the epoch draws."""
        ahead = AHEAD * self.batch
        if self.length is None:
            return self.drawn - rollout * self.batch >= ahead
        place = rollout % max(1, self.length // self.batch) * self.batch
        distance = (self.drawn - place) % self.length
        return min(ahead, self.length // 2) <= distance < self.length - min(ahead, self.length // 4)

    def _read(self, start: int) -> Iterator[Any]:
        while True:
            count = 0
            for count, row in enumerate(self.dataset, 1):
                if count > start:
                    yield row
            if count == 0:
                raise DataError("The data set has no rows to draw further prompts from.")
            self.length, start = count, 0
            self._ends += 1

    def state_dict(self) -> dict[str, int | None]:
        """Return where the stream is."""
        return {"drawn": self.drawn, "length": self.length}

    def load_state_dict(self, state: dict[str, int | None]) -> None:
        """Continue where `state_dict` was taken, with the same data set and seed."""
        self.drawn, self._rows = int(state["drawn"] or 0), None
        if not hasattr(self.dataset, "__len__"):
            self.length = state.get("length")
