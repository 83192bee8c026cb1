"""Dynamic batching: cut micro-batches into passes, by a token budget and by memory; the gradient is the same."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from accelerate import DistributedType
from torch import nn

from vgr_trl.passes.loss_mask import Extent, pack_rows, tokens_of
from vgr_trl.passes.training_pass import _extents
from vgr_trl.rollout import ConstructedTrainer
from vgr_trl.rows import OLD_LOGPS
from vgr_trl.scoring_inputs import take_rows, valid_tokens
from vgr_trl.sharing.lending import PROMPT_GROUP, READ_AGAIN
from vgr_trl.sharing.prefix_split import find_groups

PER_WINDOW = ("dapo", "cispo", "vespo")  # losses that are divided by the tokens of the optimizer step
Loss = Callable[..., torch.Tensor]  # TRL's `_compute_loss` of a model and inputs, times a weight


def loss_in_parts(trainer: ConstructedTrainer, model: nn.Module, inputs: dict[str, Any], compute: Loss) -> torch.Tensor:
    """Return the loss of a micro-batch, through which the gradient of its last part is still to come.

    Gradients of all parts but the last are added on the way, where no process waits for the gradients of another and
    DeepSpeed makes no step.

    Args:
        inputs: as TRL's `_compute_loss` takes them; what a pass adds to its part is added to them.
    """
    accelerator = trainer.accelerator
    deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED
    options = {"scale_wrt_gas": False} if deepspeed else {}
    *parts, last = _split_rows(trainer, inputs)
    before: torch.Tensor | float = 0.0
    for number, rows in enumerate(parts):
        later = [row for part in (*parts[number + 1 :], last) for row in part]
        state = accelerator.gradient_state
        synchronises = state.sync_gradients
        state._set_sync_gradients(False)
        try:
            with accelerator.no_sync(model):
                loss = _loss_of_rows(trainer, rows, model, inputs, compute, later)
                accelerator.backward(loss, **options)
        finally:
            state._set_sync_gradients(synchronises)
        before = before + loss.detach()
    return _loss_of_rows(trainer, last, model, inputs, compute) + before


def _split_rows(trainer: ConstructedTrainer, inputs: dict[str, Any]) -> list[list[int]]:
    """Rows of each part, the same on every process: TRL gathers metrics of rows after each."""
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
        for extent, group in zip(_extents(trainer, inputs), groups, strict=True)
    ]
    of_all = accelerator.gather(torch.tensor(mine, device=accelerator.device)).view(-1, count, 4).tolist()
    processes = [([Extent(*row[:3]) for row in rows], [row[3] for row in rows]) for rows in of_all]

    def positions(rows: Sequence[int], process: int) -> tuple[int, int]:
        extents, prompts = processes[process]
        return tokens_of(rows, extents, prompts), tokens_of(rows, extents, None)

    def load(rows: Sequence[int]) -> float:
        computed, attended = map(max, zip(*(positions(rows, each) for each in range(len(processes))), strict=True))
        share = 0.0 if budget is None else computed / budget
        return max(share, float(limits.load(len(rows), computed, attended)))

    parts = pack_rows(count, load, 1)
    if memory is not None and len(parts) > 1:
        memory.measure([positions(rows, accelerator.process_index) for rows in parts])
    return parts


def _loss_of_rows(
    trainer: ConstructedTrainer,
    rows: list[int],
    model: nn.Module,
    inputs: dict[str, Any],
    compute: Loss,
    later: Sequence[int] = (),
) -> torch.Tensor:
    """Return the loss of a part, times what its mean counts in the mean over all of the micro-batch.

    Args:
        later: rows of the parts behind it.
    """
    if len(rows) == len(inputs["prompt_ids"]):
        return compute(model, inputs)
    part = take_rows(inputs, rows)
    if READ_AGAIN in part:
        groups = {inputs[PROMPT_GROUP][row] for row in later}
        part[READ_AGAIN] = [
            again or group in groups for again, group in zip(part[READ_AGAIN], part[PROMPT_GROUP], strict=True)
        ]
    weight = len(rows) / len(inputs["prompt_ids"])
    if trainer.args.loss_type in PER_WINDOW:
        weight = 1.0
    elif trainer.args.loss_type == "bnpo":
        tokens, of_all = (float(valid_tokens(batch).sum().clamp(min=1)) for batch in (part, inputs))
        weight = tokens / of_all
    loss = compute(model, part, weight)
    if (old := part.get(OLD_LOGPS)) is not None:  # a first pass may have completed them
        whole = inputs[OLD_LOGPS].to(old.dtype)
        whole[rows] = old
        inputs[OLD_LOGPS] = whole
    return loss
