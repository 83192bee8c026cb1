"""What TRL's loss divides by, which it computes within `_compute_loss` and gives nobody.

A term that is added to the loss has to be averaged as the loss is. Removable when TRL offers its normaliser; the tests
compare with TRL's own loss for all its types (tests/training/test_loss_terms.py).
"""

from typing import Any

import torch

from vgr_trl.config import DAPOConfig

_PER_COMPLETION = ("grpo", "sapo")
_PER_WINDOW = ("dapo", "cispo", "vespo")


def average_as_loss(
    per_token: torch.Tensor,
    mask: torch.Tensor,
    inputs: dict[str, Any],
    args: DAPOConfig,
    *,
    accumulation_steps: int,
    num_processes: int,
) -> torch.Tensor:
    """Return the average of a term such that it has the scale of the loss it is added to, as TRL 1.16 divides.

    Args:
        per_token: (N, T) values of the term.
        mask: (N, T) tokens that count in the loss.
        inputs: the micro-batch, with `num_items_in_batch`, the valid tokens of the rollout over all processes.
        accumulation_steps: micro-batches of the optimizer step at hand.
    """
    total = (per_token * mask).sum()
    if args.loss_type in _PER_WINDOW:
        tokens = inputs["num_items_in_batch"].clamp(min=1.0) / num_processes
        of_window: torch.Tensor = tokens * accumulation_steps / args.steps_per_generation
        return total / of_window
    if args.loss_type in _PER_COMPLETION:
        means = (per_token * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)  # (N,)
        return means.mean() / accumulation_steps
    if args.loss_type == "bnpo":
        return total / mask.sum().clamp(min=1.0) / accumulation_steps
    if args.loss_type == "dr_grpo":
        return total / (per_token.size(0) * int(args.max_completion_length or 1)) / accumulation_steps
    return (per_token * mask).sum(-1).mean() / accumulation_steps  # luspo
