"""Dynamic sampling: generate for further prompts in place of zero-variance groups."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from math import gcd
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from datasets import IterableDataset
from transformers.utils import logging

from vgr_trl.checkpoints import load_shares, save_share
from vgr_trl.data.images import images_of
from vgr_trl.data.rows import ReadOnce, is_repeatable, pop_replaced
from vgr_trl.patches.trl import merge_round_metrics
from vgr_trl.rollout import ConstructedTrainer, Rollout
from vgr_trl.rows import Placement
from vgr_trl.sampling.zero_variance import find_zero_variance

logger = logging.get_logger(__name__)


def resample(
    trainer: ConstructedTrainer, rounds: list[Rollout]
) -> tuple[dict[int, tuple[Rollout, int]], dict[str, float]]:
    """Generate for further prompts; return rollout and number of the group that takes each place, and metrics.

    The rollouts are added to `rounds`.

    DAPO (https://huggingface.co/papers/2503.14476) generates until the batch is full of groups with a gradient; here
    the number of rounds is limited.
    """
    prompts, first = trainer.further_prompts, rounds[0].selection
    assert prompts is not None
    missing, chosen, generated = list(first.dropped), dict[int, tuple[Rollout, int]](), 0
    if missing:
        prompts.begin(rounds[0].rows, first.placement)
    with merge_round_metrics(trainer, first.placement.rows) as completions:
        while missing and len(rounds) <= trainer.args.dynamic_sampling_max_rounds:
            rows, count = prompts.draw(len(missing), first.placement)
            if not rows:
                break
            completions.append(len(rows))
            with trainer.new_rollout(rows) as further:
                trainer.generate_and_score(further)
                found = find_zero_variance(trainer, further, first.bounds)
            rounds.append(further)
            chosen |= {place: (further, number) for place, number in zip(missing, found.kept, strict=False)}
            missing, generated = missing[len(found.kept) :], generated + count
    return chosen, {
        "dynamic_sampling/rounds": len(rounds) - 1,
        "dynamic_sampling/generated_groups": generated,
        "dynamic_sampling/discarded_groups": generated - len(chosen),
    }


# Further prompts for dynamic sampling, the same on every process


class FurtherPrompts:
    """Draws rows of the train data again and again, in an order of its own, for further rounds of rollout batches.

    Data with a length are shuffled for each pass over them, independently of the order of the epochs; a stream is read
    in its own order, and once more from its start where an interrupted run goes on.
    """

    def __init__(self, dataset: Any, seed: int = 0) -> None:
        self.dataset, self.seed = dataset, seed
        self.drawn = 0  # rows passed so far, used or not
        self._rows: Iterator[Any] | None = None
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
        """Return this process's rows of a round, and how many prompts it has; none where the data have no more."""
        size, processes = placement.num_generations, placement.num_processes
        prompts = self._unused(prompts_per_round(missing, size, processes))
        step = prompts_per_round(1, size, processes)
        count = len(prompts) // step * step
        return take_local_rows(prompts[:count], size, placement.process_index, processes), count

    def _unused(self, count: int) -> list[Any]:
        """The next rows with other prompts, at most those of two passes over the data."""
        found: list[Any] = []
        passes = 0
        self._rows = self._endless() if self._rows is None else self._rows
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
        if hasattr(self.dataset, "__len__"):
            turn, passed = divmod(self.drawn, len(self.dataset))
            while True:
                generator = torch.Generator().manual_seed(self.seed * 1_000_003 + turn)
                for index in torch.randperm(len(self.dataset), generator=generator).tolist()[passed:]:
                    row = self.dataset[index]
                    pop_replaced([row])
                    yield row
                turn, passed = turn + 1, 0
                yield None
        rest = self.drawn  # rows to pass over; a short stream is passed over several times
        while True:
            fresh = False
            for row in self.dataset:
                if rest:
                    rest -= 1
                else:
                    fresh = True
                    yield row
            if fresh:
                yield None

    def save(self, folder: Path) -> None:
        """Write into a checkpoint where the order is."""
        processes = PartialState()
        save_share({"drawn": self.drawn}, folder, processes.process_index, processes.num_processes, "prompts")

    def load(self, folder: Path) -> None:
        """Continue with the order of a checkpoint, with the same data and seed."""
        if not (shares := load_shares(folder, "prompts")):
            logger.warning(f"{folder} was written without dynamic_sampling: its prompts start from the beginning.")
            return
        self.drawn, self._rows = int(shares[0]["drawn"]), None


def prompts_per_round(missing: int, num_generations: int, num_processes: int) -> int:
    """Return the smallest number of prompts, at least `missing`, whose completions the processes share equally."""
    step = num_processes // gcd(num_processes, num_generations)
    return -(-missing // step) * step


def take_local_rows(
    prompts: Sequence[dict[str, Any]], num_generations: int, process_index: int, num_processes: int
) -> list[dict[str, Any]]:
    """Return this process's rows of a round, G adjacent ones per prompt over all processes.

    Args:
        prompts: rows of the data set, as many as `prompts_per_round` says; the same on every process.
    """
    repeated = [dict(prompt) for prompt in prompts for _ in range(num_generations)]
    rows = len(repeated) // num_processes
    return repeated[process_index * rows : (process_index + 1) * rows]


def prompt_key(row: Mapping[str, Any]) -> str:
    """Return what is equal for rows with the same prompt and the same images."""

    def content(value: Any) -> str:
        return hashlib.sha256(value.tobytes()).hexdigest() if hasattr(value, "tobytes") else repr(value)

    return json.dumps([row["prompt"], images_of(row)], sort_keys=True, default=content)
