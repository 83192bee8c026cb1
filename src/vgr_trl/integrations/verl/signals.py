"""Weights of the tokens of a batch from their VGR, and what a trainer does with them."""

import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from vgr_trl.batch import AttentionMass, RolloutSignals
from vgr_trl.credit import active_rules, shape_advantages, token_weights
from vgr_trl.integrations.verl.options import SignalOptions
from vgr_trl.loss import entropy_penalty, perception_loss, surprisal
from vgr_trl.rewards.attention import hard_negative_rewards, mdi_reward, vgr_reward
from vgr_trl.sharing.model_support import causal_model, flattens_layers
from vgr_trl.sharing.prefix_cache import SharingReport
from vgr_trl.sharing.sharing import share_prompts
from vgr_trl.signals.attention import AttentionProbe, mass_of_steps
from vgr_trl.signals.ratios import (
    ModalityMasks,
    build_modality_masks,
    last_layers,
    late_layers,
    special_token_ids,
    token_vision_gain_ratio,
    vision_gain_ratio,
    vision_token_ids,
)
from vgr_trl.utils import ConfigError, DataError

# ---------------------------------------------------------------------------------------------------------------------
# The signals of a batch, from the pass that measures them to the estimator that uses them.
#
# verl's registered estimators get rewards and a mask, nothing else of the batch; so what was measured is laid at hand
# around the call, by the trainer that has the batch.


COLUMNS = ("vgr_vision", "vgr_instruction", "vgr_token", "vgr_dependency")  # in a batch, (N, T) each


@dataclass
class SignalsAtHand:
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


_AT_HAND: ContextVar[SignalsAtHand | None] = ContextVar("signals_at_hand", default=None)


@contextmanager
def lay_at_hand(signals: SignalsAtHand) -> Iterator[SignalsAtHand]:
    """Let estimators find the signals of a batch for the duration."""
    token = _AT_HAND.set(signals)
    try:
        yield signals
    finally:
        _AT_HAND.reset(token)


def at_hand(name: str) -> SignalsAtHand:
    """Return the signals of the batch at hand, for the estimator of that name.

    Raises:
        ConfigError: none are.
    """
    found = _AT_HAND.get()
    if found is None:
        raise ConfigError(
            f"The advantage estimator {name} got no signals: set trainer.v1.trainer_mode=vgr_sync, whose trainer hands "
            "them over, or call it in lay_at_hand."
        )
    return found


def columns_in(batch: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return those of `COLUMNS` that a batch has."""
    return {name: batch[name] for name in COLUMNS if name in batch}


# ---------------------------------------------------------------------------------------------------------------------
# Rewards made of signals, which are known only after the pass in the actor: added in front of the advantages.


def add_signal_rewards(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: Sequence[Any], found: SignalsAtHand
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
    added = torch.zeros(len(vgr))
    weights = {
        "vgr": options.vgr_reward_weight,
        "vgr_hard_negative": options.hard_negative_reward_weight,
        "mdi": options.mdi_reward_weight,
    }
    for group in _groups(index, response_mask.any(1)):
        own, accuracy = [vgr[row] for row in group], [float(right[row]) for row in group]
        for name, weight in weights.items():
            if weight:
                values = _rewards(name, own, accuracy, options.mdi_balance_ratio)
                _add(added, group, values, weight, name, found.metrics)
    last = response_mask.long().cumsum(1).argmax(1)  # (N,)
    rewards = token_level_rewards.float().clone()
    rewards[torch.arange(len(rewards)), last] += added.to(rewards.device)
    for name in weights:
        count = found.metrics.pop(f"rewards/{name}/count", 0)
        if count:
            found.metrics[f"rewards/{name}/mean"] = found.metrics.pop(f"rewards/{name}/sum") / count
            found.metrics[f"rewards/{name}/not_applicable"] = int(response_mask.any(1).sum()) - count
    return rewards


def _rewards(name: str, vgr: list[float], accuracy: list[float], ratio: float) -> list[float | None]:
    """One reward of the completions of a prompt."""
    if name == "vgr_hard_negative":
        return hard_negative_rewards(accuracy, vgr, len(vgr))
    texts = [""] * len(vgr)
    return mdi_reward(texts, vgr, ratio) if name == "mdi" else vgr_reward(texts, vgr, len(vgr))


def _add(
    added: torch.Tensor,
    group: list[int],
    values: Sequence[float | None],
    weight: float,
    name: str,
    metrics: dict[str, float],
) -> None:
    for row, value in zip(group, values, strict=True):
        if value is not None:
            added[row] += weight * value
            for kind, amount in (("sum", value), ("count", 1)):
                key = f"rewards/{name}/{kind}"
                metrics[key] = metrics.get(key, 0) + amount


def _groups(index: Sequence[Any], answered: torch.Tensor) -> list[list[int]]:
    """Rows of each prompt, without those that verl appends to fill a batch, which have no tokens."""
    groups: dict[Any, list[int]] = {}
    for row in answered.nonzero().flatten().tolist():
        groups.setdefault(index[row], []).append(row)
    return list(groups.values())


# ---------------------------------------------------------------------------------------------------------------------
# From rewards and signals to advantages per token, as estimators of verl and EasyR1 return them.


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


# ---------------------------------------------------------------------------------------------------------------------
# Terms that the loss of a policy gets beside verl's own: VPPO's entropy penalty, PAPO's perception loss.


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


LAST_LAYERS = "token_weight_last_k_layers"  # the option, as the notes name it
_FITTED = "token_weights were padded with 1 or cut to the {} tokens of the responses (this is said once)."


def build_token_vgr_weights_for_batch(
    outputs_attentions: Sequence[Sequence[torch.Tensor | None]],
    input_ids: torch.Tensor,
    sequences: torch.Tensor,
    processor: Any,
    image_grid_thw: torch.Tensor | None = None,
    *,
    clip: tuple[float, float] | None = (0.2, 3.0),
    smooth_sigma: float = 0.0,
    last_k_layers: int | None = None,
    topk_ratio: float | None = None,
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return the weights of generated tokens, from the matrices of `generate(output_attentions=True)`.

    Args:
        outputs_attentions: `attentions` of what generate returns: per step and layer (N, H, Q, K).
        input_ids: (N, P) prompts, padded on the left with the tokenizer's padding token; one row may stand for several
            consecutive sequences.
        sequences: (N, P + T), `sequences` of what generate returns.
        processor: of the model; says which tokens are the image, which are special.
        image_grid_thw: (images, 3), patches of the images in time, height and width, by which the image tokens of the
            prompts are checked. None: they are not.
        clip, smooth_sigma, topk_ratio: as `vgr_trl.credit`.
        last_k_layers: the last so many layers; None: the late third.

    Returns:
        (N, T) float32, and the `info` of `token_vgr_weights`.

    Raises:
        DataError: the arguments are not of one generation, or the prompts have other image tokens than the grid says.
        ConfigError: an option is out of range, or the processor has no image token.
    """
    count, length = sequences.size(0), sequences.size(1) - input_ids.size(1)
    if count % len(input_ids) or length < 1 or len(outputs_attentions) < length:
        raise DataError(
            f"input_ids {tuple(input_ids.shape)}, sequences {tuple(sequences.shape)} and attentions of "
            f"{len(outputs_attentions)} steps: give the prompts and what generate made of them."
        )
    tokenizer = getattr(processor, "tokenizer", processor)
    vision = vision_token_ids(None, processor)
    if not vision:
        raise ConfigError(f"{type(processor).__name__} has no image token: give the processor of the model.")
    _check_grid(input_ids, vision, processor, image_grid_thw)
    present = (input_ids != tokenizer.pad_token_id).cumsum(1) > 0  # (N, P): padding stands in front
    masks = build_modality_masks(
        input_ids, present, vision_token_ids=vision, special_token_ids=special_token_ids(processor)
    )
    sets = torch.stack([masks.vision, masks.instruction], dim=-1)  # (N, P, 2)
    mass = mass_of_steps(outputs_attentions[:length], sets.repeat_interleave(count // len(input_ids), dim=0))
    mass.mask = _valid(sequences[:, -length:], tokenizer)
    return token_vgr_weights(
        mass, clip=clip, smooth_sigma=smooth_sigma, last_k_layers=last_k_layers, topk_ratio=topk_ratio
    )


def token_vgr_weights(
    mass: AttentionMass,
    *,
    clip: tuple[float, float] | None = (0.2, 3.0),
    smooth_sigma: float = 0.0,
    last_k_layers: int | None = None,
    topk_ratio: float | None = None,
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return the weights of the tokens of N completions from what a probe has measured: no matrix is needed.

    Args:
        mass: of `AttentionProbe`, `RolloutScorer` or `GenerationProbe`; its `mask` says which tokens are valid.
        clip, smooth_sigma, topk_ratio: as `vgr_trl.credit`.
        last_k_layers: the last so many layers; None: the late third.

    Returns:
        (N, T) float32 with mean 1 over the valid tokens of each completion; and `info`: `vgr` (N,) of the same layers,
        `undefined_fraction` of the valid tokens, `num_vision` and `num_instruction` (N,), `layers`.

    Raises:
        ConfigError: an option is out of range.
    """
    layers = last_layers(len(mass.vision), last_k_layers, "thirds", LAST_LAYERS)
    token_vgr, mask = token_vision_gain_ratio(mass, layers), mass.mask.bool()  # (N, T)
    weights = token_weights(token_vgr, mask, clip=clip, smooth_sigma=smooth_sigma, topk_ratio=topk_ratio)
    info = {
        "vgr": vision_gain_ratio(mass, layers),
        "undefined_fraction": float((token_vgr.isnan() & mask).sum() / mask.sum().clamp(min=1)),
        "num_vision": mass.num_vision,
        "num_instruction": mass.num_instruction,
        "layers": layers,
    }
    return weights, info


def as_weights(values: Any, response_mask: torch.Tensor) -> torch.Tensor:
    """Return `token_weights` of a reward or rollout as a tensor of the responses' shape, padded with 1 or cut.

    Args:
        values: tensor (N, T'), or per completion a list or tensor of weights; None for a completion without any.
        response_mask: (N, T).

    Raises:
        DataError: there is not one row per completion, or a weight of a valid token is negative or not finite.
    """
    count, length = response_mask.shape
    rows = [torch.ones(0) if row is None else torch.as_tensor(row, dtype=torch.float32).flatten() for row in values]
    if len(rows) != count:
        raise DataError(f"token_weights has {len(rows)} rows for {count} responses: give one for each.")
    weights = torch.ones(count, length)
    for row, given in zip(weights, rows, strict=True):
        row[: len(given)] = given[:length]
    valid = response_mask.bool().cpu()
    if any(len(row) > length or len(row) < int(mask.sum()) for row, mask in zip(rows, valid, strict=True)):
        warnings.warn(_FITTED.format(length), stacklevel=2)
    if not bool((weights[valid].isfinite() & (weights[valid] >= 0)).all()):
        raise DataError("token_weights of a valid token is negative or not finite: give numbers of at least 0.")
    return weights.to(response_mask.device)


def _valid(tokens: torch.Tensor, tokenizer: Any) -> torch.Tensor:
    """Which generated tokens (N, T) count: up to the first end of sequence, which counts itself."""
    ended = (tokens == tokenizer.eos_token_id).long()
    padding = (tokens == tokenizer.pad_token_id) & (tokens != tokenizer.eos_token_id)
    valid: torch.Tensor = (ended.cumsum(1) - ended == 0) & ~padding
    return valid


def _check_grid(
    input_ids: torch.Tensor, vision: Sequence[int], processor: Any, image_grid_thw: torch.Tensor | None
) -> None:
    if image_grid_thw is None:
        return
    merged = getattr(getattr(processor, "image_processor", None), "merge_size", 2) ** 2
    expected = int(torch.as_tensor(image_grid_thw).prod(-1).sum()) // merged
    found = int(torch.isin(input_ids, torch.tensor(vision, device=input_ids.device)).sum())
    if found != expected:
        raise DataError(
            f"The prompts have {found} image tokens, but image_grid_thw makes {expected}: give the grid of the images "
            "of these prompts, once per row."
        )


# ---------------------------------------------------------------------------------------------------------------------
# Attention measured in a pass of verl or EasyR1, whose rows may be packed into one, as columns along its tokens.


@dataclass(frozen=True)
class Layout:
    """How the N sequences of a micro-batch pass through the model.

    Attributes:
        input_ids: (N, S), or packed (1, tokens of all rows).
        present: the same shape, bool, which of them are no padding.
        prompt: the same shape, bool, which belong to prompts.
        rows: the same shape, int64, the sequence that each belongs to.
        count: N.
        packed: whether the sequences stand behind each other in one row.
    """

    input_ids: torch.Tensor
    present: torch.Tensor
    prompt: torch.Tensor
    rows: torch.Tensor
    count: int
    packed: bool


def packed_layout(tokens: torch.Tensor, lengths: Sequence[int], prompt_lengths: Sequence[int], pad: int = 0) -> Layout:
    """Return the layout of sequences behind each other.

    Args:
        tokens: (tokens of all sequences,).
        lengths: of the N sequences.
        prompt_lengths: of their prompts.
        pad: tokens that are appended behind all.
    """
    sizes = torch.tensor([*lengths, pad])
    rows = torch.repeat_interleave(torch.arange(len(sizes)), sizes)  # (tokens + pad,)
    starts = torch.cat([torch.zeros(1, dtype=torch.long), sizes.cumsum(0)])[:-1]
    prompts = torch.tensor([*prompt_lengths, 0])
    prompt = torch.arange(len(rows)) - starts[rows] < prompts[rows]
    ids = torch.nn.functional.pad(tokens, (0, pad))
    device = tokens.device
    present = (rows < len(lengths)).to(device)
    rows = rows.clamp(max=len(lengths) - 1).to(device)
    return Layout(ids[None], present[None], (prompt.to(device) & present)[None], rows[None], len(lengths), True)


def padded_layout(input_ids: torch.Tensor, present: torch.Tensor, prompt: torch.Tensor) -> Layout:
    """Return the layout of one sequence per row; all arguments (N, S)."""
    rows = torch.arange(len(input_ids), device=input_ids.device).unsqueeze(1).expand_as(input_ids)
    return Layout(input_ids, present.bool(), prompt.bool() & present.bool(), rows, len(input_ids), False)


class MeasuredPass:
    """Measures, while it is active, one pass of a micro-batch; `columns` is what came out.

    Args:
        model: of the actor, also wrapped by FSDP.
        special_token_ids: tokens that belong to no modality.
        agree: as `share_prompts` takes it.
    """

    def __init__(
        self,
        model: Any,
        layout: Layout,
        options: SignalOptions,
        special_token_ids: Sequence[int],
        agree: Any = None,
    ) -> None:
        vision = tuple(options.vision_token_ids or ()) or vision_token_ids(causal_model(model))
        if not vision:
            raise ConfigError(
                f"{type(causal_model(model)).__name__} has no image token in its configuration: give vision_token_ids."
            )
        self.model, self.layout, self.options, self.agree = model, layout, options, agree
        masks = build_modality_masks(
            layout.input_ids, layout.prompt, vision_token_ids=vision, special_token_ids=special_token_ids
        )
        self.masks = ModalityMasks(masks.vision, masks.instruction)
        self.report: SharingReport | None = None
        self.columns: dict[str, torch.Tensor] = {}

    @contextmanager
    def active(self) -> Iterator["MeasuredPass"]:
        """Measure the pass that is made in the block."""
        first, stop = self._emitting()
        probe = AttentionProbe(self.model, self.masks, slice(first, stop), packed=self.layout.packed)
        with ExitStack() as stack:
            apart = not self.layout.packed and not flattens_layers(self.model)  # FSDP 1 has not been tried
            if self.options.share_prompts != "off" and apart:
                self.report = stack.enter_context(share_prompts(self.model, agree=self.agree))
            with probe:
                yield self
        self.columns = self._columns(probe.mass, first, stop)

    def _emitting(self) -> tuple[int, int]:
        """Positions from the first to behind the last that emits a token of a response."""
        response = self.layout.present & ~self.layout.prompt
        places = response.any(0).nonzero().flatten()
        if not len(places):
            return 0, 1
        return max(int(places[0]) - 1, 0), max(int(places[-1]), 1)

    def _columns(self, mass: AttentionMass, first: int, stop: int) -> dict[str, torch.Tensor]:
        """Per token of the layout: attention per vision and per instruction token of its own prompt, and their ratio.

        What stands at a position belongs to the token that it emits, which is the next one.
        """
        options, layout = self.options, self.layout
        late = late_layers(len(mass.vision), options.attention_segments)
        columns = {}
        sides = {
            "vgr_vision": (mass.vision, self.masks.vision),
            "vgr_instruction": (mass.instruction, self.masks.instruction),
        }
        for name, (side, mask) in sides.items():
            counts = torch.zeros(layout.count, device=mask.device)
            counts = counts.index_add(0, layout.rows.flatten(), mask.flatten().float())  # (N,)
            of_token = counts[layout.rows[:, first:stop]].masked_fill(
                counts[layout.rows[:, first:stop]] == 0, torch.nan
            )
            columns[name] = self._along(side[late].mean(0) / of_token, first, stop)
            if options.token_weights and options.token_weights_last_k_layers is not None:
                chosen = last_layers(len(side), options.token_weights_last_k_layers, "thirds", LAST_LAYERS)
                columns[f"{name}_chosen"] = self._along(side[chosen].mean(0) / of_token, first, stop)
        if "vgr_vision_chosen" in columns:
            columns["vgr_token"] = columns.pop("vgr_instruction_chosen") / columns.pop("vgr_vision_chosen")
        return columns

    def _along(self, values: torch.Tensor, first: int, stop: int) -> torch.Tensor:
        columns = self.layout.input_ids.size(1)
        return torch.nn.functional.pad(values, (first, columns - stop), value=torch.nan)


# ---------------------------------------------------------------------------------------------------------------------
# Perturbed images where a trainer keeps no images, but what a processor has made of them.


def perturb_row(
    inputs: Mapping[str, Any], options: SignalOptions, step: int, black: Sequence[float], patch_size: int = 14
) -> dict[str, Any]:
    """Return the pixel inputs of a row with squares of its images blackened, each with probability `black_prob`.

    The seed is made of the run's, the step and the pixels: completions of one prompt get the same squares, in whatever
    process they are.

    Args:
        inputs: of one row; `pixel_values` is (patches, C x time x p x p), a patch per row and channels first, or
            (..., C, H, W).
        step: of the optimizer.
        black: per channel, what black is after the processor's normalisation.
        patch_size: of the squares, in pixels of (..., C, H, W); where patches are rows they are the squares.

    Raises:
        DataError: there are pixels in another form.
    """
    pixels = inputs.get("pixel_values")
    if pixels is None:
        return dict(inputs)
    if not isinstance(pixels, torch.Tensor) or pixels.ndim < 2:
        raise DataError(f"pixel_values is a {type(pixels).__name__}: only tensors of patches or images are perturbed.")
    content = zlib.crc32(pixels.detach().cpu().float().contiguous().numpy().tobytes())
    generator = np.random.default_rng([options.seed, step, content])
    colours = torch.tensor(black, dtype=pixels.dtype, device=pixels.device)  # (C,)
    if pixels.ndim == 2:
        if pixels.size(1) % len(black):
            raise DataError(f"pixel_values has {pixels.size(1)} numbers per patch: give {len(black)} channels first.")
        dark = torch.from_numpy(generator.random(len(pixels)) < options.black_prob).to(pixels.device)  # (patches,)
        value = colours.repeat_interleave(pixels.size(1) // len(black))
        return {**inputs, "pixel_values": torch.where(dark.unsqueeze(1), value, pixels)}
    *front, channels, height, width = pixels.shape
    if channels != len(black):
        raise DataError(f"pixel_values has the shape {tuple(pixels.shape)}: give (..., {len(black)}, height, width).")
    grid = (*front, 1, -(-height // patch_size), -(-width // patch_size))
    dark = torch.from_numpy(generator.random(grid) < options.black_prob).to(pixels.device)
    dark = dark.repeat_interleave(patch_size, -2).repeat_interleave(patch_size, -1)[..., :height, :width]
    return {**inputs, "pixel_values": torch.where(dark, colours.view(-1, 1, 1), pixels)}


def told(options: SignalOptions, step: int, processor: Any) -> dict[str, Any]:
    """Return what the actor is told with a batch: options, and what only the processor knows."""
    return {
        "options": options.to_dict(),
        "step": step,
        "special_token_ids": list(special_token_ids(processor)),
        "black": black_of(processor),
    }


def black_of(processor: Any) -> list[float]:
    """Return what black is, per channel, after the normalisation of a processor."""
    images = getattr(processor, "image_processor", None)
    mean, std = getattr(images, "image_mean", None), getattr(images, "image_std", None)
    if mean is None or std is None or not getattr(images, "do_normalize", True):
        return [0.0, 0.0, 0.0]
    return [-float(middle) / float(spread) for middle, spread in zip(mean, std, strict=True)]
