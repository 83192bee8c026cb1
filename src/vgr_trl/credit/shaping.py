"""From one advantage per completion to one per token: the rules of credit that are on, composed."""

from collections.abc import Mapping
from typing import Any

import torch

from vgr_trl.batch.signals import RolloutSignals, read_only
from vgr_trl.config.ranges import check_choice
from vgr_trl.config.stages.credit import CreditOptions
from vgr_trl.credit.masked import check_shapes
from vgr_trl.credit.rules import Metric, Rule, active_rules, per_token
from vgr_trl.credit.totals import Totals, add_weights
from vgr_trl.credit.trajectory import Gather
from vgr_trl.errors import ConfigError, DataError
from vgr_trl.registries import is_measurement, short_name


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
