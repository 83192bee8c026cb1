"""Which tokens get the credit: from one advantage per completion to one per token, and the loss terms beside them."""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from numbers import Real
from typing import Annotated, Any

import torch

from vgr_trl import registries
from vgr_trl.batch import AttentionMass, RolloutSignals, read_only
from vgr_trl.config import CreditOptions
from vgr_trl.metrics import (
    SMALLEST_RANGE,
    Gather,
    Totals,
    add_filter,
    add_weights,
    check_shapes,
    largest_scale,
    masked_mean,
    mean_dependency,
    min_max,
    scale_means,
    trajectory_scale,
    trajectory_statistics,
    with_mean_one,
)
from vgr_trl.options import Fraction as ranges_Fraction
from vgr_trl.options import Share, check_choice, check_fraction, check_number, check_values, in_range, option
from vgr_trl.registries import declares, is_measurement, needs_of, short_name
from vgr_trl.signals.ratios import last_layers, late_layers, token_vision_gain_ratio
from vgr_trl.utils import ConfigError, DataError

__all__ = [
    "CreditOptions",
    "attention_weights",
    "dependency_weights",
    "shape_advantages",
    "token_weights",
    "top_fraction_mask",
    "trajectory_scale",
]


# ---------------------------------------------------------------------------------------------------------------------
# Which tokens of a completion get credit at all.


def top_fraction_mask(scores: torch.Tensor, mask: torch.Tensor, fraction: float) -> torch.Tensor:
    """Return the mask of the ⌈fraction · length⌉ valid tokens with the largest scores of each completion.

    Among equal scores the earlier token is taken. An undefined score (NaN) comes after all others. `fraction` is read
    as the decimal number that it is printed as: 0.07 of 100 tokens are 7.

    Args:
        scores: (N, T).
        mask: (N, T) bool, valid tokens; they may lie anywhere.
        fraction: in [0, 1].

    Returns:
        (N, T) bool, never true outside `mask`.

    Raises:
        ConfigError: `fraction` is out of range.
        DataError: the shapes differ.
    """
    check_shapes("top_fraction_mask", mask, scores=scores)
    check_number("fraction", fraction, 0, 1, "in [0, 1]")
    mask = mask.bool()
    order = scores.float().nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    order = order.argsort(dim=1, descending=True, stable=True)  # (N, T), token indices, best first
    valid = mask.gather(1, order)
    kept = valid & (valid.cumsum(1) <= _kept_counts(mask, fraction).unsqueeze(1))
    return torch.zeros_like(mask).scatter(1, order, kept)


def _kept_counts(mask: torch.Tensor, fraction: float) -> torch.Tensor:
    """⌈fraction · length⌉ per row, (N,) int64, in whole numbers: floating point would make 8 of 0.07 · 100."""
    lengths = mask.sum(1)
    exact = Fraction(repr(float(fraction))).limit_denominator(10**9)
    counts = (lengths * exact.numerator + exact.denominator - 1) // exact.denominator
    return counts.clamp(min=1).minimum(lengths) if fraction > 0 else torch.zeros_like(lengths)


# ---------------------------------------------------------------------------------------------------------------------
# Credit for the tokens that look at the image most: the part of AT-RL that what is public of it is enough for.


@dataclass
class AnchorOptions:
    """Which tokens are anchors."""

    top_p_anchor_tokens: ranges_Fraction = option(
        0.15, "Share of a completion's tokens that are kept as anchors, in (0, 1]."
    )

    def __post_init__(self) -> None:
        check_values(self)


@registries.credit_rules.register("anchor_tokens")
@declares(needs=("attention",), options=AnchorOptions)
def anchor_tokens(
    advantages: torch.Tensor, signals: RolloutSignals, mask: torch.Tensor, options: AnchorOptions
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Keep the tokens of most attention on the image, the mean over heads and late layers; all without an image.

    AT-RL (https://huggingface.co/papers/2602.11455) finds that some 15 % of the tokens carry the connection to the
    image. It also clusters them by their attention and weighs the clusters, which is not done here.
    """
    mass = signals.attention
    assert mass is not None
    looked = mass.vision[late_layers(len(mass.vision))].mean(0)  # (N, T)
    check_shapes("anchor_tokens", mask, attention=looked)
    blind = (mass.num_vision == 0).to(mask.device).unsqueeze(1)
    return top_fraction_mask(looked, mask, options.top_p_anchor_tokens) | (mask & blind), {"attention": looked}


# ---------------------------------------------------------------------------------------------------------------------
# PGPO: advantages weighed by how much tokens depend on the image, above and below a threshold.


@dataclass
class PGPOOptions:
    """Numbers of PGPO."""

    pgpo_threshold: Annotated[float, in_range(1e-6, 1 - 1e-6, "in (0, 1)")] = option(
        0.4, "Importance above which tokens are amplified, in (0, 1); PGPO's tau."
    )
    pgpo_boost: Annotated[float, in_range(0, 1e6, "of at least 0")] = option(
        2.0, "How far the most important token is amplified; PGPO's beta."
    )

    def __post_init__(self) -> None:
        check_values(self)


@registries.credit_rules.register("pgpo")
@declares(needs=("dependency",), options=PGPOOptions)
def pgpo(
    advantages: torch.Tensor, signals: RolloutSignals, mask: torch.Tensor, options: PGPOOptions
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return weights with mean 1 in each completion: I / tau below the threshold, 1 + beta (I - tau) / (1 - tau) above.

    I, a token's importance, is ln(1 + dependency) scaled to [0, 1] within its completion. Weights are 1 where no
    dependency is defined, and where all tokens are alike. Source: https://huggingface.co/papers/2604.01840, equations 6
    and 7.

    Args:
        signals: with `dependency` (N, T), for PGPO under the perturbation `remove_image`.
    """
    assert signals.dependency is not None
    check_shapes("pgpo", mask, dependency=signals.dependency)
    defined = mask & ~signals.dependency.isnan()
    importance = min_max(signals.dependency.float().log1p(), defined)  # (N, T)
    threshold = options.pgpo_threshold
    above = 1 + options.pgpo_boost * (importance - threshold) / (1 - threshold)
    weights = torch.where(importance < threshold, importance / threshold, above).masked_fill(~defined, 0)
    weights = weights.masked_fill(weights.sum(1, keepdim=True) == 0, 1)
    return with_mean_one(weights, defined), {"importance": importance.masked_fill(~defined, torch.nan)}


# ---------------------------------------------------------------------------------------------------------------------
# VEPO: credit for tokens whose distribution changes with the image and that are uncertain.


@dataclass
class VEPOOptions:
    """Numbers of VEPO."""

    top_p_vepo_tokens: ranges_Fraction = option(0.2, "Share of a completion's tokens that VEPO keeps, in (0, 1].")
    vepo_alpha: Share = option(0.7, "How much the divergence counts against the change of entropy, in [0, 1].")

    def __post_init__(self) -> None:
        check_values(self)


@registries.credit_rules.register("vepo")
@declares(needs=("entropies", "shift"), options=VEPOOptions)
def vepo(
    advantages: torch.Tensor,
    signals: RolloutSignals,
    mask: torch.Tensor,
    options: VEPOOptions,
    *,
    gather: Gather | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return weights: 0, or for the tokens of largest score the number of tokens over the number of those.

    With j, g, h the Jensen-Shannon divergence, the change of entropy |H' - H| and the entropy H, each scaled to [0, 1]
    within its completion, a token's score is (1 - (1 - j)^alpha (1 - g)^(1 - alpha)) · h. A loss that is divided by all
    tokens is so divided by those that are kept. All tokens of a completion without an image are kept. Source:
    https://huggingface.co/papers/2606.03937 and its code.

    Args:
        signals: with `entropies`, `jsd` and `perturbed_entropies` (N, T).
    """
    assert signals.jsd is not None
    assert signals.perturbed_entropies is not None
    check_shapes("vepo", mask, entropies=signals.entropies, jsd=signals.jsd)
    seen = mask & ~signals.jsd.isnan()
    change = (signals.perturbed_entropies - signals.entropies).abs()
    far, changed, unsure = (min_max(each.float(), seen) for each in (signals.jsd, change, signals.entropies))
    scores = (1 - (1 - far) ** options.vepo_alpha * (1 - changed) ** (1 - options.vepo_alpha)) * unsure
    kept = top_fraction_mask(scores, seen, options.top_p_vepo_tokens) | (mask & ~seen.any(1, keepdim=True))
    counts = torch.stack([mask.sum(), kept.sum()]).float()
    tokens, selected = (counts if gather is None else gather(counts)).view(-1, 2).sum(0)
    share = kept.float().masked_fill(~mask, torch.nan)
    return kept * (tokens / selected.clamp(min=1)), {
        "token_fraction": share,
        "score": scores.masked_fill(~seen, torch.nan),
    }


# ---------------------------------------------------------------------------------------------------------------------
# VGPO: advantages weighed by how much tokens, and completions of a prompt, resemble the image.


TOKEN_CLAMP = (0.1, 2.0)
COMPLETION_CLAMP = (0.9, 2.0)


@dataclass
class VGPOOptions:
    """Numbers of VGPO."""

    vgpo_compensation: Annotated[float, in_range(0, 1e6, "of at least 0")] = option(
        0.3, "By how much the score of a completion's last token is raised; VGPO's beta."
    )
    vgpo_gate_share: ranges_Fraction = option(
        0.2, "Share of the late tokens whose score is raised, in (0, 1]; VGPO's kappa."
    )
    vgpo_gate_start: Annotated[float, in_range(0, 1 - 1e-9, "in [0, 1)")] = option(
        0.5, "Share of a completion behind which tokens are late, in [0, 1)."
    )

    def __post_init__(self) -> None:
        check_values(self)


@registries.credit_rules.register("vgpo")
@declares(needs=("similarity",), options=VGPOOptions)
def vgpo(
    advantages: torch.Tensor,
    signals: RolloutSignals,
    mask: torch.Tensor,
    options: VGPOOptions,
    *,
    groups: torch.Tensor | None = None,
    gather: Gather | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the weight of each token in its completion, times that of its completion among those of the prompt.

    With scores r = (similarity + 1) / 2 of a completion's n tokens, those among the late ones (from token
    ⌊n · vgpo_gate_start⌋) that are in the largest `vgpo_gate_share` are raised by 1 + beta · t / (n - 1). Scaled to
    [0, 1] within the completion they are w, and a token's weight is 1 + w - mean w, in `TOKEN_CLAMP`. Sums of w,
    scaled to [0, 1] within the prompt's completions, are u; a completion's weight is 1 + u - mean u, in
    `COMPLETION_CLAMP`. Source: https://huggingface.co/papers/2604.09349 and its code.

    Args:
        signals: with `similarity` (N, T); weights are 1 where a completion has none.
        groups: (N,) which prompt each completion belongs to, over all processes; None: all belong to one.
    """
    assert signals.similarity is not None
    check_shapes("vgpo", mask, similarity=signals.similarity)
    seen = mask & ~signals.similarity.isnan()
    raised = _compensated((signals.similarity.float() + 1) / 2, seen, options)
    scaled = min_max(raised, seen)  # (N, T)
    tokens = (1 + scaled - masked_mean(scaled, seen)).clamp(*TOKEN_CLAMP).masked_fill(~seen, 1)
    blind = ~seen.any(1) & mask.any(1)
    sums = scaled.sum(1).masked_fill(blind, torch.nan)  # (N,)
    completions = _among_prompts(sums, torch.zeros_like(sums) if groups is None else groups, gather)
    return tokens * completions.unsqueeze(1), {"completion_weight": completions}


def _compensated(scores: torch.Tensor, seen: torch.Tensor, options: VGPOOptions) -> torch.Tensor:
    """Return scores (N, T) of which the largest among the late ones are raised, more the later they are."""
    place = seen.cumsum(1) - 1  # (N, T), of each token among those that count
    length = seen.sum(1, keepdim=True)  # (N, 1)
    late = seen & (place >= (length * options.vgpo_gate_start).floor())
    count = (late.sum(1, keepdim=True) * options.vgpo_gate_share).floor().clamp(min=1).long()  # (N, 1)
    ordered = scores.masked_fill(~late, -torch.inf).sort(1, descending=True).values
    smallest = ordered.gather(1, count - 1)  # of those that are raised, ties included
    gate = late & (scores >= smallest)
    return scores * (1 + gate * options.vgpo_compensation * place / (length - 1).clamp(min=1))


def _among_prompts(sums: torch.Tensor, groups: torch.Tensor, gather: Gather | None) -> torch.Tensor:
    """Return each completion's weight (N,) by its sum among those of its prompt, 1 where it has none."""
    groups = groups.to(sums.device)
    every, prompts = (sums, groups) if gather is None else (gather(sums), gather(groups))
    beside = (groups.unsqueeze(1) == prompts) & ~every.isnan()  # (N, all)
    low = every.expand(beside.shape).masked_fill(~beside, torch.inf).amin(1)
    high = every.expand(beside.shape).masked_fill(~beside, -torch.inf).amax(1)
    mean = masked_mean(every.nan_to_num(), beside).squeeze(1)
    weights = 1 + (sums - mean) / (high - low + SMALLEST_RANGE)
    return weights.clamp(*COMPLETION_CLAMP).masked_fill(sums.isnan(), 1)


# ---------------------------------------------------------------------------------------------------------------------
# How much of a completion's advantage each of its tokens gets.


_LARGEST_LOG = 60.0  # e^60 times any number of tokens is finite in float32


def token_weights(
    token_vgr: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip: tuple[float, float] | None = (0.2, 3.0),
    smooth_sigma: float = 0.0,
    topk_ratio: float | None = None,
) -> torch.Tensor:
    """Return a weight for every token: the more it looked at the image (small VGR), the larger; mean 1 per completion.

    With s_t = -ln VGR_t (infinite ones replaced by the completion's finite extreme on that side), the weights are
    exp(s_t - mean s), smoothed along the tokens, clipped, and divided by their mean over the completion's valid tokens.

    Args:
        token_vgr: (N, T), VGR of single tokens, at least 0.
        mask: (N, T) bool, valid tokens.
        clip: smallest and largest weight before the division; None: no limits.
        smooth_sigma: standard deviation, in tokens, of a Gaussian cut off at ⌈3 · smooth_sigma⌉ tokens, which is
            renormalised over the valid tokens within reach; 0: none.
        topk_ratio: tokens outside the ⌈topk_ratio · length⌉ largest weights get weight 1 before the division; in
            (0, 1], None: all keep theirs.

    Returns:
        (N, T) float32. Weight 1 where VGR is undefined (NaN), for all tokens of a completion in which no VGR is finite
        and above 0, and outside `mask`. Undefined tokens take no part in means and smoothing.

    Raises:
        ConfigError: an option is out of range.
        DataError: the shapes differ.
    """
    check_shapes("token_weights", mask, token_vgr=token_vgr)
    _check_clip(clip)
    check_number("smooth_sigma", smooth_sigma, 0, 1e6, "of at least 0")
    if topk_ratio is not None:
        check_fraction("topk_ratio", topk_ratio)
    scores = -token_vgr.float().log()  # (N, T)
    defined = mask.bool() & ~scores.isnan()
    finite = defined & scores.isfinite()
    has_finite = finite.any(dim=1, keepdim=True)  # (N, 1)
    if not scores.numel():
        return torch.ones_like(scores)
    lowest = scores.masked_fill(~finite, torch.inf).amin(dim=1, keepdim=True)
    highest = scores.masked_fill(~finite, -torch.inf).amax(dim=1, keepdim=True)
    defined = defined & has_finite
    scores = scores.clamp(lowest, highest).masked_fill(~defined, 0)
    raw = (scores - masked_mean(scores, defined)).clamp(-_LARGEST_LOG, _LARGEST_LOG).exp()
    if smooth_sigma > 0:
        raw = _smooth(raw, defined, smooth_sigma)
    raw = raw if clip is None else raw.clamp(*clip)
    if topk_ratio is not None:
        kept = top_fraction_mask(raw.masked_fill(~defined, torch.nan), mask, topk_ratio)
        raw = raw.masked_fill(~kept, 1)
    return with_mean_one(raw, defined)


def dependency_weights(
    dependency: torch.Tensor, mask: torch.Tensor, *, clip: tuple[float, float] | None = (0.2, 3.0)
) -> torch.Tensor:
    """Return a weight for every token from its visual dependency: a soft form of the perception filter.

    w_t = clip(s_t / mean s) / mean clip(s / mean s), with the visual dependency s and means over the completion's
    valid tokens. Every token keeps some credit, no single one takes all of it, and the mean weight is 1.

    Args:
        dependency: (N, T), visual dependency, at least 0.
        mask: (N, T) bool, valid tokens.
        clip: smallest and largest weight before the division; None: no limits.

    Returns:
        (N, T) float32. Weight 1 where the dependency is undefined (NaN), for all tokens of a completion in which no
        token depends on the image, and outside `mask`.

    Raises:
        ConfigError: `clip` is out of range.
        DataError: the shapes differ.
    """
    check_shapes("dependency_weights", mask, dependency=dependency)
    _check_clip(clip)
    defined = mask.bool() & ~dependency.isnan()
    scores = dependency.float().masked_fill(~defined, 0)
    mean = masked_mean(scores, defined)  # (N, 1)
    defined = defined & (mean > 0)
    raw = scores / mean.masked_fill(mean <= 0, 1)
    return with_mean_one(raw if clip is None else raw.clamp(*clip), defined)


def _smooth(values: torch.Tensor, defined: torch.Tensor, sigma: float) -> torch.Tensor:
    """Gaussian average of (N, T) values along T, over the defined tokens within reach."""
    reach = min(math.ceil(3 * sigma), values.size(1) - 1)
    offsets = torch.arange(-reach, reach + 1, device=values.device, dtype=values.dtype)
    kernel = torch.exp(-0.5 * (offsets / sigma) ** 2).view(1, 1, -1)
    both = torch.stack([values * defined, defined.to(values.dtype)], dim=1).flatten(0, 1).unsqueeze(1)  # (2N, 1, T)
    sums, totals = torch.nn.functional.conv1d(both, kernel, padding=reach).view(len(values), 2, -1).unbind(dim=1)
    return torch.where(defined, sums / totals.masked_fill(~defined, 1), values)


def _check_clip(clip: tuple[float, float] | None) -> None:
    if clip is None:
        return
    numbers = isinstance(clip, (tuple, list)) and len(clip) == 2 and all(isinstance(limit, Real) for limit in clip)
    if not numbers or not 0 <= clip[0] <= clip[1] or clip[1] == 0:
        raise ConfigError(f"clip is {clip!r}: give None or two numbers with 0 <= low <= high and high above 0.")


# ---------------------------------------------------------------------------------------------------------------------
# The rules of this library, each `rule(advantages, signals, mask, options) -> (weights, metrics)`, and which are on.
#
# A rule returns weights (N, T), which advantages are multiplied by, or bool: tokens that it keeps. If it compares
# completions, it may take `shaped`, `groups` and `gather` by name, if it reads their tokens `completion_ids`, as
# `shape_advantages` has them. Those of published methods are in `published/`.


Metric = float | torch.Tensor | tuple[torch.Tensor, torch.Tensor]
Credit = tuple[torch.Tensor, Totals | Mapping[str, Metric]]


@dataclass(frozen=True)
class Rule:
    """A rule that is on.

    Attributes:
        name: under which its metrics are logged, if it is a plug-in.
        function: the rule.
        switch: the option that it is on by, for messages.
        options: what it takes as such.
        is_plugin: whether it comes from outside.
    """

    name: str
    function: Callable[..., Credit]
    switch: str
    options: Any
    is_plugin: bool = False

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the signals that it reads."""
        return needs_of(self.function)

    def takes(self, **given: Any) -> dict[str, Any]:
        """Return those of the named arguments that it takes."""
        parameters = inspect.signature(self.function).parameters
        return {name: value for name, value in given.items() if name in parameters}


def active_rules(options: CreditOptions) -> list[Rule]:
    """Return the rules that are on, in the order in which their weights are multiplied.

    Raises:
        ConfigError: a rule of `credit_rules` is not found.
    """
    named = options.credit_rules or ()
    perceives = options.enable_perception_filtering
    soft = options.perception_weighting == "soft"
    switches: tuple[tuple[str, bool, str, Callable[..., Credit]], ...] = (
        ("token_weights", options.token_weights, "token_weights", weigh_by_attention),
        ("perception_weights", perceives and soft, "enable_perception_filtering", weigh_by_dependency),
        ("perception_filter", perceives and not soft, "enable_perception_filtering", keep_dependent),
        ("entropy_filter", options.enable_entropy_filtering, "enable_entropy_filtering", keep_uncertain),
        ("trajectory_scale", options.enable_trajectory_reweighting, "enable_trajectory_reweighting", scale_completions),
    )
    *own, last = [
        [Rule(name, function, switch, options)] if on or name in named else []
        for name, on, switch, function in switches
    ]
    return [*(rule for found in own for rule in found), *_plugins(options), *last]


def per_token(advantages: torch.Tensor) -> torch.Tensor:
    """Return advantages (N,) as (N, 1); those of a critic are (N, T) already."""
    return advantages.unsqueeze(1) if advantages.ndim == 1 else advantages


def _plugins(options: CreditOptions) -> Iterator[Rule]:
    for spec in options.plugin_rules:
        function = registries.credit_rules.load(spec)
        values = options.plugin_values(function, spec)
        yield Rule(short_name(spec), function, f"the credit rule {spec}", values, is_plugin=True)


@registries.credit_rules.register("token_weights")
@declares(needs=("attention",))
def weigh_by_attention(
    advantages: torch.Tensor, signals: RolloutSignals, mask: torch.Tensor, options: CreditOptions
) -> Credit:
    """Return `token_weights` of the VGR per token."""
    assert signals.attention is not None
    weights = attention_weights(signals.attention, mask, options)
    if options.token_weights_positive_only:
        weights = weights.masked_fill(per_token(advantages) < 0, 1)
    totals = Totals()
    add_weights(totals, "token_weight", weights, mask)
    return weights, totals


@registries.credit_rules.register("perception_weights")
@declares(needs=("dependency",))
def weigh_by_dependency(
    advantages: torch.Tensor, signals: RolloutSignals, mask: torch.Tensor, options: CreditOptions
) -> Credit:
    """Return `dependency_weights`, clipped to `token_weights_clip`."""
    assert signals.dependency is not None
    weights = dependency_weights(signals.dependency, mask, clip=_pair(options.token_weights_clip))
    totals = Totals()
    add_weights(totals, "perception_weight", weights, mask)
    return weights, totals


@registries.credit_rules.register("perception_filter")
@declares(needs=("dependency",))
def keep_dependent(
    advantages: torch.Tensor, signals: RolloutSignals, mask: torch.Tensor, options: CreditOptions
) -> Credit:
    """Keep the tokens of largest visual dependency; all of a completion without any defined one."""
    dependency = signals.dependency
    assert dependency is not None
    check_shapes("shape_advantages", mask, dependency=dependency)
    defined = mask & ~dependency.isnan()
    kept = top_fraction_mask(dependency, mask, options.top_p_perception_tokens)
    kept = kept | (mask & ~defined.any(dim=1, keepdim=True))
    totals = Totals()
    add_filter(totals, "perception", "low_var_kl", dependency, kept, mask, defined)
    return kept, totals


@registries.credit_rules.register("entropy_filter")
@declares(needs=("entropies",))
def keep_uncertain(
    advantages: torch.Tensor, signals: RolloutSignals, mask: torch.Tensor, options: CreditOptions
) -> Credit:
    """Keep the tokens of largest entropy."""
    entropies = signals.entropies
    check_shapes("shape_advantages", mask, entropies=entropies)
    kept = top_fraction_mask(entropies, mask, options.top_p_entropy_tokens)
    totals = Totals()
    add_filter(totals, "entropy", "entropy", entropies, kept, mask, mask & ~entropies.isnan())
    return kept, totals


@registries.credit_rules.register("trajectory_scale")
@declares(needs=("dependency",))
def scale_completions(
    advantages: torch.Tensor,
    signals: RolloutSignals,
    mask: torch.Tensor,
    options: CreditOptions,
    *,
    shaped: torch.Tensor | None = None,
    gather: Gather | None = None,
) -> Credit:
    """Return `trajectory_scale` of each completion for all of its tokens."""
    assert signals.dependency is not None
    minimum, means = options.trajectory_scaling_min, mean_dependency(signals.dependency, mask)  # (N,)
    compared = means if shaped is None else means.masked_fill(~shaped.bool(), torch.nan)
    statistics = trajectory_statistics(compared, gather)
    scale = scale_means(means, minimum, statistics)
    totals = Totals()
    totals.add_mean("sensitivity_score_mean", means, ~compared.isnan())
    totals.add_mean("scaling_factor_mean", scale, ~compared.isnan())
    largest = largest_scale(minimum, statistics)
    totals.add_known("dynamic_scaling_max", 1.0 if largest is None else largest)
    return scale.unsqueeze(1).expand(mask.shape), totals


def attention_weights(attention: AttentionMass, mask: torch.Tensor, options: CreditOptions) -> torch.Tensor:
    """Return the token weights (N, T) that `shape_advantages` gives, whatever the advantages are."""
    scheme = getattr(options, "attention_segments", "thirds")
    layers = last_layers(
        len(attention.vision), options.token_weights_last_k_layers, scheme, "token_weights_last_k_layers"
    )
    vgr = token_vision_gain_ratio(attention, layers)  # (N, T)
    return token_weights(
        vgr,
        mask,
        clip=_pair(options.token_weights_clip),
        smooth_sigma=options.token_weights_smooth_sigma,
        topk_ratio=options.token_weights_topk_ratio,
    )


def _pair(values: Sequence[float]) -> tuple[float, float]:
    low, high = values
    return low, high


# ---------------------------------------------------------------------------------------------------------------------
# From one advantage per completion to one per token: the rules of credit that are on, composed.


@torch.no_grad()
def shape_advantages(
    advantages: torch.Tensor,
    signals: RolloutSignals,
    options: CreditOptions,
    *,
    shaped: torch.Tensor | None = None,
    groups: torch.Tensor | None = None,
    gather: Gather | None = None,
    completion_ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, float]]:
    """Return an advantage for every token, A[i] · scale_i · weight[i, t] · keep[i, t], and metrics over all processes.

    - scale: `trajectory_scale` of the visual dependency.
    - weight: `token_weights` of the VGR per token, and with `perception_weighting="soft"` also `dependency_weights`,
      both clipped to `token_weights_clip`; times the weights of every plug-in of `credit_rules`.
    - keep: the tokens of largest visual dependency, of largest entropy, those that a plug-in keeps, or of either;
      others and padding get 0. A completion without any defined dependency is not filtered by it.

    What is off is left out, so without any rule every token gets the advantage of its completion.

    Args:
        advantages: (N,), or (N, T) if tokens have their own.
        signals: of the same N completions.
        options: the rules that are on, and their numbers.
        shaped: (N,) bool, completions that take part in minimum, maximum and mean of the trajectory scale; None: all.
        groups: (N,) numbers of the prompts that the completions belong to, over all processes, for rules that compare
            those of a prompt; None: all belong to one.
        gather: returns the concatenation of a 1-D tensor over all processes, which have equally many rows; called
            equally often on each of them, whatever the signals are. None: there is one process.
        completion_ids: (N, T) tokens of the completions, for plug-ins that read them.

    Returns:
        (N, T) float32, and the metrics of the rules that are on. A metric of nothing is NaN: for instance, the mean
        dependency of rejected tokens if none is rejected.

    Raises:
        ConfigError: a rule needs a signal that was not measured, or an option is out of range.
        DataError: shapes differ, or a plug-in returns something else than weights.
    """
    mask = signals.mask.bool()  # (N, T)
    if advantages.ndim == 2:
        check_shapes("shape_advantages", mask, advantages=advantages)
    else:
        _check_rows("advantages", advantages, mask)
    if shaped is not None:
        _check_rows("shaped", shaped, mask)
    check_choice("perception_weighting", options.perception_weighting, ("filter", "soft"))
    totals = Totals()
    credit = per_token(advantages).float().expand(mask.shape).clone()  # (N, T)
    kept: list[torch.Tensor] = []
    for rule in active_rules(options):
        _refuse_unmeasured(rule, signals)
        context = rule.takes(shaped=shaped, groups=groups, gather=gather, completion_ids=completion_ids)
        with read_only(rule.switch, advantages, signals, mask, *context.values()):
            result = rule.function(advantages, signals, mask, rule.options, **context)
        weights, metrics = _checked(rule, result, mask) if rule.is_plugin else result
        if weights.dtype == torch.bool:
            kept.append(weights & mask)
        else:
            credit *= weights
        totals.add(metrics if isinstance(metrics, Totals) else _named(rule, metrics, mask))
    if kept:
        union = torch.stack(kept).any(dim=0)
        totals.add_mean("combined_token_fraction", union, mask)
        credit *= union
    return credit, totals.metrics(gather)


def _refuse_unmeasured(rule: Rule, signals: RolloutSignals) -> None:
    for need in rule.needs:
        found = signals.measured(need) if is_measurement(need) else signals.extra.get(short_name(need))
        if found is None:
            raise ConfigError(
                f"{rule.switch} is on, but the signals have no {need}: measure it, or switch {rule.switch} off."
            )


def _checked(rule: Rule, result: object, mask: torch.Tensor) -> tuple[torch.Tensor, Totals]:
    """What a plug-in returned: its weights, and metrics of how they are spread beside its own."""
    weights, metrics = result if isinstance(result, tuple) and len(result) == 2 else (None, None)
    if not isinstance(weights, torch.Tensor) or not isinstance(metrics, Mapping | Totals):
        raise DataError(
            f"{rule.switch} returned a {type(result).__name__}: return weights, a tensor (N, T), and a dict of metrics."
        )
    if weights.shape != mask.shape:
        raise DataError(f"{rule.switch} returned weights of shape {tuple(weights.shape)}: give {tuple(mask.shape)}.")
    totals = metrics if isinstance(metrics, Totals) else _named(rule, metrics, mask)
    if weights.dtype == torch.bool:
        totals.add_mean(f"credit/{rule.name}/token_fraction", weights & mask, mask)
        return weights, totals
    if not bool(weights[mask].isfinite().all()):
        raise DataError(f"{rule.switch} returned weights that are not finite for valid tokens: give numbers.")
    add_weights(totals, f"credit/{rule.name}/weight", weights, mask)
    return weights.masked_fill(~mask, 1), totals


def _named(rule: Rule, metrics: Mapping[str, Metric], mask: torch.Tensor) -> Totals:
    totals = Totals()
    for name, value in metrics.items():
        full = f"credit/{rule.name}/{name}"
        if isinstance(value, tuple):
            totals.add_mean(full, *value)
        elif isinstance(value, torch.Tensor) and value.shape in (mask.shape, mask.shape[:1]):
            totals.add_mean(full, value, (mask if value.ndim == 2 else mask.any(1)) & ~value.isnan())
        else:
            totals.add_known(full, _number(rule, name, value))
    return totals


def _number(rule: Rule, name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise DataError(f"{rule.switch} returned {value!r} as the metric {name}: give a number or a tensor.") from error


def _check_rows(name: str, values: torch.Tensor, mask: torch.Tensor) -> None:
    if mask.ndim != 2 or values.shape != mask.shape[:1]:
        raise DataError(
            f"shape_advantages got {name} of shape {tuple(values.shape)} and a mask of shape {tuple(mask.shape)}: give "
            "one value for each of the N completions of the mask (N, T)."
        )
