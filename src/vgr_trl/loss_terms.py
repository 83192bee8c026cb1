"""Terms added to TRL's loss, averaged over tokens as TRL averages its own."""

from typing import Any

import torch

_PER_COMPLETION = ("grpo", "sapo")
_PER_WINDOW = ("dapo", "cispo", "vespo")


def average_as_loss(per_token: torch.Tensor, mask: torch.Tensor, inputs: dict[str, Any], trainer: Any) -> torch.Tensor:
    """Return the average of a term such that it has the scale of the loss it is added to, as TRL 1.16 divides.

    Args:
        per_token: (N, T) values of the term.
        mask: (N, T) tokens that count in the loss.
        inputs: the micro-batch, with `num_items_in_batch`, the valid tokens of the rollout over all processes.
        trainer: of which loss type, accumulation and sizes are read.
    """
    accumulated = trainer.current_gradient_accumulation_steps
    total = (per_token * mask).sum()
    if trainer.loss_type in _PER_WINDOW:
        tokens = inputs["num_items_in_batch"].clamp(min=1.0) / trainer.accelerator.num_processes
        return total / (tokens * accumulated / trainer.args.steps_per_generation)
    if trainer.loss_type in _PER_COMPLETION:
        means = (per_token * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)  # (N,)
        return means.mean() / accumulated
    if trainer.loss_type == "bnpo":
        return total / mask.sum().clamp(min=1.0) / accumulated
    if trainer.loss_type == "dr_grpo":
        return total / (per_token.size(0) * trainer.max_completion_length) / accumulated
    return (per_token * mask).sum(-1).mean() / accumulated  # luspo


def valid_tokens(inputs: dict[str, Any]) -> torch.Tensor:
    """Return the mask (N, T) of the tokens of a batch that count in the loss."""
    return inputs["completion_mask"] * inputs.get("tool_mask", 1)
