"""Prompts beyond those of a trainer's rollout batch: which come next, and none that the batch has already."""

import hashlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from accelerate.utils import gather_object
from datasets import Dataset, IterableDataset
from trl.trainer.utils import RepeatSampler

from vgr_trl.data.rows.columns import images_of
from vgr_trl.sampling import Placement, PromptStream, prompts_of_round, rows_of_process
from vgr_trl.training.host import Host


class FurtherPrompts:
    """Draws prompts for further rounds of rollout batches, the same on every process."""

    def __init__(self, host: Host, dataset: Dataset | IterableDataset, shuffles: bool) -> None:
        self.host, args = host, host.args
        self.dataset, self.shuffles = dataset, shuffles
        self._streamed = isinstance(dataset, IterableDataset)
        if self._streamed and shuffles:
            dataset = dataset.shuffle(seed=args.seed)  # the order in which TRL reads it
        self.stream = PromptStream(dataset, args.seed, batch=args.prompts_per_rollout, order=lru_cache(3)(self._order))
        self._taken: set[str] = set()
        self._of_step = (-1, 0)  # global step, rollouts in it so far

    def _order(self, epoch: int) -> list[int]:
        """Numbers of the rows that TRL draws in an epoch, which drops those that fill no batch."""
        sampler = RepeatSampler(self.dataset, 1, self.stream.batch, shuffle=self.shuffles, seed=self.host.args.seed)
        for _ in range(epoch):
            next(iter(sampler), None)
        return list(sampler)

    def count_rollout(self) -> None:
        """Say that a rollout batch has been generated; a step may take several."""
        step = self.host.state.global_step
        self._of_step = (step, self._of_step[1] + 1 if step == self._of_step[0] else 1)

    def _rollout(self) -> int:
        """Rollouts of the run before the one at hand."""
        args, state = self.host.args, self.host.state
        passes = int(args.steps_per_generation or 1) * args.num_iterations
        if self._streamed:  # its epochs are of unknown length
            before = state.global_step * args.gradient_accumulation_steps
        else:
            before = round((state.epoch or 0.0) * (len(self.dataset) // self.stream.batch) * passes)
        return -(-before // passes) + self._of_step[1] - 1

    def begin(self, rows: Sequence[Mapping[str, Any]], placement: Placement) -> None:
        """Take in the prompts of a batch, which no further round draws again."""
        firsts = [row for group in range(placement.num_groups) for row, place in placement.here(group) if place == 0]
        self._taken = set(gather_object([prompt_key(rows[row]) for row in firsts]))

    def draw(self, missing: int, placement: Placement) -> tuple[list[dict[str, Any]], int]:
        """Return this process's rows of a round, and how many prompts it has; none where the data has no more."""
        size = placement.num_generations, placement.num_processes
        prompts = self.stream.draw(prompts_of_round(missing, *size), self._rollout(), self._take)
        count = len(prompts) // prompts_of_round(1, *size) * prompts_of_round(1, *size)
        return rows_of_process(prompts[:count], size[0], placement.process_index, size[1]), count

    def _take(self, row: Mapping[str, Any]) -> bool:
        key = prompt_key(row)
        new = key not in self._taken
        self._taken.add(key)
        return new


def prompt_key(row: Mapping[str, Any]) -> str:
    """Return what is equal for rows with the same prompt and the same images."""
    digest = hashlib.sha256()

    def feed(value: Any) -> None:
        if isinstance(value, Mapping):
            value = [part for item in sorted(value.items()) for part in item]
        if isinstance(value, list | tuple):
            digest.update(f"[{len(value)}]".encode())
            for part in value:
                feed(part)
        else:
            content = value.tobytes() if hasattr(value, "tobytes") else value
            content = content if isinstance(content, bytes) else repr(content).encode()
            digest.update(f"{len(content)}:".encode() + content)

    feed([row["prompt"], images_of(row)])
    return digest.hexdigest()
