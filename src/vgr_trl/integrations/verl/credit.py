"""From rewards and signals to advantages per token, as estimators of verl and EasyR1 return them."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from vgr_trl.credit.rules import active_rules
from vgr_trl.credit.shaping import shape_advantages
from vgr_trl.errors import ConfigError
from vgr_trl.integrations.verl.at_hand import SignalsAtHand
from vgr_trl.integrations.verl.group_rewards import add_signal_rewards
from vgr_trl.integrations.verl.options import SignalOptions

Estimator = Callable[..., tuple[torch.Tensor, torch.Tensor]]
_NO_WEIGHTS = (
    "enable_token_weights is on, but the batch has neither token_weights nor measured attention: all weights are 1 "
    "(this is said once)."
)


def estimate(
    base: Estimator,
    found: SignalsAtHand,
    *,
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Sequence[Any],
    **more: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return advantages per token and returns: those of `base` on rewards with signals, shaped by the rules in use.

    Args:
        found: signals of the batch; its metrics are filled.
        token_level_rewards: (N, T).
        response_mask: (N, T).
        index: (N,), the same for completions of one prompt.

    Raises:
        ConfigError: a rule or reward that is on needs a signal that was not measured.
    """
    rewards = add_signal_rewards(token_level_rewards, response_mask, index, found)
    advantages, returns = base(token_level_rewards=rewards, response_mask=response_mask, index=index, **more)
    prompts = _numbered(index, advantages.device)
    return shape(advantages, response_mask, found, _live(advantages, response_mask, prompts), prompts), returns


def shape(
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    found: SignalsAtHand,
    live: torch.Tensor | None = None,
    prompts: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return advantages (N, T) times what the rules that are on give to each token.

    With `apply_to` mask, token weights do not multiply the advantages: `found.response_mask` becomes mask x weight.

    Args:
        advantages: (N, T).
        response_mask: (N, T).
        found: signals of the same batch; its metrics are filled.
        live: (N,) bool, completions that take part in the statistics of the trajectory scale; None: all.
        prompts: (N,) numbers of the prompts, for rules that compare completions; None: all belong to one.
    """
    options, mask = found.options, response_mask.bool()
    weights = _weights_that_came(advantages, mask, found, options)
    apart = weights is not None or options.apply_to == "mask"
    rules = replace(options, token_weights=False) if apart else options
    if options.token_weights and weights is None and found.attention(mask) is None:
        warnings.warn(_NO_WEIGHTS, stacklevel=2)
        rules, weights = replace(options, token_weights=False), torch.ones_like(advantages)
    elif options.token_weights and weights is None and apart:
        weights = _measured_weights(advantages, response_mask, found, options)
    rules = replace(rules, token_weights_last_k_layers=None)  # the columns are of those layers already
    shaped = advantages.float() * mask
    if active_rules(rules):
        signals = found.signals(response_mask)
        if any("entropies" in rule.needs for rule in active_rules(rules)) and "entropies" not in found.columns:
            raise ConfigError("A rule reads entropies, which this trainer does not compute: switch it off.")
        shaped, metrics = shape_advantages(shaped, signals, rules, shaped=live, groups=prompts)
        found.metrics |= {f"vgr/{name}": value for name, value in metrics.items()}
    if weights is not None:
        found.metrics["vgr/token_weight_mean"] = float(weights[mask].mean()) if bool(mask.any()) else 1.0
        if options.apply_to == "mask":
            found.response_mask = response_mask * weights
        else:
            shaped = shaped * weights
    return shaped * mask


def _numbered(index: Sequence[Any], device: torch.device) -> torch.Tensor:
    """Numbers (N,) in place of the prompts' names."""
    numbers = {key: number for number, key in enumerate(dict.fromkeys(index))}
    return torch.tensor([numbers[key] for key in index], device=device)


def _live(advantages: torch.Tensor, response_mask: torch.Tensor, prompts: torch.Tensor) -> torch.Tensor:
    """Which completions (N,) belong to a prompt whose advantages are not all 0."""
    moved = ((advantages * response_mask) != 0).any(1)
    return torch.isin(prompts, prompts[moved])


def _measured_weights(
    advantages: torch.Tensor, response_mask: torch.Tensor, found: SignalsAtHand, options: SignalOptions
) -> torch.Tensor:
    own = SignalOptions(
        token_weights=True,
        token_weights_clip=options.token_weights_clip,
        token_weights_smooth_sigma=options.token_weights_smooth_sigma,
        token_weights_topk_ratio=options.token_weights_topk_ratio,
    )
    weights, _ = shape_advantages(torch.ones_like(advantages), found.signals(response_mask), own)
    return _positive_only(weights, advantages, options)


def _weights_that_came(
    advantages: torch.Tensor, mask: torch.Tensor, found: SignalsAtHand, options: SignalOptions
) -> torch.Tensor | None:
    """Weights that came with the rollout, divided by their mean over each completion."""
    if not options.token_weights or found.token_weights is None:
        return None
    weights = found.token_weights.to(advantages.device).float()
    mean = (weights * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    weights = torch.where(mask & (mean > 0), weights / mean.masked_fill(mean <= 0, 1), 1.0)
    return _positive_only(weights, advantages, options)


def _positive_only(weights: torch.Tensor, advantages: torch.Tensor, options: SignalOptions) -> torch.Tensor:
    return weights.masked_fill(advantages < 0, 1) if options.token_weights_positive_only else weights
