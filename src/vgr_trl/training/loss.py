"""Terms added to TRL's loss, averaged over tokens as TRL averages its own."""

from collections.abc import Callable
from typing import Any

import torch

from vgr_trl.batch.inputs import joined, scoring_inputs
from vgr_trl.compat.loss_normaliser import average_as_loss
from vgr_trl.credit import entropy_penalty, perception_divergence, perception_loss
from vgr_trl.training.host import Host
from vgr_trl.training.kl import KLControl
from vgr_trl.training.rollout import TrainingPass, valid_tokens

Term = tuple[torch.Tensor | float, dict[str, float]]
Score = Callable[[dict[str, Any]], tuple[torch.Tensor, torch.Tensor]]


def what_reads_every_token(args: Any) -> str | None:
    """Return the option by which tokens that have no advantage are trained on too, by a term of the loss or a critic.

    None: there is none.

    Args:
        args: a `DAPOConfig`.
    """
    terms = {
        "beta": args.beta != 0,
        "entropy_coef": args.entropy_coef != 0,
        "use_adaptive_entropy": args.use_adaptive_entropy,
        "top_entropy_quantile": args.top_entropy_quantile < 1,
        "use_entropy_penalty": args.use_entropy_penalty,
        "perception_loss_weight": args.perception_loss_weight > 0,
        "der_loss_weight1": args.der_loss_weight1 > 0,
        "der_loss_weight2": args.der_loss_weight2 > 0,
        "kl_coef": args.has_kl_loss,
        "advantage_estimator": args.uses_critic,
    }
    return next((name for name, is_on in terms.items() if is_on), None)


def added_terms(passed: TrainingPass, host: Host, kl: KLControl, score: Score) -> Term:
    """Return the sum of all terms of a micro-batch, and their metrics.

    Args:
        passed: with log-probabilities.
        host: whose loss they are added to.
        kl: of the run.
        score: as `perception_term` takes it.
    """
    terms = entropy_term(passed, host), perception_term(passed, host, score), kl_term(passed, host, kl)
    return sum(term for term, _ in terms), {name: value for _, metrics in terms for name, value in metrics.items()}


def kl_term(passed: TrainingPass, host: Host, kl: KLControl) -> Term:
    """Return the KL from the reference of a micro-batch, 0 if it is not in the loss, and metrics.

    Args:
        passed: with log-probabilities.
        host: whose loss it is added to.
        kl: of the run.
    """
    per_token, metrics = kl.term(passed)  # (N, T)
    if per_token is None:
        return 0.0, metrics
    return _averaged(per_token, valid_tokens(passed.inputs), passed, host), metrics


def entropy_term(passed: TrainingPass, host: Host) -> Term:
    """Return the entropy penalty of a micro-batch, 0 if it is off, and its mean.

    Args:
        passed: with log-probabilities.
        host: whose loss it is added to.
    """
    if not host.args.use_entropy_penalty:
        return 0.0, {}
    assert passed.logps is not None
    mask = valid_tokens(passed.inputs)
    penalty = entropy_penalty(passed.logps, mask, host.args.entropy_penalty_coef)  # (N, T)
    return _averaged(penalty, mask, passed, host), {"entropy_penalty": _token_mean(penalty, mask, host)}


def perception_term(passed: TrainingPass, host: Host, score: Score) -> Term:
    """Return the perception loss of PAPO for a micro-batch, 0 if it is off; it, and the entropy given no image.

    It is the one term that takes another pass with gradients, through the perturbed images.

    Args:
        passed: with log-probabilities.
        host: whose loss it is added to.
        score: passes inputs through the model and returns log-probabilities and entropies (N, T), with gradients.
    """
    args, metrics = host.args, dict[str, float]()
    if not (args.uses_perception_loss or args.der_loss_weight1 > 0):
        return 0.0, metrics
    assert passed.logps is not None
    inputs, logps, mask = passed.inputs, passed.logps, valid_tokens(passed.inputs)
    perturbed_logps = logps
    if args.uses_perception_loss:
        pixels = inputs.get("perturbed_pixel_values")
        perturbed = scoring_inputs(inputs if pixels is None else inputs | {"pixel_values": joined(pixels)})
        perturbed_logps, entropies = score(perturbed)
        divergence = perception_divergence(logps.detach(), perturbed_logps.detach(), mask)
        metrics["perturbed_entropy"] = _token_mean(entropies, mask, host)
        metrics["perception_loss"] = _token_mean(-divergence, mask, host)
    loss = perception_loss(
        logps,
        perturbed_logps,
        mask,
        coefficient=args.perception_loss_weight,
        entropy_coefficient=args.der_loss_weight1,
        perturbed_entropy_coefficient=args.der_loss_weight2,
    )  # (N, T)
    return _averaged(loss, mask, passed, host), metrics


def _averaged(per_token: torch.Tensor, mask: torch.Tensor, passed: TrainingPass, host: Host) -> torch.Tensor:
    return average_as_loss(
        per_token,
        mask,
        passed.inputs,
        host.args,
        accumulation_steps=host.accumulation_steps,
        num_processes=host.accelerator.num_processes,
    )


def _token_mean(values: torch.Tensor, mask: torch.Tensor, host: Host) -> float:
    """The mean of `values` (N, T) over the valid tokens of all processes."""
    local = torch.stack([(values.detach() * mask).sum(), mask.sum().float()])
    total, count = host.accelerator.reduce(local, reduction="sum").tolist()
    return total / max(count, 1.0)
