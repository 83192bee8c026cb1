"""`RolloutSignals`, the measurements of completions; signals by name that are computed from them; their columns."""

import inspect
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from sys import intern
from typing import Any

import torch
from torch import Tensor

from vgr_trl import registries
from vgr_trl.batch import EXTRA, LAYERED, VIEWS
from vgr_trl.config import MeasureOptions, PluginOptions
from vgr_trl.errors import DataError
from vgr_trl.metrics.step_metrics import Gather, Totals
from vgr_trl.registries import (
    LOGPS_PREFIX,
    TEACHER,
    declares,
    find_measurements,
    is_measured_after_rewards,
    is_measurement,
    needed_signals,
    short_name,
)
from vgr_trl.rewards.functions import WholeGroups
from vgr_trl.signals.ratios import AttentionMass, late_layers, token_vision_gain_ratio


@dataclass
class RolloutSignals:
    """Signals of N completions of T tokens, under the policy that generated them.

    Attributes:
        logps: (N, T) float32, log-probabilities of the completion tokens; NaN if they were not measured.
        entropies: (N, T) float32, in nats; NaN if they were not measured.
        mask: (N, T) bool, completion tokens that count in the loss.
        attention: attention mass; None if it was not measured.
        dependency: (N, T) float32 in [0, 10], `visual_dependency` of the tokens; None if it was not measured.
        extra: name -> (N, T) float32, named signals; NaN where undefined.
        similarity: (N, T) float32 in [-1, 1], similarity of the hidden state that emits a token to the hidden states of
            the image; NaN without an image, None if it was not measured.
        views: name of a perturbation, or of a view of rows -> (N, T) float32, log-probabilities of the tokens given the
            other images; NaN without an image, or without the view.
        jsd: (N, T) float32 in [0, ln 2], Jensen-Shannon divergence between the next-token distributions given the image
            and given the perturbed image; NaN without an image, None if it was not measured.
        perturbed_entropies: (N, T) float32, in nats, entropies of the distributions given the perturbed image; NaN
            without an image, None if they were not measured.
    """

    logps: Tensor
    entropies: Tensor
    mask: Tensor
    attention: AttentionMass | None = None
    dependency: Tensor | None = None
    extra: dict[str, Tensor] = field(default_factory=dict)
    similarity: Tensor | None = None
    views: dict[str, Tensor] = field(default_factory=dict)
    jsd: Tensor | None = None
    perturbed_entropies: Tensor | None = None

    def measured(self, need: str) -> Any:
        """Return the measurement that plug-ins need by this name, None if it was not made."""
        if need.startswith(LOGPS_PREFIX):
            return self.views.get(need.removeprefix(LOGPS_PREFIX))
        if need == "regions":
            return None if self.attention is None else self.attention.region
        value = vars(self)["jsd" if need == "shift" else need]
        return None if need == "views" and not value else value


def build_unmeasured_signals(mask: Tensor) -> RolloutSignals:
    """Build signals without measurements; `mask` is (N, T) bool, tokens that count in the loss."""
    nothing = torch.full(mask.shape, torch.nan, device=mask.device)
    return RolloutSignals(nothing, nothing, mask)


_MASS = "signals.attention."


def _transpose(name: str, value: Tensor) -> Tensor:
    """Swap the layers and rows of an (L, N, T) column; return other columns unchanged."""
    return value.transpose(0, 1) if name in LAYERED else value


def signals_to_columns(signals: RolloutSignals | None) -> dict[str, Tensor]:
    """Return the tensors of `signals` as batch columns, rows first: (N, T), (N, L, T) and (N,)."""
    if signals is None:
        return {}
    nested: dict[str, dict[str, Any]] = {"signals.": vars(signals), VIEWS: signals.views, EXTRA: signals.extra}
    nested[_MASS] = {} if signals.attention is None else vars(signals.attention)
    columns = {prefix + name: value for prefix, values in nested.items() for name, value in values.items()}
    return {name: _transpose(name, value) for name, value in columns.items() if isinstance(value, Tensor)}


def columns_to_signals(columns: dict[str, Any]) -> RolloutSignals | None:
    """Rebuild signals from the columns of `signals_to_columns`; None if `columns` contains no signals."""

    def named(prefix: str) -> dict[str, Any]:
        names = [name for name in columns if name.startswith(prefix)]
        return {name.removeprefix(prefix): _transpose(name, columns[name]) for name in names}

    if not (by_name := named("signals.")):
        return None
    parts = {name: value for name, value in by_name.items() if "." not in name}
    attention = AttentionMass(**mass) if (mass := named(_MASS)) else None
    return RolloutSignals(**parts, attention=attention, views=named(VIEWS), extra=named(EXTRA))


def take_signal_rows(signals: RolloutSignals | None, rows: list[int]) -> RolloutSignals | None:
    """Copy the signals of some rows to the CPU."""
    return columns_to_signals({name: value[rows].cpu() for name, value in signals_to_columns(signals).items()})


@dataclass(frozen=True)
class NamedSignal:
    """A signal that a run computes by name.

    Attributes:
        name: its key in `RolloutSignals.extra`.
        function: computes the signal.
        options: second argument of the function.
        requires: the measurements that the signal reads, also through other signals.
    """

    name: str
    function: Callable[[RolloutSignals, Any], Tensor]
    options: Any
    requires: tuple[str, ...]

    @property
    def is_late(self) -> bool:
        """Whether the signal can be computed only after the rewards."""
        return any(map(is_measured_after_rewards, self.requires))


def named_signals(options: PluginOptions, further: Sequence[str] = ()) -> tuple[NamedSignal, ...]:
    """Load the signals that a run names and the signals that plug-in rules read, in dependency order.

    Args:
        options: names the signals and the rules.
        further: names of signals that rewards read, measurements among them.

    Raises:
        ConfigError: a signal is not found, or depends on itself.
    """
    by_name: dict[str, NamedSignal] = {}

    def add(spec: str) -> None:
        requires = tuple(find_measurements([spec]))  # raises for a signal that depends on itself
        function = registries.signals.load(spec)
        for need in needed_signals(function) if not is_measurement(spec) else ():
            if not is_measurement(need):
                add(need)
        name = short_name(spec)
        by_name.setdefault(name, NamedSignal(name, function, options.plugin_values(function), requires))

    read = [need for rule in options.plugin_rules for need in needed_signals(registries.credit_rules.load(rule))]
    for spec in options.signals or ():
        add(spec)
    for need in (*(need for need in read if not is_measurement(need)), *further):
        if need != "regions":  # a measurement without a signal of its own
            add(need)
    return tuple(by_name.values())


def add_named(named: Sequence[NamedSignal], signals: RolloutSignals) -> list[str]:
    """Compute signals whose inputs are available, into `signals.extra`; return the names of the new signals.

    Args:
        named: signals in dependency order.
        signals: measurements of N completions of T tokens.

    Raises:
        DataError: a signal does not return one value per token.
    """
    new = []
    for signal in named:
        if signal.name in signals.extra or not all(_is_measured(signals, need) for need in signal.requires):
            continue
        values = registries.call_plugin(f"the signal {signal.name}", signal.function, signals, signal.options)
        if not isinstance(values, Tensor) or values.shape != signals.mask.shape:
            shape = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise DataError(f"The signal {signal.name} returned {shape}: return a tensor {tuple(signals.mask.shape)}.")
        signals.extra[signal.name] = values.detach().float().masked_fill(~signals.mask.bool(), torch.nan)
        new.append(signal.name)
    return new


def _is_measured(signals: RolloutSignals, need: str) -> bool:
    """Whether a measurement was made, on every process alike; rows without an image are measured, but undefined."""
    value = signals.measured(need)
    is_unknown = need in ("entropies", "logps") and value.numel() and bool(value.isnan().all())
    return value is not None and not is_unknown


@registries.signals.register("attention")
@declares(needs=("attention",))
def image_attention(signals: RolloutSignals, options: Any) -> Tensor:
    """Sum attention over all image tokens, averaged over the late layers, (N, T) in [0, 1]."""
    mass, late = _mass(signals, options)
    attention: Tensor = mass.vision[late].mean(0)
    return attention


@registries.signals.register("token_vgr")
@declares(needs=("attention",))
def token_vgr(signals: RolloutSignals, options: Any) -> Tensor:
    """Return the VGR of each token in the late layers, (N, T)."""
    mass, late = _mass(signals, options)
    return token_vision_gain_ratio(mass, late)


@registries.signals.register("region_share")
@declares(needs=("attention", "regions"))
def region_share(signals: RolloutSignals, options: Any) -> Tensor:
    """Return the share of the image's attention that goes to the boxes of the question, (N, T) in [0, 1].

    Attention is averaged over the late layers. Rows without a box are NaN.
    """
    mass, late = _mass(signals, options)
    share: Tensor = mass.region[late].mean(0) / mass.vision[late].mean(0)
    return share.masked_fill((mass.num_region == 0).unsqueeze(1), torch.nan)


@registries.signals.register("region_focus")
@declares(needs=("region_share",))
def region_focus(signals: RolloutSignals, options: Any) -> Tensor:
    """Return `region_share` divided by the region's share of the image tokens, (N, T); 1 is average attention."""
    mass, _ = _mass(signals, options)
    average: Tensor = mass.num_region / mass.num_vision
    return signals.extra["region_share"] / average.unsqueeze(1)


def _mass(signals: RolloutSignals, options: Any) -> tuple[Any, list[int]]:
    """Return the attention mass, which every caller requires to be measured, and its late layers."""
    mass: Any = signals.attention
    return mass, late_layers(len(mass.vision), read_segments(options))


def read_segments(options: Any) -> str:
    """Return the scheme that splits layers into segments: `attention_segments`, or thirds without that option."""
    return options.attention_segments if isinstance(options, MeasureOptions) else "thirds"


@registries.signals.register("stability")
@declares(needs=("views",))
def stability(signals: RolloutSignals, options: Any) -> Tensor:
    """Return how stable each token's probability is under perturbations, 1 - 2 · std, (N, T) in [0, 1].

    The variance divides by the number of perturbations, so the standard deviation is at most 1/2.
    """
    return 1 - 2 * torch.stack([signals.views[name] for name in options.perturbations]).exp().std(0, correction=0)


NOISY = "noisy"  # the view of completions that were sampled from a perturbed image, beside the teacher `clean`


@registries.signals.register("teacher_gap")
@declares(needs=("logps", LOGPS_PREFIX + TEACHER))
def teacher_gap(signals: RolloutSignals, options: Any) -> Tensor:
    """Return log π(token | view) − log π(token | images), (N, T); NaN for rows without the view of `teacher_view`.

    Beside the teacher `clean`, the images are those that the completion was sampled from.
    """
    return signals.views[TEACHER] - signals.views.get(NOISY, signals.logps)


def _return_measured(need: str, signals: RolloutSignals, options: Any) -> Any:
    """Return a measurement as a signal."""
    return signals.measured(need)


for _name in ("similarity", "dependency", "entropies", "logps", "jsd"):
    _need = "shift" if _name == "jsd" else _name
    registries.signals.register(_name)(declares(needs=(_need,))(partial(_return_measured, _need)))


def named_columns(names: Sequence[str], signals: RolloutSignals) -> dict[str, list[float | None]]:
    """Return one column per named signal: the mean over each completion's tokens, None where it is undefined."""
    means = {name: signals.extra[name].nanmean(1).tolist() for name in names}
    return {name: list(map(_none_for_nan, values)) for name, values in means.items()}


def _none_for_nan(value: float) -> float | None:
    return None if math.isnan(value) else value


def named_metrics(names: Sequence[str], signals: RolloutSignals, gather: Gather) -> dict[str, float]:
    """Average named signals over all finite tokens on all processes, as `signals/<name>`; NaN without finite values.

    Args:
        names: names in `signals.extra`, the same on every process.
        signals: signals of this process's completions.
        gather: concatenates a tensor over all processes.
    """
    totals = Totals()
    for name in names:
        totals.add_mean(f"signals/{name}", signals.extra[name], signals.extra[name].isfinite())
    return totals.metrics(gather)


SINGLE_COLUMNS = ("vgr", "aei_vision", "aei_instruction", "mdi_balance")
PER_IMAGE = "attention_per_image"
SIGNAL_COLUMNS = (*SINGLE_COLUMNS, "attention_metrics", PER_IMAGE)
ATTENTION_QUANTITIES = (*SINGLE_COLUMNS, "attention_vision", "attention_instruction")


def needed_signal_columns(reward: Any) -> set[str]:
    """Return the `SIGNAL_COLUMNS` that a reward function accepts by name."""
    named = {*reward.required, *reward.optional} if isinstance(reward, WholeGroups) else set[str]()
    with suppress(TypeError, ValueError):
        named |= set(inspect.signature(reward).parameters)
    return named & set(SIGNAL_COLUMNS)


def reward_columns(segments: dict[str, Tensor]) -> dict[str, list[Any]]:
    """Return reward columns from the late segment (or all layers), and all segments as column `attention_metrics`.

    Args:
        segments: name of a segment -> its quantities (N, 6), as `measure_segments` returns them.
    """
    quantities = {
        name: [dict(zip(ATTENTION_QUANTITIES, map(_none_for_nan, row), strict=True)) for row in values.tolist()]
        for name, values in segments.items()
    }
    tables = [dict(zip(quantities, row, strict=True)) for row in zip(*quantities.values(), strict=True)]
    of_reward = [table.get("late", table["all"]) for table in tables]
    return {name: [table[name] for table in of_reward] for name in SINGLE_COLUMNS} | {"attention_metrics": tables}


def attention_metrics(
    segments: dict[str, Tensor], gather: Gather, prompt: dict[str, Tensor] | None = None
) -> dict[str, float]:
    """Average attention quantities over completions on all processes, as `attention/late/vgr` and so on.

    The means leave out undefined and infinite values; their shares in the late segment (or in all layers) are
    `vgr/undefined_fraction` and `vgr/infinite_fraction`.

    Args:
        segments: name of a segment -> its quantities (N, 6), as `measure_segments` returns them.
        gather: concatenates a tensor over all processes.
        prompt: quantities of the prompts' instruction tokens as queries, logged as `attention/prompt/late/vgr` and so
            on; None on every process: not measured.
    """
    every = segments | {f"prompt/{name}": values for name, values in (prompt or {}).items()}
    totals = Totals()
    for segment, values in every.items():
        for quantity, column in zip(ATTENTION_QUANTITIES, values.unbind(1), strict=True):
            # The history of logs keeps every name: interned names share memory.
            totals.add_mean(intern(f"attention/{segment}/{quantity}"), column, column.isfinite())
    vgr = every["late" if "late" in every else "all"][:, 0]  # (N,)
    totals.add_mean("vgr/undefined_fraction", vgr.isnan(), torch.ones_like(vgr, dtype=torch.bool))
    totals.add_mean("vgr/infinite_fraction", vgr.isinf(), torch.ones_like(vgr, dtype=torch.bool))
    return totals.metrics(gather)
