"""Terms added to TRL's loss, averaged over tokens as TRL averages its own."""

from typing import Any

import torch

from vgr_trl.batch.inputs import joined, scoring_inputs
from vgr_trl.credit import entropy_penalty, perception_divergence, perception_loss

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


def entropy_term(trainer: Any, logps: torch.Tensor, inputs: dict[str, Any]) -> torch.Tensor | float:
    """Return the entropy penalty of a micro-batch, 0 if it is off; log its mean.

    Args:
        trainer: the `DAPOTrainer` whose loss it is added to.
        logps: (N, T), with gradients.
        inputs: the micro-batch.
    """
    if not trainer.args.use_entropy_penalty:
        return 0.0
    mask = valid_tokens(inputs)
    penalty = entropy_penalty(logps, mask, trainer.args.entropy_penalty_coef)  # (N, T)
    _log_token_mean(trainer, "entropy_penalty", penalty, mask)
    return average_as_loss(penalty, mask, inputs, trainer)


def perception_term(trainer: Any, model: Any, logps: torch.Tensor, inputs: dict[str, Any]) -> torch.Tensor | float:
    """Return the perception loss of PAPO for a micro-batch, 0 if it is off; log it and the entropy given no image.

    It is the one term that takes another pass with gradients, through the perturbed images.

    Args:
        trainer: the `DAPOTrainer` whose loss it is added to.
        model: as the trainer's `_compute_loss` gets it.
        logps: (N, T), with gradients.
        inputs: the micro-batch.
    """
    args = trainer.args
    if not (args.uses_perception_loss or args.der_loss_weight1 > 0):
        return 0.0
    mask = valid_tokens(inputs)
    perturbed_logps = logps
    if args.uses_perception_loss:
        pixels = inputs.get("perturbed_pixel_values")
        perturbed = scoring_inputs(inputs if pixels is None else inputs | {"pixel_values": joined(pixels)})
        perturbed_logps, entropies, _ = trainer._get_per_token_logps_and_entropies(
            model, compute_entropy=True, **perturbed
        )
        _log_token_mean(trainer, "perturbed_entropy", entropies.detach(), mask)
        divergence = perception_divergence(logps.detach(), perturbed_logps.detach(), mask)
        _log_token_mean(trainer, "perception_loss", -divergence, mask)
    loss = perception_loss(
        logps,
        perturbed_logps,
        mask,
        coefficient=args.perception_loss_weight,
        entropy_coefficient=args.der_loss_weight1,
        perturbed_entropy_coefficient=args.der_loss_weight2,
    )  # (N, T)
    return average_as_loss(loss, mask, inputs, trainer)


def _log_token_mean(trainer: Any, name: str, values: torch.Tensor, mask: torch.Tensor) -> None:
    """Log the mean of `values` (N, T) over the valid tokens of all processes."""
    local = torch.stack([(values.detach() * mask).sum(), mask.sum().float()])
    total, count = trainer.accelerator.reduce(local, reduction="sum").tolist()
    trainer._metrics["train"][name].append(total / max(count, 1.0))
