"""What is added to TRL's loss of a micro-batch: terms averaged over tokens as TRL averages its own, and a critic's."""

from collections.abc import Callable
from typing import Any

import torch

from vgr_trl.batch.inputs import joined, scoring_inputs, valid_tokens
from vgr_trl.compat.loss_normaliser import average_as_loss
from vgr_trl.config import DAPOConfig
from vgr_trl.credit.perception_loss import entropy_penalty, perception_divergence, perception_loss
from vgr_trl.credit.totals import Totals
from vgr_trl.training.critic.critic import Critic
from vgr_trl.training.host import Host
from vgr_trl.training.kl import KLControl
from vgr_trl.training.rollout import TrainingPass

Score = Callable[..., Any]  # as TRL's `_get_per_token_logps_and_entropies`


def what_reads_every_token(args: DAPOConfig) -> str | None:
    """Return the option by which tokens that have no advantage are trained on too, a term of the loss or a critic."""
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


class AddedLoss:
    """Adds the terms that are no advantages, and lets a critic learn."""

    def __init__(self, host: Host, kl: KLControl, critic: Critic | None) -> None:
        self._host, self._kl, self._critic = host, kl, critic

    def complete(self, loss: torch.Tensor, passed: TrainingPass, score: Score) -> tuple[torch.Tensor, dict[str, float]]:
        """Return the loss of a micro-batch, 0 while only the critic is trained, and metrics."""
        terms, metrics = self._terms(passed, score)
        loss = loss + terms
        if self._critic is None:
            return loss, metrics
        metrics |= self._critic.learn(passed, lambda critic, inputs: score(critic, **inputs)[0])
        return loss * (not self._critic.holds_policy()), metrics

    def _terms(self, passed: TrainingPass, score: Score) -> tuple[torch.Tensor | float, dict[str, float]]:
        """The average of all terms, and their metrics."""
        args, accelerator, totals = self._host.args, self._host.accelerator, Totals()
        of_kl, metrics = self._kl.term(passed)
        each = (entropy_term(passed, args, totals), perception_term(passed, args, totals, score), of_kl)
        terms = [term for term in each if term is not None]  # (N, T) each
        if not terms:
            return 0.0, metrics
        average = average_as_loss(
            torch.stack(terms).sum(dim=0),
            valid_tokens(passed.inputs),
            passed.inputs,
            args,
            accumulation_steps=self._host.accumulation_steps,
            num_processes=accelerator.num_processes,
        )
        return average, metrics | totals.metrics(accelerator.gather)


def entropy_term(passed: TrainingPass, args: DAPOConfig, totals: Totals) -> torch.Tensor | None:
    """Return the entropy penalty of every token of a micro-batch (N, T), None if it is off; `totals` get its mean."""
    if not args.use_entropy_penalty:
        return None
    assert passed.logps is not None
    mask = valid_tokens(passed.inputs)
    penalty = entropy_penalty(passed.logps, mask, args.entropy_penalty_coef)
    totals.add_mean("entropy_penalty", penalty.detach(), mask.bool())
    return penalty


def perception_term(passed: TrainingPass, args: DAPOConfig, totals: Totals, score: Score) -> torch.Tensor | None:
    """Return the perception loss of PAPO of every token of a micro-batch (N, T); None if it is off.

    It is the one term that takes another pass with gradients, through the perturbed images.
    """
    if not (args.uses_perception_loss or args.der_loss_weight1 > 0):
        return None
    assert passed.logps is not None
    inputs, logps, mask = passed.inputs, passed.logps, valid_tokens(passed.inputs)
    perturbed_logps = logps
    if args.uses_perception_loss:
        pixels = inputs.get("perturbed_pixel_values")
        perturbed = scoring_inputs(inputs if pixels is None else inputs | {"pixel_values": joined(pixels)})
        perturbed_logps, entropies, _ = score(passed.model, **perturbed, compute_entropy=True)
        divergence = perception_divergence(logps.detach(), perturbed_logps.detach(), mask)
        totals.add_mean("perturbed_entropy", entropies.detach(), mask.bool())
        totals.add_mean("perception_loss", -divergence, mask.bool())
    return perception_loss(
        logps,
        perturbed_logps,
        mask,
        coefficient=args.perception_loss_weight,
        entropy_coefficient=args.der_loss_weight1,
        perturbed_entropy_coefficient=args.der_loss_weight2,
    )
