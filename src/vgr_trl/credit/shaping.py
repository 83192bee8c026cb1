"""From one advantage per completion to one per token: every rule of credit, composed."""

from collections.abc import Sequence
from typing import TypeVar

import torch

from vgr_trl.batch.signals import AttentionMass, RolloutSignals
from vgr_trl.config.credit import CreditOptions
from vgr_trl.config.ranges import check_choice
from vgr_trl.credit.filters import top_fraction_mask
from vgr_trl.credit.rows import check_shapes
from vgr_trl.credit.token_weights import dependency_weights, token_weights
from vgr_trl.credit.totals import Totals, add_filter, add_weights
from vgr_trl.credit.trajectory import Gather, largest_scale, mean_dependency, scale_means, trajectory_statistics
from vgr_trl.errors import ConfigError, DataError
from vgr_trl.signals.ratios import late_layers, token_vision_gain_ratio

Signal = TypeVar("Signal")


@torch.no_grad()
def shape_advantages(
    advantages: torch.Tensor,
    signals: RolloutSignals,
    options: CreditOptions,
    *,
    shaped: torch.Tensor | None = None,
    gather: Gather | None = None,
) -> tuple[torch.Tensor, dict[str, float]]:
    """Return an advantage for every token, A[i] · scale_i · weight[i, t] · keep[i, t], and metrics over all processes.

    - scale: `trajectory_scale` of the visual dependency.
    - weight: `token_weights` of the VGR per token, and with `perception_weighting="soft"` also `dependency_weights`,
      both clipped to `token_weights_clip`.
    - keep: the tokens of largest visual dependency, of largest entropy, or of either; others and padding get 0. A
      completion without any defined dependency is not filtered by it.

    What is off is left out, so without any rule every token gets the advantage of its completion.

    Args:
        advantages: (N,), or (N, T) if tokens have their own.
        signals: of the same N completions.
        options: the rules that are on, and their numbers.
        shaped: (N,) bool, completions that take part in minimum, maximum and mean of the trajectory scale; None: all.
        gather: returns the concatenation of a 1-D tensor over all processes, which have equally many rows; called
            equally often on each of them, whatever the signals are. None: there is one process.

    Returns:
        (N, T) float32, and the metrics of the rules that are on. A metric of nothing is NaN: for instance, the mean
        dependency of rejected tokens if none is rejected.

    Raises:
        ConfigError: a rule needs a signal that was not measured, or an option is out of range.
        DataError: shapes differ.
    """
    mask = signals.mask.bool()  # (N, T)
    if advantages.ndim == 2:
        check_shapes("shape_advantages", mask, advantages=advantages)
    else:
        _check_rows("advantages", advantages, mask)
        advantages = advantages.unsqueeze(1)
    if shaped is not None:
        _check_rows("shaped", shaped, mask)
    check_choice("perception_weighting", options.perception_weighting, ("filter", "soft"))
    totals = Totals()
    credit = advantages.float().expand(mask.shape).clone()  # (N, T)
    metrics: dict[str, float] = {}

    if options.token_weights:
        attention = _needed(signals.attention, "token_weights", "attention")
        weights = attention_weights(attention, mask, options)
        if options.token_weights_positive_only:
            weights = weights.masked_fill(advantages < 0, 1)
        add_weights(totals, "token_weight", weights, mask)
        credit *= weights
    if options.enable_perception_filtering and options.perception_weighting == "soft":
        dependency = _needed(signals.dependency, "enable_perception_filtering", "dependency")
        weights = dependency_weights(dependency, mask, clip=_pair(options.token_weights_clip))
        add_weights(totals, "perception_weight", weights, mask)
        credit *= weights
    keep = _kept_tokens(signals, mask, options, totals)
    if keep is not None:
        credit *= keep
    if options.enable_trajectory_reweighting:
        dependency = _needed(signals.dependency, "enable_trajectory_reweighting", "dependency")
        scale, metrics = _trajectory_scale(dependency, mask, options.trajectory_scaling_min, shaped, gather, totals)
        credit *= scale.unsqueeze(1)
    return credit, {**totals.metrics(gather), **metrics}


def attention_weights(attention: AttentionMass, mask: torch.Tensor, options: CreditOptions) -> torch.Tensor:
    """Return the token weights (N, T) that `shape_advantages` gives, whatever the advantages are.

    Args:
        attention: of N completions.
        mask: (N, T) bool, valid tokens.
        options: the rules that are on, and their numbers.
    """
    vgr = token_vision_gain_ratio(attention, _weighted_layers(len(attention.vision), options))  # (N, T)
    return token_weights(
        vgr,
        mask,
        clip=_pair(options.token_weights_clip),
        smooth_sigma=options.token_weights_smooth_sigma,
        topk_ratio=options.token_weights_topk_ratio,
    )


def _weighted_layers(num_layers: int, options: CreditOptions) -> list[int]:
    last = options.token_weights_last_k_layers
    if last is not None:
        if not 1 <= last <= num_layers:
            raise ConfigError(
                f"token_weights_last_k_layers is {last}, but attention was measured in {num_layers} layers: give a "
                f"number in [1, {num_layers}], or None for the late segment."
            )
        return list(range(num_layers - last, num_layers))
    return late_layers(num_layers, getattr(options, "attention_segments", "thirds"))


def _kept_tokens(
    signals: RolloutSignals, mask: torch.Tensor, options: CreditOptions, totals: Totals
) -> torch.Tensor | None:
    """(N, T) bool, the tokens that a filter keeps; None if there is no filter."""
    kept = []
    if options.enable_perception_filtering and options.perception_weighting == "filter":
        dependency = _needed(signals.dependency, "enable_perception_filtering", "dependency")
        check_shapes("shape_advantages", mask, dependency=dependency)
        defined = mask & ~dependency.isnan()
        by_dependency = top_fraction_mask(dependency, mask, options.top_p_perception_tokens)
        by_dependency = by_dependency | (mask & ~defined.any(dim=1, keepdim=True))
        add_filter(totals, "perception", "low_var_kl", dependency, by_dependency, mask, defined)
        kept.append(by_dependency)
    if options.enable_entropy_filtering:
        entropies = _needed(signals.entropies, "enable_entropy_filtering", "entropies")
        check_shapes("shape_advantages", mask, entropies=entropies)
        by_entropy = top_fraction_mask(entropies, mask, options.top_p_entropy_tokens)
        add_filter(totals, "entropy", "entropy", entropies, by_entropy, mask, mask & ~entropies.isnan())
        kept.append(by_entropy)
    if not kept:
        return None
    union = torch.stack(kept).any(dim=0)
    totals.add_mean("combined_token_fraction", union, mask)
    return union


def _trajectory_scale(
    dependency: torch.Tensor,
    mask: torch.Tensor,
    minimum: float,
    shaped: torch.Tensor | None,
    gather: Gather | None,
    totals: Totals,
) -> tuple[torch.Tensor, dict[str, float]]:
    means = mean_dependency(dependency, mask)  # (N,)
    compared = means if shaped is None else means.masked_fill(~shaped.bool(), torch.nan)
    statistics = trajectory_statistics(compared, gather)
    scale = scale_means(means, minimum, statistics)
    totals.add_mean("sensitivity_score_mean", means, ~compared.isnan())
    totals.add_mean("scaling_factor_mean", scale, ~compared.isnan())
    largest = largest_scale(minimum, statistics)
    return scale, {"dynamic_scaling_max": 1.0 if largest is None else largest}


def _pair(values: Sequence[float]) -> tuple[float, float]:
    low, high = values
    return low, high


def _needed(signal: Signal | None, option: str, name: str) -> Signal:
    if signal is None:
        raise ConfigError(f"{option} is on, but the signals have no {name}: measure it, or switch {option} off.")
    return signal


def _check_rows(name: str, values: torch.Tensor, mask: torch.Tensor) -> None:
    if mask.ndim != 2 or values.shape != mask.shape[:1]:
        raise DataError(
            f"shape_advantages got {name} of shape {tuple(values.shape)} and a mask of shape {tuple(mask.shape)}: give "
            "one value for each of the N completions of the mask (N, T)."
        )
