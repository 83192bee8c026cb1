"""Join micro-batches into passes of whole groups, and cut passes that exceed the memory.

Joining multiplies `per_device_train_batch_size` and divides `gradient_accumulation_steps` and `steps_per_generation` by
one number, so rollouts, their order and optimizer steps stay the same. `loss_in_parts` cuts passes that exceed the
memory.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass
from typing import Any, cast

import torch
from accelerate import Accelerator, DistributedType
from torch import Tensor, nn

from vgr_trl.batch import Batch
from vgr_trl.config import PER_WINDOW
from vgr_trl.dapo_config import DAPOConfig
from vgr_trl.passes.run_pass import Extent, count_positions, find_extents, pack_rows
from vgr_trl.patching import patched_attribute
from vgr_trl.run import Features, Run
from vgr_trl.sharing.prefix_split import find_groups


@dataclass
class RowsPerPass:
    """Number of rows that run in one training pass.

    Attributes:
        original: rows of a micro-batch in the user's options.
        joined: number of these micro-batches that are joined into one.
        most: the user's limit of the rows of a pass; None: memory decides.
        memory: limits the passes on a GPU; None: no limit.
        reason: why no more micro-batches are joined; None: groups are whole.
    """

    original: int
    joined: int
    most: int | None
    memory: "UpdateMemory | None"
    reason: str | None

    def __str__(self) -> str:
        if self.joined == 1:
            return "" if self.reason is None else f" Micro-batches of {self.original} are not joined ({self.reason})."
        by_memory = f", passes grow from {self.original} rows to as many as memory takes" if self.memory else ""
        passes = by_memory if self.most is None else f", {self.most} rows pass at a time"
        short = "" if self.reason is None else f" ({self.reason})"
        return f" {self.joined} micro-batches of {self.original} are joined into one{short}{passes}."

    def load(self, rows: int, computed: int, attended: int) -> float:
        """Return the load of a pass; above 1 it has too many rows.

        Args:
            rows: number of rows of the pass.
            computed: number of its positions, with every prompt once.
            attended: number of its positions, with the prompt once per row.
        """
        if self.most is not None:
            return rows / self.most
        if self.memory is None or rows <= self.original:
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
        self._needed = self._before = 0
        self._seen = (0, 0)  # positions of the largest pass that has been measured
        self._largest: tuple[int, int] | None = None  # largest pass of this update; None: between updates

    def begin_pass(self) -> None:
        """Limit the passes of an update in its first micro-batch, the same on all processes."""
        if self._largest is not None:
            return
        self._largest = (0, 0)
        free, total = torch.cuda.mem_get_info(self._device)
        self._before = torch.cuda.memory_allocated(self._device)
        room = free + torch.cuda.memory_reserved(self._device) - self._before
        # peak = fixed + cost of a position * positions. Gradients are among the fixed part, so a pass with k times the
        # positions needs at most k times the memory. A tenth of the device is left, and passes grow at most twofold.
        scale = min(2.0, max(room - total / 10, 0) / self._needed) if self._needed else 0.0
        limits = torch.tensor([positions * scale for positions in self._seen], device=self._device).clamp(min=1e-9)
        self.computed, self.attended = self._gather(limits).view(-1, 2).amin(0).tolist()

    def measure(self, passes: Sequence[tuple[int, int]]) -> None:
        """Measure the memory of an update whose micro-batches are cut into passes.

        Args:
            passes: computed and attended positions of each pass of this process.
        """
        if not self._largest or not any(self._largest):
            self.peak = max(self.peak, torch.cuda.max_memory_allocated(self._device))
            torch.cuda.reset_peak_memory_stats(self._device)
        self._largest = max(self._largest or (0, 0), *passes)

    def end_update(self) -> None:
        """Record the peak memory of a measured update above the memory allocated before it."""
        if self._largest is not None and any(self._largest):
            self._needed = max(self._needed, torch.cuda.max_memory_allocated(self._device) - self._before)
            self._seen = max(self._seen, self._largest)
        self._largest = None


def join_micro_batches(
    args: DAPOConfig, features: Features, accelerator: Accelerator
) -> tuple[DAPOConfig, RowsPerPass]:
    """Join as many micro-batches as the features of a run allow; return the options with the joined ones.

    Args:
        args: options of the run.
        features: work that passes share or skip.
        accelerator: device and processes; DeepSpeed's configuration gets the joined numbers too.
    """
    group, device = int(args.num_generations or 1), accelerator.device
    original, most = args.per_device_train_batch_size, args.most_rows_per_pass
    accumulated, generated = args.gradient_accumulation_steps, args.steps_per_generation or 1
    reason = features.join_micro_batches.reason
    if reason is None and most is None and device.type not in ("cpu", "cuda"):
        reason = f"the memory of {device.type} is not measured: give a number as rows_per_pass"
    # On a GPU memory decides how many groups pass together; elsewhere two do.
    rows = most or (original * accumulated if device.type == "cuda" else 2 * group)
    limit = math.ceil(rows / original) if reason is None else 1
    joined = max(number for number in range(1, limit + 1) if accumulated % number == generated % number == 0)
    if joined < limit:
        reason = f"no more divide gradient_accumulation_steps {accumulated} and steps_per_generation {generated}"
    if joined > 1:
        args = copy(args)  # the user may give the same options to another trainer
        args.per_device_train_batch_size = original * joined
        args.gradient_accumulation_steps, args.steps_per_generation = accumulated // joined, generated // joined
        if (plugin := accelerator.state.deepspeed_plugin) is not None:  # its configuration has the old numbers
            config = plugin.deepspeed_config
            if config.get("train_micro_batch_size_per_gpu") == original:
                config["train_micro_batch_size_per_gpu"] = original * joined
            if config.get("gradient_accumulation_steps") == accumulated:
                config["gradient_accumulation_steps"] = accumulated // joined
    measures = joined > 1 and most is None and device.type == "cuda"
    memory = UpdateMemory(device, accelerator.gather) if measures else None
    return args, RowsPerPass(original, joined, most, memory, reason if joined * original < group else None)


def describe_spread_groups(args: DAPOConfig, num_generations: int, processes: int) -> str:
    """Describe groups that are spread over processes, and the options that make them whole; "" without any.

    Args:
        args: options of the run.
        num_generations: G.
        processes: number of processes.
    """
    rows = args.per_device_train_batch_size * (args.steps_per_generation or 1)  # rows of a process in a rollout
    common = math.gcd(rows, num_generations)
    if processes == 1 or common == num_generations:
        return ""
    accumulates_rollout = args.gradient_accumulation_steps == args.steps_per_generation
    option = "gradient_accumulation_steps" if accumulates_rollout else "steps_per_generation"
    names = option, "per_device_train_batch_size"
    cures = [f"{name} {vars(args)[name] * num_generations // common}" for name in names]
    cures += [f"num_generations {common}"] if common > 1 else []
    problem = f"A process has {rows} completions of a rollout, so a group of {num_generations} is spread over processes"
    return f" {problem}, and each computes its prompt; whole with {' or '.join(cures)}."


Loss = Callable[..., Tensor]  # TRL's loss of a model and a batch, times a weight


def loss_in_parts(run: Run, limits: RowsPerPass, model: nn.Module, batch: Batch, compute: Loss) -> Tensor:
    """Back-propagate all parts of a micro-batch but the last; return the total loss.

    Args:
        run: options and processes.
        limits: limits of the rows of a pass.
        model: argument of TRL's `_compute_loss`.
        batch: the micro-batch; it gets the old log-probabilities that its parts compute.
        compute: returns the loss of a part, and leaves its gradient to be computed.
    """
    parts, old_logps, accelerator = _split_rows(run, limits, batch), list[Tensor](), run.accelerator
    if len(parts) == 1:
        return compute(model, batch)
    before: Tensor | float = 0.0
    for rows in parts:
        part = batch.take(rows)
        weight = _weigh_part(part, batch, run.args.loss_type)
        is_last = rows is parts[-1]
        with nullcontext() if is_last else _accumulate(accelerator, model):
            loss = compute(model, part, weight)
            if not is_last:
                deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED
                accelerator.backward(loss, **({"scale_wrt_gas": False} if deepspeed else {}))
                before = before + loss.detach()
        if batch.old_logps is None and part.old_logps is not None:
            old_logps.append(part.old_logps)
    if old_logps:
        batch.old_logps = torch.cat(old_logps)
    return loss + before


@contextmanager
def _accumulate(accelerator: Accelerator, model: nn.Module) -> Iterator[None]:
    """Add up gradients in this block, without an exchange between processes and without a step of DeepSpeed."""
    with patched_attribute(accelerator.gradient_state, "sync_gradients", False), accelerator.no_sync(model):
        yield
    if accelerator.is_fsdp2 and not accelerator.sync_gradients:  # `no_sync` ends by an exchange, whatever was before
        cast("Any", model).set_requires_gradient_sync(False)


def _split_rows(run: Run, limits: RowsPerPass, batch: Batch) -> list[list[int]]:
    """Divide rows into parts, equally on every process, because TRL gathers metrics of rows after each part."""
    count, accelerator = len(batch), run.accelerator
    memory, budget = limits.memory, run.args.max_tokens_per_micro_batch
    if budget is None and memory is None and (limits.most or count) >= count:
        return [[*range(count)]]
    if memory is not None:
        memory.begin_pass()
    groups: Sequence[int] = range(count)
    if run.features.share_training.enabled:
        pixels = [[*inputs.values()] for inputs in batch.images.rows] if batch.images.num_images else None
        groups = find_groups(batch.prompt_ids, batch.prompt_mask, pixels)
    mine = torch.tensor(find_extents(run.features, batch, groups), device=accelerator.device)
    of_all = [[Extent(*row) for row in rows] for rows in accelerator.gather(mine).view(-1, count, 3).tolist()]

    def load(rows: Sequence[int]) -> float:
        positions = [count_positions([extents[row] for row in rows]) for extents in of_all]
        computed, attended = map(max, zip(*positions, strict=True))
        share = 0.0 if budget is None else computed / budget
        return max(share, float(limits.load(len(rows), computed, attended)))

    parts = pack_rows(count, load)
    if memory is not None and len(parts) > 1:
        extents = of_all[accelerator.process_index]
        memory.measure([count_positions([extents[row] for row in rows]) for rows in parts])
    return parts


def _weigh_part(part: Batch, batch: Batch, loss_type: str) -> float:
    """Return the weight by which a part's mean loss enters the micro-batch's mean."""
    if loss_type in PER_WINDOW:
        return 1.0
    if loss_type == "bnpo":
        tokens, of_all = (float(source.valid.sum().clamp(min=1)) for source in (part, batch))
        return tokens / of_all
    return len(part) / len(batch)
