"""Token-level credit: turn one advantage per completion into one per token.

`shape_advantages` composes the rules that are on: rules of this library, of plug-ins and of published methods
(`vgpo`, `pgpo`, `vepo`, `anchor_tokens`). The formulas below it are pure functions.
"""

import inspect
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from vgr_trl import registries
from vgr_trl.batch import per_token
from vgr_trl.config import RULES, CreditOptions
from vgr_trl.errors import ConfigError, DataError
from vgr_trl.metrics.step_metrics import Gather, Totals, add_weights
from vgr_trl.options import Checked, option
from vgr_trl.registries import LOGPS_PREFIX, TEACHER, declares, is_measurement, needed_signals, short_name
from vgr_trl.signals.named import RolloutSignals, read_segments, teacher_gap
from vgr_trl.signals.ratios import AttentionMass, last_layers, late_layers, token_vision_gain_ratio


@dataclass(frozen=True)
class Added:
    """Values (N, T) that a rule adds to token advantages instead of weighing them; finite on valid tokens."""

    values: Tensor


Metrics = Mapping[str, float | Tensor | tuple[Tensor, Tensor]]
Credit = tuple[Tensor | Added, Metrics]  # weights (N, T), or bool (N, T): tokens to keep, or added values

# Key in `RolloutSignals.extra` of the weights (N, T) that a reward file returns; NaN for completions without weights.
REWARD_FILE_WEIGHTS = "token_weights_of_reward"
# Option that switches on a rule of this library -> the measurement that the rule reads.
_READS = {
    "token_weights": "attention",
    "enable_perception_filtering": "dependency",
    "enable_entropy_filtering": "entropies",
    "enable_trajectory_reweighting": "dependency",
}
for _name in RULES:  # messages about a misspelt rule list the registered names
    registries.credit_rules.register(_name)(lambda *arguments: None)


def builtin_rules(options: CreditOptions) -> dict[str, str]:
    """Map the options that switch on this library's rules to the measurement that each rule reads."""
    return {switch: need for switch, need in _READS.items() if vars(options)[switch]}


def active_rules(options: CreditOptions) -> dict[str, tuple[str, ...]]:
    """Map every rule that is on, named as in messages, to the signals that it reads.

    Raises:
        ConfigError: a rule of `credit_rules` is not found.
    """
    rules = {spec: registries.credit_rules.load(spec) for spec in options.plugin_rules}
    plugins = {f"the credit rule {spec}": needed_signals(rule) for spec, rule in rules.items()}
    return {switch: (need,) for switch, need in builtin_rules(options).items()} | plugins


@torch.no_grad()
def shape_advantages(
    advantages: Tensor,
    signals: RolloutSignals,
    options: CreditOptions,
    *,
    shaped: Tensor | None = None,
    groups: Tensor | None = None,
    gather: Gather | None = None,
    completion_ids: Tensor | None = None,
    weights_of: dict[str, Tensor] | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """Shape the advantage of every token, A[i] · scale_i · weight[i, t] · keep[i, t] + added[i, t]; return metrics too.

    - scale: `trajectory_scale` of the visual dependency.
    - weight: `token_weights` of the VGR per token, or a reward file's weights; with `perception_weighting="soft"` also
      `dependency_weights`, clipped to `token_weights_clip`; times the weights of every plug-in of `credit_rules`.
    - keep: the union of the tokens with the largest visual dependency, the tokens with the largest entropy and the
      tokens that plug-ins keep. Other tokens and padding get 0. The dependency does not filter a completion in which
      it is undefined.
    - added: the sum of what plug-ins add, also to tokens that are not kept and where the advantage is 0.

    Args:
        advantages: (N,), or (N, T) if tokens have their own.
        signals: signals of the same N completions.
        options: the rules that are on, and their numbers; `check_plugins()` has switched on rules of `credit_rules`.
        shaped: (N,) bool, completions that take part in minimum, maximum and mean of the trajectory scale; None: all.
        groups: (N,) number of each completion's prompt over all processes; None: all belong to one prompt.
        gather: concatenates a 1-D tensor over all processes, which have equally many rows and call it equally often.
            None: there is one process.
        completion_ids: (N, T) tokens of the completions, for plug-ins that read them.
        weights_of: receives, for records, the weights (N, T) of each plug-in by name; 0 and 1 for kept tokens.

    Returns:
        The advantages, (N, T) float32, and the rules' metrics over all processes; a mean of nothing is NaN.

    Raises:
        ConfigError: a rule needs a signal that was not measured, or is named and not switched on.
        DataError: a plug-in does not return weights.
    """
    _require_signals(signals, options)
    mask, totals = signals.mask.bool(), Totals()
    credit = per_token(advantages).float().expand(mask.shape).clone()  # (N, T)
    kept: list[Tensor] = []  # one (N, T) bool per filter: the tokens that it keeps
    added = torch.zeros_like(credit)
    context = {"shaped": shaped, "groups": groups, "gather": gather, "completion_ids": completion_ids}
    for name, weights in _weights_by_rule(advantages, signals, options, context, totals):
        if isinstance(weights, Added):
            added += weights.values
            continue
        if weights_of is not None and name is not None:
            weights_of[name] = weights.float()
        if weights.dtype == torch.bool:
            kept.append(weights)
        else:
            credit *= weights
    if kept:
        union = torch.stack(kept).any(dim=0)
        totals.add_mean("combined_token_fraction", union, mask)
        credit *= union
    return credit + added, totals.metrics(gather)


def _weights_by_rule(
    advantages: Tensor, signals: RolloutSignals, options: CreditOptions, context: Mapping[str, Any], totals: Totals
) -> Iterator[tuple[str | None, Tensor | Added]]:
    """Yield each rule's name (None unless it is a plug-in) and weights, (N, T) or (N, 1); add its metrics.

    Bool weights mark the tokens that the rule keeps; `Added` replaces weights.
    """
    mask, dependency = signals.mask.bool(), signals.measured("dependency")  # (N, T)
    if options.token_weights:
        measured = attention_weights(signals.measured("attention"), mask, options)
        weights = given_weights(signals.extra.get(REWARD_FILE_WEIGHTS), mask, measured)
        if options.token_weights_positive_only:
            weights = weights.masked_fill(per_token(advantages) < 0, 1)
        add_weights(totals, "token_weight", weights, mask)
        yield None, weights
    if options.enable_perception_filtering and options.perception_weighting == "soft":
        weights = dependency_weights(dependency, mask, clip=options.token_weights_clip)
        add_weights(totals, "perception_weight", weights, mask)
        yield None, weights
    elif options.enable_perception_filtering:
        fraction = options.top_p_perception_tokens
        yield None, _keep_largest(dependency, mask, fraction, totals, "perception", "low_var_kl")
    if options.enable_entropy_filtering:
        fraction = options.top_p_entropy_tokens
        yield None, _keep_largest(signals.entropies, mask, fraction, totals, "entropy", "entropy")
    for spec in options.plugin_rules:
        yield short_name(spec), _plugin_weights(spec, (advantages, signals, mask), options, context, totals)
    if options.enable_trajectory_reweighting:
        means, shaped = mean_dependency(dependency, mask), context["shaped"]  # (N,)
        compared = means if shaped is None else means.masked_fill(~shaped.bool(), torch.nan)
        statistics = dependency_statistics(compared, context["gather"])
        scale, largest = _scale(means, statistics, options.trajectory_scaling_min)
        totals.add_mean("sensitivity_score_mean", means, ~compared.isnan())
        totals.add_mean("scaling_factor_mean", scale, ~compared.isnan())
        totals.replicated["dynamic_scaling_max"] = largest
        yield None, scale.unsqueeze(1)


def _require_signals(signals: RolloutSignals, options: CreditOptions) -> None:
    for name in options.credit_rules or ():
        if not RULES.get(name, {}).items() <= vars(options).items():
            raise ConfigError(f"credit_rules has {name}, which is not switched on: call options.check_plugins() first.")
    for rule, need in ((rule, need) for rule, needs in active_rules(options).items() for need in needs):
        if (signals.measured(need) if is_measurement(need) else signals.extra.get(short_name(need))) is None:
            raise ConfigError(f"{rule} is on, but the signals have no {need}: measure it, or switch {rule} off.")


def _keep_largest(
    scores: Tensor, mask: Tensor, fraction: float, totals: Totals, filter_name: str, score_name: str
) -> Tensor:
    """Mark each completion's tokens with the largest scores, all if it has no scores, (N, T) bool; add metrics.

    The metrics are the fraction of kept tokens, the mean scores of kept and dropped tokens, and the mean over
    completions of the smallest kept score.
    """
    defined = mask & ~scores.isnan()
    kept = top_fraction_mask(scores, mask, fraction) | (mask & ~defined.any(dim=1, keepdim=True))
    chosen = kept & defined
    totals.add_mean(f"{filter_name}_token_fraction", kept, mask)
    totals.add_mean(f"{score_name}_mean_selected", scores, chosen)
    totals.add_mean(f"{score_name}_mean_rejected", scores, ~kept & defined)
    ceiling = scores.new_full((len(scores), 1), torch.inf)  # gives a completion of 0 tokens a minimum
    smallest = torch.cat([scores.masked_fill(~chosen, torch.inf), ceiling], dim=1).amin(dim=1)  # (N,)
    totals.add_mean(f"{score_name}_threshold", smallest, chosen.any(dim=1))
    return kept


def _plugin_weights(
    spec: str,
    inputs: tuple[Tensor, RolloutSignals, Tensor],
    options: CreditOptions,
    context: Mapping[str, Any],
    totals: Totals,
) -> Tensor | Added:
    """Call a plug-in: return its weights (N, T), kept tokens (bool) or added values; add its metrics."""
    function, name, mask = registries.credit_rules.load(spec), short_name(spec), inputs[-1]
    rule, taken = f"the credit rule {spec}", inspect.signature(function).parameters
    named = {key: value for key, value in context.items() if key in taken}
    result = registries.call_plugin(rule, function, *inputs, options.plugin_values(function), **named)
    credit, metrics = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    weights = credit.values if (adds := isinstance(credit, Added)) else credit
    if not isinstance(weights, Tensor) or weights.shape != mask.shape or not isinstance(metrics, Mapping):
        shape = tuple(weights.shape) if isinstance(weights, Tensor) else type(weights).__name__
        got = f"{rule} returned {shape}, metrics {metrics!r}"
        raise DataError(f"{got}: return weights, a tensor {tuple(mask.shape)}, and a dict.")
    for key, value in metrics.items():
        if isinstance(value, tuple):
            totals.add_mean(f"credit/{name}/{key}", *value)
        elif isinstance(value, Tensor) and value.shape in (mask.shape, mask.shape[:1]):
            valid = mask if value.ndim == 2 else mask.any(1)
            totals.add_mean(f"credit/{name}/{key}", value, valid & ~value.isnan())
        else:
            totals.replicated[f"credit/{name}/{key}"] = float(value)
    if weights.dtype == torch.bool:
        totals.add_mean(f"credit/{name}/token_fraction", weights & mask, mask)
        return weights & mask
    if not bool(weights[mask].isfinite().all()):
        raise DataError(f"{rule} returned weights that are not finite for valid tokens: declare its needs.")
    if adds:
        totals.add_mean(f"credit/{name}/added", weights, mask)
        return Added(weights.masked_fill(~mask, 0))
    add_weights(totals, f"credit/{name}/weight", weights, mask)
    return weights.masked_fill(~mask, 1)


def top_fraction_mask(scores: Tensor, mask: Tensor, fraction: float) -> Tensor:
    """Mark each completion's ⌈fraction · length⌉ valid tokens with the largest scores.

    Of equal scores the earlier token wins; an undefined score (NaN) comes last. `fraction` counts as the decimal number
    that it is printed as: 0.07 of 100 tokens are 7.

    Args:
        scores: (N, T).
        mask: (N, T) bool, valid tokens; they may lie anywhere.
        fraction: share of the valid tokens, in [0, 1].

    Returns:
        (N, T) bool, never true outside `mask`.
    """
    mask = mask.bool()
    order = scores.float().nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    order = order.argsort(dim=1, descending=True, stable=True)  # (N, T), token indices, best first
    valid = mask.gather(1, order)
    # The small subtrahend undoes rounding: in floating point 0.07 · 100 is above 7.
    counts = (mask.sum(1, keepdim=True).double() * fraction - 1e-9).ceil()  # (N, 1)
    if fraction > 0:
        counts = counts.clamp(min=1)
    return torch.zeros_like(mask).scatter(1, order, valid & (valid.cumsum(1) <= counts))


_LARGEST_LOG = 60.0  # e^60 times any number of tokens is finite in float32


def token_weights(
    token_vgr: Tensor,
    mask: Tensor,
    *,
    clip: Sequence[float] | None = (0.2, 3.0),
    smooth_sigma: float = 0.0,
    topk_ratio: float | None = None,
) -> Tensor:
    """Weigh every token by its attention to the image: a small VGR gives a large weight; the mean is 1 per completion.

    With s_t = -ln VGR_t (infinite values replaced by the completion's finite extreme on that side), the weights are
    exp(s_t - mean s), smoothed along the tokens, clipped, and divided by their mean over the completion's valid tokens.

    Example:
        >>> vgr = torch.tensor([[0.5, 1.0, 2.0, 1.0]])  # the first token looked at the image most
        >>> mask = torch.tensor([[True, True, True, False]])
        >>> token_weights(vgr, mask)
        tensor([[1.7143, 0.8571, 0.4286, 1.0000]])

    Args:
        token_vgr: (N, T), VGR of single tokens, at least 0.
        mask: (N, T) bool, valid tokens.
        clip: smallest and largest weight before the division; None: no limits.
        smooth_sigma: standard deviation, in tokens, of a Gaussian cut off at ⌈3 · smooth_sigma⌉ tokens, which is
            renormalised over the valid tokens within reach; 0: none.
        topk_ratio: tokens outside the ⌈topk_ratio · length⌉ largest weights get weight 1 before the division; in
            (0, 1]; None: all tokens keep their weights.

    Returns:
        (N, T) float32. Weight 1 where VGR is undefined (NaN), for all tokens of a completion in which no VGR is finite
        and above 0, and outside `mask`. Means and smoothing leave out undefined tokens.

    Raises:
        ConfigError: `clip` is out of range.
    """
    _check_clip(clip)
    scores = -token_vgr.float().log()  # (N, T)
    if not scores.numel():
        return torch.ones_like(scores)
    defined = mask.bool() & ~scores.isnan()
    finite = defined & scores.isfinite()
    defined &= finite.any(dim=1, keepdim=True)
    lowest = scores.masked_fill(~finite, torch.inf).amin(dim=1, keepdim=True)
    highest = scores.masked_fill(~finite, -torch.inf).amax(dim=1, keepdim=True)
    scores = scores.clamp(lowest, highest).masked_fill(~defined, 0)
    raw = (scores - masked_mean(scores, defined)).clamp(-_LARGEST_LOG, _LARGEST_LOG).exp()
    if smooth_sigma > 0:
        raw = _smooth(raw, defined, smooth_sigma)
    raw = raw if clip is None else raw.clamp(*clip)
    if topk_ratio is not None:
        kept = top_fraction_mask(raw.masked_fill(~defined, torch.nan), mask, topk_ratio)
        raw = raw.masked_fill(~kept, 1)
    return normalise_to_mean_one(raw, defined)


def stack_weights(values: Any, response_mask: Tensor) -> Tensor:
    """Stack `token_weights` of completions into a tensor (N, T), padded with 1 or cut.

    Args:
        values: tensor (N, T'), or per completion a list or tensor of weights; None for a completion without weights.
        response_mask: (N, T), the tokens of the responses.

    Raises:
        DataError: the number of rows differs from the number of completions, a row is not numeric, or a weight of a
            valid token is negative or not finite.
    """
    count, length = response_mask.shape
    try:
        rows = [torch.ones(0) if row is None else torch.as_tensor(row, dtype=torch.float32).flatten() for row in values]
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"token_weights cannot be read ({error}): give numbers, one for each token.") from error
    if len(rows) != count:
        raise DataError(f"token_weights has {len(rows)} rows for {count} responses: give one for each.")
    padded = pad_sequence([*rows, torch.ones(length)], batch_first=True, padding_value=1.0)  # (N + 1, T or more)
    weights, valid = padded[:-1, :length], response_mask.bool().cpu()
    if any(len(row) > length or len(row) < int(mask.sum()) for row, mask in zip(rows, valid, strict=True)):
        warn_of_padding()
    if not bool((weights[valid].isfinite() & (weights[valid] >= 0)).all()):
        raise DataError("token_weights of a valid token is negative or not finite: give numbers of at least 0.")
    return weights.to(response_mask.device)


@cache
def warn_of_padding() -> None:
    """Warn once per process; `warnings` resets its once-filter."""
    warnings.warn("token_weights were padded with 1 or cut to the length of the responses (said once).", stacklevel=3)


def given_weights(weights: Tensor | None, mask: Tensor, measured: Tensor) -> Tensor:
    """Normalise the weights of a reward to mean 1 per completion; other completions get measured weights.

    Args:
        weights: (N, T), NaN for a completion without weights; None if no completion has weights. Weights that are all 0
            become 1.
        mask: (N, T) bool, valid tokens.
        measured: (N, T), weights measured from attention.
    """
    if weights is None:
        return measured
    defined = mask.bool() & ~weights.isnan()
    filled = weights.masked_fill(~defined, 0)
    return torch.where(defined, normalise_to_mean_one(filled, defined & (masked_mean(filled, defined) > 0)), measured)


def attention_weights(attention: AttentionMass, mask: Tensor, options: CreditOptions) -> Tensor:
    """Weigh tokens by their attention to the image with the options of a run, (N, T).

    Args:
        attention: attention mass of the completions.
        mask: (N, T) bool, valid tokens.
        options: numbers of `token_weights`.
    """
    count, last = len(attention.vision), options.token_weights_last_k_layers
    layers = last_layers(count, last, read_segments(options), "token_weights_last_k_layers")
    return weigh_tokens(token_vision_gain_ratio(attention, layers), mask, options)


def weigh_tokens(token_vgr: Tensor, mask: Tensor, options: CreditOptions) -> Tensor:
    """Return the `token_weights` of the VGR of each token with the options of a run, (N, T)."""
    sigma, share = options.token_weights_smooth_sigma, options.token_weights_topk_ratio
    return token_weights(token_vgr, mask, clip=options.token_weights_clip, smooth_sigma=sigma, topk_ratio=share)


def dependency_weights(dependency: Tensor, mask: Tensor, *, clip: Sequence[float] | None = (0.2, 3.0)) -> Tensor:
    """Weigh every token by its visual dependency: a soft form of the perception filter.

    w_t = clip(s_t / mean s) / mean clip(s / mean s), with the visual dependency s and means over the completion's
    valid tokens. Every token keeps some credit, no single token takes all of it, and the mean weight is 1.

    Args:
        dependency: (N, T), visual dependency, at least 0.
        mask: (N, T) bool, valid tokens.
        clip: smallest and largest weight before the division; None: no limits.

    Returns:
        (N, T) float32. Weight 1 where the dependency is undefined (NaN), for all tokens of a completion in which no
        token depends on the image, and outside `mask`.

    Raises:
        ConfigError: `clip` is out of range.
    """
    _check_clip(clip)
    defined = mask.bool() & ~dependency.isnan()
    scores = dependency.float().masked_fill(~defined, 0)
    mean = masked_mean(scores, defined)  # (N, 1)
    defined &= mean > 0
    raw = scores / mean.masked_fill(mean <= 0, 1)
    return normalise_to_mean_one(raw if clip is None else raw.clamp(*clip), defined)


def _smooth(values: Tensor, defined: Tensor, sigma: float) -> Tensor:
    """Average (N, T) values along T with a Gaussian, over the defined tokens within reach."""
    reach = min(math.ceil(3 * sigma), values.size(1) - 1)
    offsets = torch.arange(-reach, reach + 1, device=values.device, dtype=values.dtype)
    kernel = torch.exp(-0.5 * (offsets / sigma) ** 2).view(1, 1, -1)
    both = torch.stack([values * defined, defined.to(values.dtype)], dim=1).flatten(0, 1).unsqueeze(1)  # (2N, 1, T)
    sums, totals = torch.nn.functional.conv1d(both, kernel, padding=reach).view(len(values), 2, -1).unbind(dim=1)
    return torch.where(defined, sums / totals.masked_fill(~defined, 1), values)


def _check_clip(clip: Sequence[float] | None) -> None:
    if clip is not None and not 0 <= clip[0] <= clip[1] > 0:  # torch.clamp accepts the bounds in any order
        raise ConfigError(f"clip is {clip!r}: give None or two numbers with 0 <= low <= high and high above 0.")


_SMALLEST_SPREAD = 1e-6


def mean_dependency(dependency: Tensor, mask: Tensor) -> Tensor:
    """Average visual dependency over each completion's valid tokens, (N,); NaN where it is undefined."""
    defined = mask.bool() & ~dependency.isnan()
    means = masked_mean(dependency.float().masked_fill(~defined, 0), defined).squeeze(1)
    return means.masked_fill(~defined.any(dim=1), torch.nan)


def dependency_statistics(means: Tensor, gather: Gather | None = None) -> tuple[float, float, float]:
    """Return minimum, maximum and mean over the mean dependencies that are not NaN; three zeros without any.

    Args:
        means: (N,), NaN for completions that are not compared.
        gather: concatenates a 1-D tensor over all processes; None: there is one process.
    """
    every = (means if gather is None else gather(means)).detach().cpu().double()
    every = every[~every.isnan()]
    return (every.min().item(), every.max().item(), every.mean().item()) if len(every) else (0.0, 0.0, 0.0)


def trajectory_scale(
    dependency: Tensor, mask: Tensor, minimum: float = 0.8, statistics: tuple[float, float, float] | None = None
) -> Tensor:
    """Scale each completion's advantage by its dependency on the image; the mean scale is 1.

    With z the mean visual dependency of a completion and u = (z - min) / (max - min), the scale is a + u (b - a), where
    a = `minimum` and b = a + (1 - a) / mean(u) (VPPO, https://huggingface.co/papers/2510.09285).

    Args:
        dependency: (N, T), visual dependency of the tokens.
        mask: (N, T) bool, valid tokens.
        minimum: smallest scale a, in [0, 1].
        statistics: minimum, maximum and mean of z over all processes; None: over the completions of `dependency`.

    Returns:
        (N,) float32. 1 for a completion whose z is undefined (it has no valid token, or no defined dependency), and for
        all completions if max - min is at most 1e-6.
    """
    means = mean_dependency(dependency, mask)
    return _scale(means, statistics or dependency_statistics(means), minimum)[0]


def _scale(means: Tensor, statistics: tuple[float, float, float], minimum: float) -> tuple[Tensor, float]:
    """Return the scales of `trajectory_scale`, and the largest scale b, from mean dependencies (N,)."""
    low, high, mean = statistics
    if high - low <= _SMALLEST_SPREAD:
        return torch.ones_like(means), 1.0
    largest = minimum + (1 - minimum) * (high - low) / (mean - low)
    position = ((means - low) / (high - low)).clamp(0, 1)  # (N,)
    return (minimum + position * (largest - minimum)).nan_to_num(nan=1.0), largest


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Average each row of (N, T) values over `mask`, (N, 1); 0 where `mask` is empty."""
    return (values * mask).sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)


def normalise_to_mean_one(weights: Tensor, defined: Tensor) -> Tensor:
    """Return positive (N, T) weights divided by their mean over `defined`, and 1 for all other tokens."""
    mean = masked_mean(weights, defined)
    return torch.where(defined, weights / mean.masked_fill(mean <= 0, 1), 1.0)


_SMALLEST_RANGE = 1e-8  # added to ranges before dividing by them


def min_max(values: Tensor, where: Tensor) -> Tensor:
    """Scale each row of (N, T) values to [0, 1] over `where`, 0 elsewhere; equal values become 0."""
    low = values.masked_fill(~where, torch.inf).amin(1, keepdim=True)
    high = values.masked_fill(~where, -torch.inf).amax(1, keepdim=True)
    return ((values - low) / (high - low + _SMALLEST_RANGE)).masked_fill(~where, 0)


# Rules of published methods: `rule(advantages, signals, mask, options) -> (weights or kept tokens, metrics)`. A rule
# that compares completions takes `shaped`, `groups` and `gather` by name, a rule that reads tokens `completion_ids`.


@dataclass
class AnchorOptions(Checked):
    """Numbers of AT-RL's anchor tokens."""

    top_p_anchor_tokens: float = option(0.15, "Share of a completion's tokens kept as anchors.", gt=0, le=1)


@registries.credit_rules.register("anchor_tokens")
@declares(needs=("attention",), options=AnchorOptions)
def anchor_tokens(advantages: Tensor, signals: RolloutSignals, mask: Tensor, options: AnchorOptions) -> Credit:
    """Keep the tokens with the most attention on the image, averaged over heads and late layers; all without an image.

    AT-RL (https://huggingface.co/papers/2602.11455) finds that about 15 % of the tokens carry the connection to the
    image. It also clusters these tokens by their attention and weighs the clusters; this rule does not.

    Args:
        advantages: not read.
        signals: signals that include attention mass.
        mask: (N, T) bool, valid tokens.
        options: share of the tokens to keep.
    """
    mass = signals.measured("attention")
    attention = mass.vision[late_layers(len(mass.vision))].mean(0)  # (N, T)
    text_only = (mass.num_vision == 0).to(mask.device).unsqueeze(1)
    kept = top_fraction_mask(attention, mask, options.top_p_anchor_tokens) | (mask & text_only)
    return kept, {"attention": attention}


@dataclass
class PGPOOptions(Checked):
    """Numbers of PGPO."""

    pgpo_threshold: float = option(0.4, "Importance above which tokens are amplified; PGPO's tau.", gt=0, lt=1)
    pgpo_boost: float = option(2.0, "Amplification of the most important token; PGPO's beta.", ge=0)


@registries.credit_rules.register("pgpo")
@declares(needs=("dependency",), options=PGPOOptions)
def pgpo(advantages: Tensor, signals: RolloutSignals, mask: Tensor, options: PGPOOptions) -> Credit:
    """Weigh tokens by I / tau below the threshold and 1 + beta (I - tau) / (1 - tau) above; a completion's mean is 1.

    I, a token's importance, is ln(1 + dependency) scaled to [0, 1] within its completion. Weights are 1 where no
    dependency is defined, and where all tokens are alike. Source: https://huggingface.co/papers/2604.01840, equations 6
    and 7.

    Args:
        signals: signals with `dependency` (N, T), for PGPO under the perturbation `remove_image`.
    """
    dependency = signals.measured("dependency")
    defined = mask & ~dependency.isnan()
    importance = min_max(dependency.float().log1p(), defined)  # (N, T)
    threshold = options.pgpo_threshold
    above = 1 + options.pgpo_boost * (importance - threshold) / (1 - threshold)
    weights = torch.where(importance < threshold, importance / threshold, above).masked_fill(~defined, 0)
    weights = weights.masked_fill(weights.sum(1, keepdim=True) == 0, 1)
    return normalise_to_mean_one(weights, defined), {"importance": importance.masked_fill(~defined, torch.nan)}


@dataclass
class PRPOOptions(Checked):
    """Numbers of the rule `prpo`."""

    prpo_boost: float = option(1.0, "Added weight of a token of robust dependency 1.", ge=0)


@registries.credit_rules.register("prpo")
@declares(needs=("dependency", "logps", f"{LOGPS_PREFIX}add_gaussian_noise"), options=PRPOOptions)
def prpo(advantages: Tensor, signals: RolloutSignals, mask: Tensor, options: PRPOOptions) -> Credit:
    """Return weights 1 + boost · r for tokens that depend on the image and are stable when it gets a little noise.

    r = importance · exp(-|log π_noisy - log π|), with PGPO's importance, ln(1 + dependency) scaled to [0, 1] within its
    completion; 0 where no dependency is defined. This follows the abstract of https://huggingface.co/papers/2606.08708,
    but not the paper's formulas.

    Args:
        signals: signals with `dependency` and log-probabilities given the image and a noisy image, (N, T).
    """
    dependency = signals.measured("dependency")
    defined = mask & ~dependency.isnan()
    importance = min_max(dependency.float().log1p(), defined)  # (N, T)
    stability = (signals.views["add_gaussian_noise"] - signals.logps).abs().neg().exp()
    robust = (importance * stability).masked_fill(~defined, 0)
    return 1 + options.prpo_boost * robust, {"robust_dependency": robust.masked_fill(~defined, torch.nan)}


@dataclass
class ToROptions(Checked):
    """Numbers of ToR."""

    tor_reasoning_share: float = option(0.3, "Share of a completion's tokens with the largest entropy.", ge=0, le=1)
    tor_perception_share: float = option(0.3, "Share with the largest change without the image.", ge=0, le=1)
    tor_perception_weight: float = option(0.5, "Weight of the tokens of the second share alone.", ge=0)


@registries.credit_rules.register("tor")
@declares(needs=("entropies", "logps", f"{LOGPS_PREFIX}remove_image"), options=ToROptions)
def tor(advantages: Tensor, signals: RolloutSignals, mask: Tensor, options: ToROptions) -> Credit:
    """Weigh reasoning tokens by 1, further perception tokens by `tor_perception_weight`, and others by 0.

    Reasoning tokens have the largest entropy; the log-probability of perception tokens changes most without the image.
    All tokens of a completion without an image weigh 1. Source: https://huggingface.co/papers/2603.25077.

    Args:
        signals: signals with `entropies` and log-probabilities given the image and without it, (N, T).
    """
    change = (signals.views["remove_image"] - signals.logps).abs()
    seen = mask & ~change.isnan()
    reasoning = top_fraction_mask(signals.entropies, seen, options.tor_reasoning_share)
    perception = top_fraction_mask(change, seen, options.tor_perception_share) & ~reasoning
    weights = reasoning + options.tor_perception_weight * perception + (~seen.any(1, keepdim=True) & mask)
    where = {"reasoning_fraction": reasoning, "perception_fraction": perception}
    return weights, {name: (tokens, seen) for name, tokens in where.items()}


@dataclass
class VEPOOptions(Checked):
    """Numbers of VEPO."""

    top_p_vepo_tokens: float = option(0.2, "Share of a completion's tokens that VEPO keeps.", gt=0, le=1)
    vepo_alpha: float = option(0.7, "Weight of the divergence relative to the change of entropy.", ge=0, le=1)


@registries.credit_rules.register("vepo")
@declares(needs=("entropies", "shift"), options=VEPOOptions)
def vepo(
    advantages: Tensor, signals: RolloutSignals, mask: Tensor, options: VEPOOptions, *, gather: Gather | None = None
) -> Credit:
    """Keep the tokens with the largest scores, weighed by the ratio of all tokens to kept tokens; others get 0.

    With j, g, h the Jensen-Shannon divergence, the change of entropy |H' - H| and the entropy H, each scaled to [0, 1]
    within its completion, a token's score is (1 - (1 - j)^alpha (1 - g)^(1 - alpha)) · h. The weight turns a mean over
    all tokens into a mean over kept tokens. All tokens of a completion without an image are kept. Source:
    https://huggingface.co/papers/2606.03937 and its code.

    Args:
        signals: signals with `entropies`, `jsd` and `perturbed_entropies`, (N, T).
    """
    jsd, perturbed = signals.measured("jsd"), signals.measured("perturbed_entropies")
    seen = mask & ~jsd.isnan()
    changes = jsd, (perturbed - signals.entropies).abs(), signals.entropies
    divergence, changed, entropy = (min_max(values.float(), seen) for values in changes)
    scores = (1 - (1 - divergence) ** options.vepo_alpha * (1 - changed) ** (1 - options.vepo_alpha)) * entropy
    kept = top_fraction_mask(scores, seen, options.top_p_vepo_tokens) | (mask & ~seen.any(1, keepdim=True))
    counts = torch.stack([mask.sum(), kept.sum()]).float()
    tokens, selected = (counts if gather is None else gather(counts)).view(-1, 2).sum(0)
    return kept * (tokens / selected.clamp(min=1)), {
        "token_fraction": kept.float().masked_fill(~mask, torch.nan),
        "score": scores.masked_fill(~seen, torch.nan),
    }


@dataclass
class TeacherOptions(Checked):
    """Numbers of the rules that compare with a teacher."""

    rlsd_clip: float = option(0.2, "Largest distance of a weight from 1; RLSD's epsilon.", ge=0, lt=1)
    rlsd_lambda: float = option(1.0, "Share of the weight, the rest is 1; RLSD's lambda.", ge=0, le=1)
    distil_coef: float = option(1.0, "Coefficient of the gap to the teacher that distil adds.", ge=0)
    distil_clip: float = option(3.0, "Largest gap that distil adds, in nats.", gt=0)


@registries.credit_rules.register("rlsd")
@declares(needs=("logps", LOGPS_PREFIX + TEACHER), options=TeacherOptions)
def rlsd(advantages: Tensor, signals: RolloutSignals, mask: Tensor, options: TeacherOptions) -> Credit:
    """Weigh each token by exp(sign(A) · gap) within 1 ± `rlsd_clip`; 1 where the row has no view.

    With `rlsd_lambda` below 1, weights are mixed with 1. A token that the teacher finds likelier gets more of a reward,
    and less of a penalty. Source: https://huggingface.co/papers/2604.03128.

    Args:
        advantages: (N,) or (N, T); only their signs are read.
        signals: signals with the log-probabilities of policy and teacher, (N, T).
    """
    gap, clip = teacher_gap(signals, options), options.rlsd_clip
    weights = (per_token(advantages).sign() * gap).exp().clamp(1 - clip, 1 + clip)
    return 1 + options.rlsd_lambda * (weights.masked_fill(gap.isnan(), 1) - 1), {"gap": gap}


@registries.credit_rules.register("distil")
@declares(needs=("logps", LOGPS_PREFIX + TEACHER), options=TeacherOptions)
def distil(advantages: Tensor, signals: RolloutSignals, mask: Tensor, options: TeacherOptions) -> Credit:
    """Add `distil_coef` · gap, the gap within ± `distil_clip`, to the advantage of each token; 0 without the view.

    Without other advantages and with coefficient 1, it is the sampled gradient of the reverse KL to the teacher.

    Args:
        advantages: not read.
        signals: signals with the log-probabilities of policy and teacher, (N, T).
    """
    gap = teacher_gap(signals, options)
    added = options.distil_coef * gap.clamp(-options.distil_clip, options.distil_clip).nan_to_num(nan=0.0)
    return Added(added), {"gap": gap}


TOKEN_CLAMP = (0.1, 2.0)
COMPLETION_CLAMP = (0.9, 2.0)


@dataclass
class VGPOOptions(Checked):
    """Numbers of VGPO."""

    vgpo_compensation: float = option(0.3, "Increase of the score at a completion's last token; VGPO's beta.", ge=0)
    vgpo_gate_share: float = option(0.2, "Share of the late tokens whose score is raised; VGPO's kappa.", gt=0, le=1)
    vgpo_gate_start: float = option(0.5, "Share of a completion after which tokens are late.", ge=0, lt=1)


@registries.credit_rules.register("vgpo")
@declares(needs=("similarity",), options=VGPOOptions)
def vgpo(
    advantages: Tensor,
    signals: RolloutSignals,
    mask: Tensor,
    options: VGPOOptions,
    *,
    groups: Tensor | None = None,
    gather: Gather | None = None,
) -> Credit:
    """Weigh each token within its completion, and each completion among the completions of its prompt.

    A completion's n tokens have scores r = (similarity + 1) / 2. Of the late tokens, from token ⌊n · vgpo_gate_start⌋
    on, the share `vgpo_gate_share` with the largest scores is raised by 1 + beta · t / (n - 1). With w the scores
    scaled to [0, 1] within the completion, a token's weight is 1 + w - mean w, in `TOKEN_CLAMP`. With u the sums of w
    scaled to [0, 1] within the prompt's completions, a completion's weight is 1 + u - mean u, in `COMPLETION_CLAMP`.
    Source: https://huggingface.co/papers/2604.09349 and its code.

    Args:
        signals: signals with `similarity`, (N, T); weights are 1 where a completion has none.
        groups: (N,) number of each completion's prompt over all processes; None: all belong to one prompt.
    """
    similarity = signals.measured("similarity")
    seen = mask & ~similarity.isnan()
    scores = (similarity.float() + 1) / 2
    place, length = seen.cumsum(1) - 1, seen.sum(1, keepdim=True)  # (N, T), (N, 1): over tokens with a similarity
    late = seen & (place >= (length * options.vgpo_gate_start).floor())
    count = (late.sum(1, keepdim=True) * options.vgpo_gate_share).floor().clamp(min=1).long()  # (N, 1)
    smallest = scores.masked_fill(~late, -torch.inf).sort(1, descending=True).values.gather(1, count - 1)
    gate = late & (scores >= smallest)  # ties included
    raised = scores * (1 + gate * options.vgpo_compensation * place / (length - 1).clamp(min=1))
    scaled = min_max(raised, seen)  # (N, T)
    tokens = (1 + scaled - masked_mean(scaled, seen)).clamp(*TOKEN_CLAMP).masked_fill(~seen, 1)
    sums = scaled.sum(1).masked_fill(~seen.any(1) & mask.any(1), torch.nan)  # (N,)
    completions = _prompt_weights(sums, torch.zeros_like(sums) if groups is None else groups, gather)
    return tokens * completions.unsqueeze(1), {"completion_weight": completions}


def _prompt_weights(sums: Tensor, groups: Tensor, gather: Gather | None) -> Tensor:
    """Weigh each completion by where its sum lies among its prompt's completions, (N,); 1 where the sum is NaN."""
    groups = groups.to(sums.device)
    every, prompts = (sums, groups) if gather is None else (gather(sums), gather(groups))
    beside = (groups.unsqueeze(1) == prompts) & ~every.isnan()  # (N, all)
    low = every.expand(beside.shape).masked_fill(~beside, torch.inf).amin(1)
    high = every.expand(beside.shape).masked_fill(~beside, -torch.inf).amax(1)
    mean = masked_mean(every.nan_to_num(), beside).squeeze(1)
    weights = 1 + (sums - mean) / (high - low + _SMALLEST_RANGE)
    return weights.clamp(*COMPLETION_CLAMP).masked_fill(sums.isnan(), 1)
