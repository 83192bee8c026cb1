"""Loss terms beside the policy loss, per token (N, T), and their average."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from vgr_trl.batch import Batch
from vgr_trl.config import PER_WINDOW, LossOptions
from vgr_trl.errors import DataError
from vgr_trl.metrics.step_metrics import Totals
from vgr_trl.registries import call_plugin, declares, loss_terms
from vgr_trl.signals.ratios import visual_dependency
from vgr_trl.signals.scoring import Scores

if TYPE_CHECKING:  # verl and EasyR1 read this file without TRL
    from vgr_trl.dapo_config import DAPOConfig


def perception_divergence(logps: Tensor, perturbed_logps: Tensor, mask: Tensor) -> Tensor:
    """Return, per token, the KL divergence between the policy given the image and given the perturbed image.

    It is the `visual_dependency` with gradients, which are 0 where the dependency is clamped (at 10, or at a difference
    of 20).

    Args:
        logps: (N, T), log-probabilities of the completion tokens given the image.
        perturbed_logps: (N, T), of the same tokens given the perturbed image, under the same policy.
        mask: (N, T) bool, valid tokens; other values are ignored, NaN included.

    Returns:
        (N, T) float32 in [0, 10], 0 outside `mask`.
    """
    mask = mask.bool()
    return visual_dependency(logps.masked_fill(~mask, 0), perturbed_logps.masked_fill(~mask, 0))


def surprisal(logps: Tensor, mask: Tensor) -> Tensor:
    """Return -log p of every valid token, 0 elsewhere; for sampled tokens it estimates the policy's entropy.

    Args:
        logps: (N, T), log-probabilities of the completion tokens.
        mask: (N, T) bool, valid tokens.
    """
    return -logps.float().masked_fill(~mask.bool(), 0)


def perception_loss(
    logps: Tensor,
    perturbed_logps: Tensor,
    mask: Tensor,
    *,
    coefficient: float = 0.01,
    entropy_coefficient: float = 0.0,
    perturbed_entropy_coefficient: float = 0.0,
) -> Tensor:
    """Return PAPO's implicit perception loss and double entropy loss (https://huggingface.co/papers/2507.06448).

    -gamma · KL(original, perturbed) - eta_1 · log p_original - eta_2 · log p_perturbed: minimising it makes the
    completion depend on the image. The entropy terms keep both distributions sharp; without them the policy can win by
    writing unrelated tokens. Gradients flow through both log-probabilities. In the published code the perturbed
    log-probabilities carry no gradient by default, so that its entropy term on them trains nothing.

    Args:
        logps: (N, T), log-probabilities of the completion tokens given the image.
        perturbed_logps: (N, T), of the same tokens given the perturbed image, under the same policy.
        mask: (N, T) bool, valid tokens; other values are ignored, NaN included.
        coefficient: gamma, at least 0. The paper uses 0.01 and 0.02 and saw collapse at 0.04.
        entropy_coefficient: eta_1, at least 0. The paper uses 0.03 and 0.05.
        perturbed_entropy_coefficient: eta_2, at least 0, likewise.

    Returns:
        (N, T) float32, the loss of each token, 0 outside `mask`.
    """
    divergence = perception_divergence(logps, perturbed_logps, mask)
    return (
        entropy_coefficient * surprisal(logps, mask)
        + perturbed_entropy_coefficient * surprisal(perturbed_logps, mask)
        - coefficient * divergence
    )


def entropy_penalty(logps: Tensor, mask: Tensor, coefficient: float = 0.06) -> Tensor:
    """Return the entropy penalty of VPPO per token, coefficient · -log p (https://huggingface.co/papers/2510.09285).

    Args:
        logps: (N, T), log-probabilities of the completion tokens.
        mask: (N, T) bool, valid tokens.
        coefficient: at least 0.

    Returns:
        (N, T) float32, the loss of each token, 0 outside `mask`; its mean over the valid tokens is the penalty.
    """
    return coefficient * surprisal(logps, mask)


_PER_COMPLETION = ("grpo", "sapo")


def average_as_loss(
    per_token: Tensor, mask: Tensor, num_items: Tensor | None, args: "DAPOConfig", steps: int, num_processes: int
) -> Tensor:
    """Average a loss term as TRL 1.16 averages its own loss.

    TRL does not return its normaliser, which is local to `_compute_loss`; tests/training/test_loss_terms.py compares.

    Args:
        per_token: (N, T) values of the term.
        mask: (N, T) tokens that count in the loss.
        num_items: valid tokens of the rollout over all processes, which losses of a window divide by.
        args: options of the run.
        steps: micro-batches of the current optimizer step.
        num_processes: number of processes.
    """
    sums, counts = (per_token * mask).sum(-1), mask.sum(-1)  # (N,)
    if args.loss_type in PER_WINDOW:
        tokens = cast("Tensor", num_items).clamp(min=1.0) / num_processes
        of_window: Tensor = tokens * steps / (args.steps_per_generation or 1)
        return sums.sum() / of_window
    if args.loss_type in _PER_COMPLETION:
        average = (sums / counts.clamp(min=1.0)).mean()
    elif args.loss_type == "bnpo":
        average = sums.sum() / counts.sum().clamp(min=1.0)
    elif args.loss_type == "dr_grpo":
        average = sums.sum() / (per_token.size(0) * int(args.max_completion_length or 1))
    else:  # luspo
        average = sums.mean()
    return average / steps


@dataclass(frozen=True)
class TermInputs:
    """Inputs of a loss term: a micro-batch of N completions whose training pass has run.

    Quantities that a term has to name in `needs` are None unless a term that is on names them.

    Attributes:
        logps: (N, T) with gradients, log-probabilities of the tokens; constants outside `loss_mask`.
        loss_mask: (N, T) bool, tokens that count in the loss.
        advantages: (N, T); None inside verl and EasyR1.
        old_logps: (N, T), log-probabilities under the policy that sampled; None: they equal `logps`.
        reference_logps: (N, T), log-probabilities under the reference; None without one.
        perturbed_logps: (N, T) with gradients, log-probabilities given the perturbed image; for `perturbed`.
        hidden: (N, T, D) with gradients, hidden states at the predicting positions; for `hidden`.
        teacher_logps: (N, T), log-probabilities under `teacher_view`, NaN for rows without it; for `teacher` and
            `teacher_top`.
        teacher_top: the teacher's K most likely tokens, (N, T, K), and log-probabilities, (N, T, K + 1), whose last
            column is the rest of the vocabulary; for `teacher_top`.
        model: the policy, also wrapped; None inside verl and EasyR1.
        temperature: divides logits.
        totals: collects metrics.
    """

    logps: Tensor
    loss_mask: Tensor
    advantages: Tensor | None = None
    old_logps: Tensor | None = None
    reference_logps: Tensor | None = None
    perturbed_logps: Tensor | None = None
    hidden: Tensor | None = None
    teacher_logps: Tensor | None = None
    teacher_top: tuple[Tensor, Tensor] | None = None
    model: nn.Module | None = None
    temperature: float = 1.0
    totals: Totals = field(default_factory=Totals)

    def log(self, name: str, values: Tensor) -> None:
        """Log the mean of values (N, T) over the tokens that count."""
        self.totals.add_mean(name, values.detach(), self.loss_mask)


@dataclass
class LossPass:
    """A micro-batch during its loss; scores and term inputs are set once its training pass has run."""

    batch: Batch
    scores: Scores | None = None
    inputs: TermInputs | None = None


@loss_terms.register("entropy_penalty")
def entropy_penalty_term(passed: TermInputs, options: LossOptions) -> Tensor:
    """Return VPPO's entropy penalty of every token (N, T)."""
    term = entropy_penalty(passed.logps, passed.loss_mask, options.entropy_penalty_coef)
    passed.log("entropy_penalty", term)
    return term


@loss_terms.register("perception_loss")
@declares(needs=("perturbed",))
def perception_loss_term(passed: TermInputs, options: LossOptions) -> Tensor:
    """Return PAPO's perception loss of every token (N, T), with both entropy terms."""
    perturbed = cast("Tensor", passed.perturbed_logps)
    passed.log("perception_loss", -perception_divergence(passed.logps.detach(), perturbed.detach(), passed.loss_mask))
    return perception_loss(
        passed.logps,
        perturbed,
        passed.loss_mask,
        coefficient=options.perception_loss_weight,
        entropy_coefficient=options.der_loss_weight1,
        perturbed_entropy_coefficient=options.der_loss_weight2,
    )


@loss_terms.register("entropy_loss")
def entropy_loss_term(passed: TermInputs, options: LossOptions) -> Tensor:
    """Return PAPO's entropy term on the original image, (N, T), for runs without its other terms."""
    return options.der_loss_weight1 * surprisal(passed.logps, passed.loss_mask)


def auxiliary_loss(
    inputs: TermInputs, terms: Mapping[str, Any], options: LossOptions, kl: Tensor | None
) -> Tensor | None:
    """Return the sum of the loss terms of a micro-batch, (N, T); None without any.

    Args:
        inputs: the micro-batch, whose training pass has run.
        terms: name of a loss term that is on -> its function.
        options: options of the terms.
        kl: (N, T), the KL loss; None: it is off.
    """
    values = [_compute_term(name, term, inputs, options) for name, term in terms.items()]
    values += [] if kl is None else [kl]
    return torch.stack(values).sum(dim=0) if values else None


def _compute_term(name: str, function: Any, inputs: TermInputs, args: LossOptions) -> Tensor:
    """Return a loss term (N, T), 0 outside the mask; raise `DataError` for a wrong shape or no gradient."""
    term = call_plugin(f"the loss term {name}", function, inputs, args.plugin_values(function))
    if not isinstance(term, Tensor) or term.shape != inputs.loss_mask.shape:
        kind = tuple(term.shape) if isinstance(term, Tensor) else type(term).__name__
        raise DataError(f"The loss term {name} returned {kind}: return a tensor {tuple(inputs.loss_mask.shape)}.")
    term = term.masked_fill(~inputs.loss_mask, 0)
    if inputs.logps.requires_grad and not term.requires_grad and term.any():
        raise DataError(f"The loss term {name} has no gradient, so it trains nothing: compute it from passed.logps.")
    return term
