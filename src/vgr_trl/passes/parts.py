"""Dynamic batching: cut micro-batches into passes, by a token budget and by memory; the gradient is the same."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from torch import Tensor, nn

from vgr_trl.passes.loss_mask import Extent, count_tokens, pack_rows
from vgr_trl.rollout import ConstructedTrainer
from vgr_trl.rows import OLD_LOGPS
from vgr_trl.scoring_inputs import take_rows, valid_tokens
from vgr_trl.sharing.lending import PROMPT_GROUP, READ_AGAIN
from vgr_trl.sharing.prefix_split import find_groups

PER_WINDOW = ("dapo", "cispo", "vespo")  # losses that are divided by the tokens of the optimizer step
Loss = Callable[..., Tensor]  # TRL's `_compute_loss` of a model and inputs, times a weight


def loss_in_parts(trainer: ConstructedTrainer, model: nn.Module, inputs: dict[str, Any], compute: Loss) -> Tensor:
    """Back-propagate all parts of a micro-batch but the last; return the total loss.

    Args:
        trainer: whose options and memory limit the parts.
        model: argument of TRL's `_compute_loss`.
        inputs: the other one; old log-probabilities that the parts have given are added to it.
        compute: returns the loss of a part, and leaves its gradient to be computed.
    """
    parts, old_logps = _split_rows(trainer, inputs), list[Tensor]()
    if len(parts) == 1:
        return compute(model, inputs)
    before: Tensor | float = 0.0
    for rows in parts:
        part = _take_part(inputs, rows)
        weight = _weigh_part(part, inputs, trainer.args.loss_type)
        is_last = rows is parts[-1]
        with nullcontext() if is_last else _accumulate(trainer.accelerator, model):
            loss = compute(model, part, weight)
            if not is_last:
                deepspeed = trainer.accelerator.distributed_type == DistributedType.DEEPSPEED
                trainer.accelerator.backward(loss, **({"scale_wrt_gas": False} if deepspeed else {}))
                before = before + loss.detach()
        if OLD_LOGPS in part and OLD_LOGPS not in inputs:
            old_logps.append(part[OLD_LOGPS])
    if old_logps:
        inputs[OLD_LOGPS] = torch.cat(old_logps)
    return loss + before


@contextmanager
def _accumulate(accelerator: Accelerator, model: nn.Module) -> Iterator[None]:
    """Add up gradients in this block, without an exchange between processes and without a step of DeepSpeed."""
    state = accelerator.gradient_state
    synchronises = state.sync_gradients
    state._set_sync_gradients(False)
    try:
        with accelerator.no_sync(model):
            yield
    finally:
        state._set_sync_gradients(synchronises)


def _split_rows(trainer: ConstructedTrainer, inputs: dict[str, Any]) -> list[list[int]]:
    """Return the rows of each part, the same on every process: TRL gathers metrics of rows after each."""
    count, accelerator, limits = len(inputs["prompt_ids"]), trainer.accelerator, trainer.rows_per_pass
    memory, budget = limits.memory, trainer.args.max_tokens_per_micro_batch
    if budget is None and memory is None and (limits.most or count) >= count:
        return [[*range(count)]]
    if memory is not None:
        memory.begin_pass()
    shares = trainer.features.share_training.enabled
    groups = find_groups(inputs["prompt_ids"], inputs["prompt_mask"]) if shares else range(count)
    mine = [
        [extent.prompt, extent.completion, extent.runs, group]
        for extent, group in zip(trainer.passes.skipping.extents(inputs), groups, strict=True)
    ]
    of_all = accelerator.gather(torch.tensor(mine, device=accelerator.device)).view(-1, count, 4).tolist()
    processes = [([Extent(*row[:3]) for row in rows], [row[3] for row in rows]) for rows in of_all]

    def count_positions(rows: Sequence[int], process: int) -> tuple[int, int]:
        extents, prompts = processes[process]
        return count_tokens(rows, extents, prompts), count_tokens(rows, extents, None)

    def load(rows: Sequence[int]) -> float:
        computed, attended = map(
            max, zip(*(count_positions(rows, each) for each in range(len(processes))), strict=True)
        )
        share = 0.0 if budget is None else computed / budget
        return max(share, float(limits.load(len(rows), computed, attended)))

    parts = pack_rows(count, load, 1)
    if memory is not None and len(parts) > 1:
        memory.measure([count_positions(rows, accelerator.process_index) for rows in parts])
    return parts


def _take_part(inputs: dict[str, Any], rows: list[int]) -> dict[str, Any]:
    """Return consecutive rows of a micro-batch; prompts that later parts read are read again."""
    part = take_rows(inputs, rows)
    if READ_AGAIN in part:
        later = set(inputs[PROMPT_GROUP][rows[-1] + 1 :])
        pairs = zip(part[READ_AGAIN], part[PROMPT_GROUP], strict=True)
        part[READ_AGAIN] = [again or group in later for again, group in pairs]
    return part


def _weigh_part(part: dict[str, Any], inputs: dict[str, Any], loss_type: str) -> float:
    """Return the weight of a part's mean loss in the mean of the micro-batch."""
    if loss_type in PER_WINDOW:
        return 1.0
    if loss_type == "bnpo":
        tokens, of_all = (float(valid_tokens(batch).sum().clamp(min=1)) for batch in (part, inputs))
        return tokens / of_all
    return len(part["prompt_ids"]) / len(inputs["prompt_ids"])
