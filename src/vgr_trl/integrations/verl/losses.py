"""Terms that the loss of a policy gets beside verl's own: VPPO's entropy penalty, PAPO's perception loss."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from vgr_trl.credit.perception_loss import entropy_penalty, perception_loss, surprisal
from vgr_trl.errors import ConfigError
from vgr_trl.integrations.verl.options import SignalOptions

Loss = tuple[torch.Tensor, dict[str, Any]]


@dataclass(frozen=True)
class TermsAtHand:
    """What the terms of a micro-batch are made of, beside the arguments that verl gives to a policy loss.

    Attributes:
        options: of the run.
        perturbed_logps: (N, T) with gradients, given perturbed images; None: no term reads it.
    """

    options: SignalOptions
    perturbed_logps: torch.Tensor | None = None


_TERMS: ContextVar[TermsAtHand | None] = ContextVar("terms_at_hand", default=None)


@contextmanager
def lay_terms_at_hand(terms: TermsAtHand) -> Iterator[None]:
    """Let policy losses find what their terms are made of for the duration."""
    token = _TERMS.set(terms)
    try:
        yield
    finally:
        _TERMS.reset(token)


def with_terms(base: Callable[..., Loss], aggregate: Callable[..., torch.Tensor], name: str) -> Callable[..., Loss]:
    """Return a policy loss of verl that is `base` plus the terms at hand, divided as `base` divides.

    Args:
        aggregate: verl's `agg_loss`.
        name: that it is registered under, for messages.
    """

    def loss(
        old_log_prob: torch.Tensor,
        log_prob: torch.Tensor,
        advantages: torch.Tensor,
        response_mask: torch.Tensor,
        loss_agg_mode: str = "token-mean",
        config: Any = None,
        rollout_is_weights: torch.Tensor | None = None,
    ) -> Loss:
        terms = _TERMS.get()
        if terms is None:
            raise ConfigError(
                f"The policy loss {name} got no terms: set the environment variable VERL_ENGINE_VENDOR=vgr and "
                "trainer.v1.trainer_mode=vgr_sync, whose engine hands them over."
            )
        value, metrics = base(
            old_log_prob=old_log_prob,
            log_prob=log_prob,
            advantages=advantages,
            response_mask=response_mask,
            loss_agg_mode=loss_agg_mode,
            config=config,
            rollout_is_weights=rollout_is_weights,
        )
        for term, per_token in token_terms(terms, log_prob, response_mask).items():
            share = aggregate(
                loss_mat=per_token, loss_mask=response_mask, loss_agg_mode=loss_agg_mode, **config.global_batch_info
            )
            value = value + share
            metrics[f"actor/{term}"] = share.detach().item()
        return value, metrics

    return loss


def token_terms(terms: TermsAtHand, logps: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the terms that are on, (N, T) each, 0 outside the mask.

    Args:
        logps: (N, T) with gradients.
        mask: (N, T).

    Raises:
        ConfigError: the perception loss is on, and there are no log-probabilities given perturbed images.
    """
    options, found = terms.options, {}
    mask = mask.bool()
    if options.use_entropy_penalty:
        found["entropy_penalty"] = entropy_penalty(logps, mask, options.entropy_penalty_coef)
    if not options.uses_perception_loss and options.der_loss_weight1 > 0:
        found["entropy_loss"] = options.der_loss_weight1 * surprisal(logps, mask)
    if options.uses_perception_loss:
        if terms.perturbed_logps is None:
            raise ConfigError("The perception loss is on, but the micro-batch has no perturbed images: give rows some.")
        found["perception_loss"] = perception_loss(
            logps,
            terms.perturbed_logps,
            mask,
            coefficient=options.perception_loss_weight,
            entropy_coefficient=options.der_loss_weight1,
            perturbed_entropy_coefficient=options.der_loss_weight2,
        )
    return found
