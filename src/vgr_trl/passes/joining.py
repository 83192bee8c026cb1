"""Join micro-batches into passes of whole groups, as large as memory allows.

Joining multiplies `per_device_train_batch_size` and divides `gradient_accumulation_steps` and `steps_per_generation` by
one number, so rollouts, their order and optimizer steps stay the same. `parts.loss_in_parts` cuts passes that exceed
the memory.
"""

import math
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass

import torch

from vgr_trl.dapo_config import DAPOConfig
from vgr_trl.rollout import ConstructedTrainer


@dataclass
class RowsPerPass:
    """Number of rows that run in one training pass.

    Attributes:
        given: rows of a micro-batch in the user's options.
        joined: number of these micro-batches that are joined into one.
        most: the user's limit of the rows of a pass; None: memory decides.
        memory: limits the passes on a GPU; None: no limit.
        reason: why no more micro-batches are joined; None: groups are whole.
    """

    given: int
    joined: int
    most: int | None
    memory: "UpdateMemory | None"
    reason: str | None

    def __str__(self) -> str:
        if self.joined == 1:
            return "" if self.reason is None else f" Micro-batches of {self.given} are not joined ({self.reason})."
        by_memory = f", passes grow from {self.given} rows to as many as memory takes" if self.memory else ""
        passes = by_memory if self.most is None else f", {self.most} rows pass at a time"
        short = "" if self.reason is None else f" ({self.reason})"
        return f" {self.joined} micro-batches of {self.given} are joined into one{short}{passes}."

    def load(self, rows: int, computed: int, attended: int) -> float:
        """Return the load of a pass; above 1 it has too many rows.

        Args:
            rows: of the pass.
            computed: its positions, with every prompt once.
            attended: its positions, with the prompt once per row.
        """
        if self.most is not None:
            return rows / self.most
        if self.memory is None or rows <= self.given:
            return 0.0
        return max(computed / self.memory.computed, attended / self.memory.attended)


class UpdateMemory:
    """Measures the memory of updates, and limits the next passes so that they fit on the device of every process.

    Attributes:
        computed, attended: limits of the positions of a pass, as `RowsPerPass.load` counts them; a micro-batch of the
            user's size may exceed them.
        peak: highest memory before the last reset of the device's peak, in bytes.
    """

    def __init__(self, device: torch.device, gather: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.computed = self.attended = 1e-9
        self.peak = 0
        self._device, self._gather = device, gather
        self._room = self._needed = self._before = 0
        self._seen = (0, 0)  # positions of the largest pass that has been measured
        self._largest = (0, 0)  # of this update
        self._in_update = self._is_measured = False

    def begin_pass(self) -> None:
        """Limit the passes of an update in its first micro-batch, the same on all processes."""
        if self._in_update:
            return
        self._in_update, self._is_measured, self._largest = True, False, (0, 0)
        free, total = torch.cuda.mem_get_info(self._device)
        self._before = torch.cuda.memory_allocated(self._device)
        room = free + torch.cuda.memory_reserved(self._device) - self._before
        scale = growth_that_fits(room, total, self._needed)
        limits = torch.tensor([each * scale for each in self._seen], device=self._device).clamp(min=1e-9)
        self.computed, self.attended = self._gather(limits).view(-1, 2).amin(0).tolist()

    def measure(self, passes: Sequence[tuple[int, int]]) -> None:
        """Measure the memory of an update whose micro-batches are cut into passes.

        Args:
            passes: computed and attended positions of each pass of this process.
        """
        self._largest = max(self._largest, *passes)
        if not self._is_measured:
            self._is_measured = True
            self.peak = max(self.peak, torch.cuda.max_memory_allocated(self._device))
            torch.cuda.reset_peak_memory_stats(self._device)

    def end_update(self) -> None:
        """Record the peak memory of the update above the memory allocated before it."""
        if self._is_measured:
            peak = torch.cuda.max_memory_allocated(self._device)
            self._needed = max(self._needed, peak - self._before)
            self._seen = max(self._seen, self._largest)
        self._in_update = self._is_measured = False


def growth_that_fits(room: int, total: int, needed: int) -> float:
    """Return the factor by which the next passes may be larger than the largest so far, at most 2.

    peak = fixed + cost of a position * positions. Gradients are among the fixed part, so a pass with k times the
    positions needs at most k times the memory. A tenth of the device is left.

    Args:
        room: bytes that can be allocated before the update.
        total: bytes of the device.
        needed: bytes that an update has needed; 0: no update has been measured.
    """
    return min(2.0, max(room - total / 10, 0) / needed) if needed > 0 else 0.0


def join_micro_batches(trainer: ConstructedTrainer) -> RowsPerPass:
    """Join as many micro-batches of a constructed trainer as its features allow, in a copy of its options."""
    args, group, device = trainer.args, trainer.num_generations, trainer.accelerator.device
    given, most, reason = args.per_device_train_batch_size, args.most_rows_per_pass, None
    accumulated, generated = args.gradient_accumulation_steps, args.steps_per_generation or 1
    if (feature := trainer.features.join_micro_batches).reason is not None:
        reason = feature.reason
    elif most is None and device.type not in ("cpu", "cuda"):
        reason = f"the memory of {device.type} is not measured: give a number as rows_per_pass"
    limit = math.ceil((most or group) / given) if reason is None else 1
    joined = max(each for each in range(1, limit + 1) if accumulated % each == generated % each == 0)
    if joined < limit:
        reason = f"no more divide gradient_accumulation_steps {accumulated} and steps_per_generation {generated}"
    if joined > 1:
        trainer.args = args = copy(args)  # the user may give the same options to another trainer
        args.per_device_train_batch_size = given * joined
        args.gradient_accumulation_steps, args.steps_per_generation = accumulated // joined, generated // joined
        trainer._train_batch_size = args.train_batch_size
        if trainer.is_deepspeed_enabled:  # whose configuration has the old numbers
            config = trainer.accelerator.state.deepspeed_plugin.deepspeed_config
            if config.get("train_micro_batch_size_per_gpu") == given:
                config["train_micro_batch_size_per_gpu"] = given * joined
            if config.get("gradient_accumulation_steps") == accumulated:
                config["gradient_accumulation_steps"] = accumulated // joined
    measures = joined > 1 and most is None and device.type == "cuda"
    memory = UpdateMemory(device, trainer.accelerator.gather) if measures else None
    return RowsPerPass(given, joined, most, memory, reason if joined * given < group else None)


def describe_spread_groups(args: DAPOConfig, num_generations: int, processes: int) -> str:
    """Return a sentence on groups that are spread over processes, with the numbers that make them whole, or "".

    Args:
        args: options of the run.
        num_generations: G.
        processes: number of processes.
    """
    rows = args.per_device_train_batch_size * (args.steps_per_generation or 1)  # of a process in a rollout
    common = math.gcd(rows, num_generations)
    if processes == 1 or common == num_generations:
        return ""
    option = "steps_per_generation"
    if args.gradient_accumulation_steps == args.steps_per_generation:
        option = "gradient_accumulation_steps"
    names = option, "per_device_train_batch_size"
    cures = [f"{name} {getattr(args, name) * num_generations // common}" for name in names]
    cures += [f"num_generations {common}"] if common > 1 else []
    problem = f"A process has {rows} completions of a rollout, so a group of {num_generations} is spread over processes"
    return f" {problem}, and each computes its prompt; whole with {' or '.join(cures)}."
