"""Further prompts of dynamic sampling, which take the place of zero-variance groups."""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from math import gcd
from typing import Any

import torch
import xxhash
from accelerate.utils import gather_object
from datasets import IterableDataset

from vgr_trl.checkpoints import SavedState
from vgr_trl.data.checked_rows import ReadOnce, is_repeatable, pop_replaced
from vgr_trl.data.images import images_of
from vgr_trl.rollout import ConstructedTrainer
from vgr_trl.rows import Placement


class FurtherPrompts(SavedState):
    """Draws rows of the train data again and again, in an order of its own, the same on every process.

    Data with a length are shuffled for each pass over them, independently of the order of the epochs; a stream is read
    in its own order, and once more from its start where an interrupted run goes on.
    """

    kind = "prompts"

    def __init__(self, dataset: Any, seed: int = 0) -> None:
        self.dataset, self.seed = dataset, seed
        self.drawn = 0  # rows passed so far, used or not
        self._rows = self._endless()
        self._used: set[str] = set()

    @classmethod
    def from_trainer(cls, trainer: ConstructedTrainer) -> "FurtherPrompts":
        """Take further prompts from the trainer's data; a stream is shuffled with a different seed than TRL's."""
        dataset, seed = trainer.train_dataset, trainer.args.seed
        if isinstance(dataset, IterableDataset) and trainer.shuffle_dataset:
            dataset = dataset.shuffle(seed=seed + 1)
        return cls(ReadOnce(dataset) if is_repeatable(dataset) else dataset, seed)

    def begin(self, rows: Sequence[Mapping[str, Any]], placement: Placement) -> None:
        """Exclude this batch's prompts from resampling."""
        firsts = [row for group in range(placement.num_groups) for row, place in placement.here(group) if place == 0]
        self._used = set(gather_object([prompt_key(rows[row]) for row in firsts]))

    def draw(self, missing: int, placement: Placement) -> tuple[list[dict[str, Any]], int]:
        """Return this process's rows of a round, G adjacent ones per prompt, and the number of all prompts.

        There are at least `missing` prompts, and as many as the processes can share equally, unless the data have no
        more.
        """
        size, processes = placement.num_generations, placement.num_processes
        step = processes // gcd(processes, size)
        prompts = self._unused(-(-missing // step) * step)
        prompts = prompts[: len(prompts) // step * step]
        repeated = [dict(prompt) for prompt in prompts for _ in range(size)]
        here = len(repeated) // processes
        return repeated[placement.process_index * here :][:here], len(prompts)

    def _unused(self, count: int) -> list[Any]:
        """The next rows with other prompts, at most those of two passes over the data."""
        found: list[Any] = []
        passes = 0
        while len(found) < count and passes < 2:
            row = next(self._rows)
            if row is None:
                passes += 1
                continue
            self.drawn += 1
            if (key := prompt_key(row)) not in self._used:
                self._used.add(key)
                found.append(row)
        return found

    def _endless(self) -> Iterator[Any]:
        """Rows from number `drawn` on, and None at the end of each pass."""
        rest, has_length = self.drawn, hasattr(self.dataset, "__len__")
        for turn in count():
            order = self.dataset
            if has_length:
                generator = torch.Generator().manual_seed(self.seed * 1_000_003 + turn)
                order = torch.randperm(len(self.dataset), generator=generator).tolist()
            for each in order:
                if rest:
                    rest -= 1
                    continue
                row = self.dataset[each] if has_length else each
                pop_replaced([row])
                yield row
            if not rest:
                yield None

    def state_dict(self) -> dict[str, Any]:
        """Return where the order is."""
        return {"drawn": self.drawn}

    def load_states(self, states: list[dict[str, Any]]) -> None:
        """Continue with the order of a checkpoint, with the same data and seed."""
        self.drawn, self._rows = int(states[0]["drawn"]), self._endless()


def prompt_key(row: Mapping[str, Any]) -> str:
    """Return what is equal for rows with the same prompt and the same images."""

    def content(value: Any) -> str:
        return xxhash.xxh3_128_hexdigest(value.tobytes()) if hasattr(value, "tobytes") else repr(value)

    return json.dumps([row.get("prompt"), images_of(row)], sort_keys=True, default=content)
