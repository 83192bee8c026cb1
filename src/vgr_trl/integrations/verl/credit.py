"""Rewards, advantages and loss terms of a batch from its signals, as the estimators and losses of verl and EasyR1.

verl's registered estimators get rewards and a mask, nothing else of the batch; so the trainer, which has the batch,
sets what was measured as the context of the call.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from vgr_trl.credit import active_rules, shape_advantages
from vgr_trl.integrations.verl.options import SignalOptions
from vgr_trl.loss import entropy_penalty, perception_loss, surprisal
from vgr_trl.rewards.attention import hard_negative_rewards, mdi_reward, vgr_reward
from vgr_trl.signals.named import RolloutSignals
from vgr_trl.signals.ratios import AttentionMass, vision_gain_ratio
from vgr_trl.utils import ConfigError

COLUMNS = ("vgr_vision", "vgr_instruction", "vgr_token", "vgr_dependency")  # in a batch, (N, T) each


@dataclass
class SignalContext:
    """What an estimator of this library may read beside verl's arguments.

    Attributes:
        options: of the run.
        columns: name -> (N, T) of `COLUMNS`, and `entropies` and `old_log_probs` where they are known.
        token_weights: (N, T), where they came with the rollout.
        metrics: filled by the estimator; what the trainer logs.
        response_mask: filled by the estimator where token weights are applied to the mask.
    """

    options: SignalOptions
    columns: Mapping[str, torch.Tensor] = field(default_factory=dict)
    token_weights: torch.Tensor | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    response_mask: torch.Tensor | None = None

    def attention(self, mask: torch.Tensor, name: str = "vgr_token") -> AttentionMass | None:
        """Return the attention per token of one kind, as a mass of one layer; None if it was not measured.

        Args:
            mask: (N, T) bool.
            name: `vgr_token`, of the layers that token weights read, or `late`, of the layers that rewards read.
        """
        one = torch.ones(len(mask), dtype=torch.long, device=mask.device)
        if name == "vgr_token" and "vgr_token" in self.columns:
            ratio = self.columns["vgr_token"].to(mask.device).float()  # a ratio over an attention of 1
            return AttentionMass(torch.ones_like(ratio)[None], ratio[None], one, one, mask)
        if "vgr_vision" not in self.columns:
            return None
        vision, instruction = (
            self.columns[side].to(mask.device).float()[None] for side in ("vgr_vision", "vgr_instruction")
        )
        return AttentionMass(vision, instruction, one, one, mask)

    def signals(self, response_mask: torch.Tensor) -> RolloutSignals:
        """Return what was measured as the signals that credit reads; NaN where log-probabilities are not known.

        Args:
            response_mask: (N, T).
        """
        mask = response_mask.bool()
        unknown = torch.full(mask.shape, torch.nan, device=mask.device)
        logps, entropies = (self.columns.get(name, unknown).to(mask.device) for name in ("old_log_probs", "entropies"))
        dependency = self.columns.get("vgr_dependency")
        return RolloutSignals(
            logps.float(),
            entropies.float(),
            mask,
            self.attention(mask),
            None if dependency is None else dependency.to(mask.device).float(),
        )


_SIGNAL_CONTEXT: ContextVar[SignalContext | None] = ContextVar("signal_context", default=None)


@contextmanager
def set_signal_context(signals: SignalContext) -> Iterator[SignalContext]:
    """Let estimators find the signals of a batch for the duration."""
    token = _SIGNAL_CONTEXT.set(signals)
    try:
        yield signals
    finally:
        _SIGNAL_CONTEXT.reset(token)


def signal_context(name: str) -> SignalContext:
    """Return the signals of the batch in work, for the estimator of that name.

    Raises:
        ConfigError: none are.
    """
    found = _SIGNAL_CONTEXT.get()
    if found is None:
        raise ConfigError(
            f"The advantage estimator {name} got no signals: set trainer.v1.trainer_mode=vgr_sync, whose trainer hands "
            "them over, or call it in set_signal_context."
        )
    return found


def columns_in(batch: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return those of `COLUMNS` that a batch has."""
    return {name: batch[name] for name in COLUMNS if name in batch}


def add_signal_rewards(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: Sequence[Any], found: SignalContext
) -> torch.Tensor:
    """Return the rewards (N, T) with those made of attention added to the last token of each completion.

    A reward that is not defined for a completion adds nothing to it, and is counted.

    Args:
        token_level_rewards: (N, T), whose sums are the rewards of the completions.
        response_mask: (N, T).
        index: (N,), the same for completions of one prompt, in any order.
        found: signals of the batch; its metrics are filled.

    Raises:
        ConfigError: attention was not measured.
    """
    options = found.options
    if not options.rewards_attention:
        return token_level_rewards
    mass = found.attention(response_mask.bool(), "late")
    if mass is None:
        raise ConfigError("A reward made of attention has a weight, but the batch has no measured attention.")
    vgr = vision_gain_ratio(mass).tolist()
    right = (token_level_rewards.sum(1) >= options.right_from).tolist()
    weights = {
        "vgr": options.vgr_reward_weight,
        "vgr_hard_negative": options.hard_negative_reward_weight,
        "mdi": options.mdi_reward_weight,
    }
    added = torch.zeros(len(vgr))
    defined: dict[str, list[float]] = {name: [] for name, weight in weights.items() if weight}
    for group in _groups(index, response_mask.any(1)):
        own, accuracy, texts = [vgr[row] for row in group], [float(right[row]) for row in group], [""] * len(group)
        values = {
            "vgr": vgr_reward(texts, own, len(group)),
            "vgr_hard_negative": hard_negative_rewards(accuracy, own, len(group)),
            "mdi": mdi_reward(texts, own, options.mdi_balance_ratio),
        }
        for name, of_reward in defined.items():
            for row, value in zip(group, values[name], strict=True):
                if value is not None:
                    added[row] += weights[name] * value
                    of_reward.append(value)
    last = response_mask.long().cumsum(1).argmax(1)  # (N,)
    rewards = token_level_rewards.float().clone()
    rewards[torch.arange(len(rewards)), last] += added.to(rewards.device)
    for name, of_reward in defined.items():
        if of_reward:
            found.metrics[f"rewards/{name}/mean"] = sum(of_reward) / len(of_reward)
            found.metrics[f"rewards/{name}/not_applicable"] = int(response_mask.any(1).sum()) - len(of_reward)
    return rewards


def _groups(index: Sequence[Any], answered: torch.Tensor) -> list[list[int]]:
    """Rows of each prompt, without those that verl appends to fill a batch, which have no tokens."""
    groups: dict[Any, list[int]] = {}
    for row in answered.nonzero().flatten().tolist():
        groups.setdefault(index[row], []).append(row)
    return list(groups.values())


Estimator = Callable[..., tuple[torch.Tensor, torch.Tensor]]
_NO_WEIGHTS = (
    "enable_token_weights is on, but the batch has neither token_weights nor measured attention: all weights are 1 "
    "(logged once)."
)


def estimate(
    base: Estimator,
    found: SignalContext,
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
    found: SignalContext,
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
        if any("entropies" in needs for needs in active_rules(rules).values()) and "entropies" not in found.columns:
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
    advantages: torch.Tensor, response_mask: torch.Tensor, found: SignalContext, options: SignalOptions
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
    advantages: torch.Tensor, mask: torch.Tensor, found: SignalContext, options: SignalOptions
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


Loss = tuple[torch.Tensor, dict[str, Any]]


@dataclass(frozen=True)
class LossContext:
    """What the terms of a micro-batch are made of, beside the arguments that verl gives to a policy loss.

    Attributes:
        options: of the run.
        perturbed_logps: (N, T) with gradients, given perturbed images; None: no term reads it.
    """

    options: SignalOptions
    perturbed_logps: torch.Tensor | None = None


_LOSS_CONTEXT: ContextVar[LossContext | None] = ContextVar("loss_context", default=None)


@contextmanager
def set_loss_context(terms: LossContext) -> Iterator[None]:
    """Let policy losses find what their terms are made of for the duration."""
    token = _LOSS_CONTEXT.set(terms)
    try:
        yield
    finally:
        _LOSS_CONTEXT.reset(token)


def with_terms(base: Callable[..., Loss], aggregate: Callable[..., torch.Tensor], name: str) -> Callable[..., Loss]:
    """Return a policy loss of verl that is `base` plus the terms that are on, divided as `base` divides.

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
        terms = _LOSS_CONTEXT.get()
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


def token_terms(terms: LossContext, logps: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
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
