"""The rules of this library, each `rule(advantages, signals, mask, options) -> (weights, metrics)`, and which are on.

A rule returns weights (N, T), which advantages are multiplied by, or bool: tokens that it keeps. If it compares
completions, it may take `shaped`, `groups` and `gather` by name, if it reads their tokens `completion_ids`, as
`shape_advantages` has them. Those of published methods are in `published/`.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vgr_trl import registries
from vgr_trl.batch.signals import AttentionMass, RolloutSignals
from vgr_trl.config.stages.credit import CreditOptions
from vgr_trl.credit import published as published  # which registers itself
from vgr_trl.credit.filters import top_fraction_mask
from vgr_trl.credit.masked import check_shapes
from vgr_trl.credit.token_weights import dependency_weights, token_weights
from vgr_trl.credit.totals import Totals, add_filter, add_weights
from vgr_trl.credit.trajectory import Gather, largest_scale, mean_dependency, scale_means, trajectory_statistics
from vgr_trl.registries import declares, needs_of, short_name
from vgr_trl.signals.ratios import last_layers, token_vision_gain_ratio

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
