"""`RolloutSignals`: what was measured of completions; and signals made of it: `signal(signals, options) -> (N, T)`.

A signal says by `declares(needs=...)` what it is made of: measurements (`vgr_trl.registries.MEASUREMENTS`), or other
signals by their names, which it finds in `signals.extra`.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from sys import intern
from typing import Any

import torch
from torch import Tensor

from vgr_trl import registries
from vgr_trl.config import PluginOptions
from vgr_trl.metrics import Gather
from vgr_trl.registries import (
    LOGPS_PREFIX,
    declares,
    find_measurements,
    is_measured_after_rewards,
    is_measurement,
    needed_signals,
    short_name,
)
from vgr_trl.rewards.functions import WholeGroups
from vgr_trl.rows import EXTRA, LAYERED, VIEWS
from vgr_trl.signals.ratios import AttentionMass, late_layers, token_vision_gain_ratio
from vgr_trl.utils import DataError


@dataclass
class RolloutSignals:
    """Signals of N completions of T tokens, under the policy that generated them.

    Attributes:
        logps: (N, T) float32, log-probabilities of the completion tokens; NaN if they were not measured.
        entropies: (N, T) float32, in nats; NaN if they were not measured.
        mask: (N, T) bool, completion tokens that count in the loss.
        attention: attention mass; None if it was not measured.
        dependency: (N, T) float32 in [0, 10], `visual_dependency` of the tokens; None if it was not measured.
        extra: name -> (N, T) float32, signals that were asked for by name; NaN where undefined.
        similarity: (N, T) float32 in [-1, 1], of the hidden state that emits a token to those of the image; NaN without
            one, None if it was not measured.
        views: name of a perturbation -> (N, T) float32, log-probabilities of the tokens given images so perturbed; NaN
            without an image.
        jsd: (N, T) float32 in [0, ln 2], Jensen-Shannon divergence of what a token is drawn from given the image, and
            given the perturbed one; NaN without an image, None if it was not measured.
        perturbed_entropies: (N, T) float32, in nats, of what it is drawn from given the perturbed image, likewise.
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
        """Return a measurement by its name among the needs of plug-ins, None if it was not made."""
        if need.startswith(LOGPS_PREFIX):
            return self.views.get(need.removeprefix(LOGPS_PREFIX))
        if need == "regions":
            return None if self.attention is None else self.attention.region
        found = getattr(self, "jsd" if need == "shift" else need)
        return None if need == "views" and not found else found


def build_unmeasured_signals(mask: Tensor) -> RolloutSignals:
    """Return the signals of completions of which nothing was measured but which tokens count, (N, T) bool."""
    nothing = torch.full(mask.shape, torch.nan, device=mask.device)
    return RolloutSignals(nothing, nothing, mask)


_MASS = "signals.attention."


def _transpose(name: str, value: Tensor) -> Tensor:
    """Exchange layers and rows of a column that has layers."""
    return value.transpose(0, 1) if name in LAYERED else value


def signals_to_columns(signals: RolloutSignals | None) -> dict[str, Tensor]:
    """Return the tensors of `signals`, rows first: (N, T), (N, L, T) and (N,)."""
    if signals is None:
        return {}
    nested: dict[str, dict[str, Any]] = {"signals.": vars(signals), VIEWS: signals.views, EXTRA: signals.extra}
    nested[_MASS] = {} if signals.attention is None else vars(signals.attention)
    columns = {prefix + name: value for prefix, values in nested.items() for name, value in values.items()}
    return {name: _transpose(name, value) for name, value in columns.items() if isinstance(value, Tensor)}


def columns_to_signals(columns: dict[str, Any]) -> RolloutSignals | None:
    """Return the signals that `signals_to_columns` made columns of; None if there are none among `columns`."""

    def named(prefix: str) -> dict[str, Any]:
        names = [name for name in columns if name.startswith(prefix)]
        return {name.removeprefix(prefix): _transpose(name, columns[name]) for name in names}

    if not (found := named("signals.")):
        return None
    parts = {name: value for name, value in found.items() if "." not in name}
    attention = AttentionMass(**mass) if (mass := named(_MASS)) else None
    return RolloutSignals(**parts, attention=attention, views=named(VIEWS), extra=named(EXTRA))


def take_signal_rows(signals: RolloutSignals | None, rows: list[int]) -> RolloutSignals | None:
    """Return the signals of some rows, on the CPU."""
    return columns_to_signals({name: value[rows].cpu() for name, value in signals_to_columns(signals).items()})


@dataclass(frozen=True)
class NamedSignal:
    """A signal that a run asks for.

    Attributes:
        name: its key in `RolloutSignals.extra`.
        function: the signal.
        options: what it takes as such.
        requires: the measurements that it is made of, through other signals too.
    """

    name: str
    function: Callable[[RolloutSignals, Any], Tensor]
    options: Any
    requires: tuple[str, ...]

    @property
    def is_late(self) -> bool:
        """Whether it is there only after the rewards."""
        return any(map(is_measured_after_rewards, self.requires))


def named_signals(options: PluginOptions, further: Sequence[str] = ()) -> tuple[NamedSignal, ...]:
    """Return the signals that a run asks for, and those that plug-in rules read, each behind what it is made of.

    Args:
        further: names of signals that rewards read, measurements among them.

    Raises:
        ConfigError: one is not found, or is made of itself.
    """
    found: dict[str, NamedSignal] = {}

    def add(spec: str) -> None:
        requires = tuple(find_measurements([spec]))  # refuses what is made of itself
        function = registries.signals.load(spec)
        for need in needed_signals(function) if not is_measurement(spec) else ():
            if not is_measurement(need):
                add(need)
        name = short_name(spec)
        found.setdefault(name, NamedSignal(name, function, options.plugin_values(function, spec), requires))

    read = [need for rule in options.plugin_rules for need in needed_signals(registries.credit_rules.load(rule))]
    for spec in options.signals or ():
        add(spec)
    for need in (*(need for need in read if not is_measurement(need)), *further):
        if need != "regions":  # which is no signal of its own
            add(need)
    return tuple(found.values())


def add_named(named: Sequence[NamedSignal], signals: RolloutSignals) -> list[str]:
    """Add to `signals.extra` what can be made of what has been measured so far; return the names that are new.

    Raises:
        DataError: a signal does not return one value per token.
    """
    new = []
    for signal in named:
        if signal.name in signals.extra or not all(_is_measured(signals, need) for need in signal.requires):
            continue
        values = signal.function(deepcopy(signals), signal.options)  # a plug-in may change tensors in place
        if getattr(values, "shape", None) != signals.mask.shape:
            shape = getattr(values, "shape", type(values).__name__)
            raise DataError(f"The signal {signal.name} returned {shape}: return a tensor {tuple(signals.mask.shape)}.")
        signals.extra[signal.name] = values.detach().float().masked_fill(~signals.mask.bool(), torch.nan)
        new.append(signal.name)
    return new


def _is_measured(signals: RolloutSignals, need: str) -> bool:
    """Whether it was, which is the same on every process; what a row has no image for is measured, and undefined."""
    value = signals.measured(need)
    is_unknown = need in ("entropies", "logps") and value.numel() and bool(value.isnan().all())
    return value is not None and not is_unknown


def named_columns(names: Sequence[str], signals: RolloutSignals) -> dict[str, list[float | None]]:
    """Return what rewards get of signals: per completion the mean over its tokens, None where it is undefined."""
    means = {name: signals.extra[name].nanmean(1).tolist() for name in names}
    return {name: list(map(_none_for_nan, values)) for name, values in means.items()}


def _none_for_nan(value: float) -> float | None:
    return None if math.isnan(value) else value


def named_metrics(names: Sequence[str], signals: RolloutSignals, gather: Gather) -> dict[str, float]:
    """Return `signals/<name>`, the mean over the finite values of the tokens of all processes; NaN without any."""
    if not names:
        return {}
    values = torch.stack([signals.extra[name] for name in names])  # (names, N, T)
    finite = values.isfinite()
    sums = torch.stack([values.masked_fill(~finite, 0).sum((1, 2)), finite.sum((1, 2)).float()], dim=-1)  # (names, 2)
    total = gather(sums.unsqueeze(0)).double().sum(0)
    return {f"signals/{name}": (total[i, 0] / total[i, 1]).item() for i, name in enumerate(names)}


@registries.signals.register("attention")
@declares(needs=("attention",))
def image_attention(signals: RolloutSignals, options: Any) -> Tensor:
    """Return the attention on all image tokens together, the mean over the late layers, in [0, 1]."""
    mass, late = _mass(signals, options)
    attention: Tensor = mass.vision[late].mean(0)
    return attention


@registries.signals.register("token_vgr")
@declares(needs=("attention",))
def token_vgr(signals: RolloutSignals, options: Any) -> Tensor:
    """Return the VGR of each token, of the late layers."""
    mass, late = _mass(signals, options)
    return token_vision_gain_ratio(mass, late)


@registries.signals.register("region_share")
@declares(needs=("attention", "regions"))
def region_share(signals: RolloutSignals, options: Any) -> Tensor:
    """Return how much of the attention on the image goes to what the question is about, in [0, 1], of the late layers.

    NaN for rows that name no box.
    """
    mass, late = _mass(signals, options)
    share: Tensor = mass.region[late].mean(0) / mass.vision[late].mean(0)
    return share.masked_fill((mass.num_region == 0).unsqueeze(1), torch.nan)


@registries.signals.register("region_focus")
@declares(needs=("region_share",))
def region_focus(signals: RolloutSignals, options: Any) -> Tensor:
    """Return `region_share` over the region's share of the image's tokens: above 1, more than an average token gets."""
    mass, _ = _mass(signals, options)
    average: Tensor = mass.num_region / mass.num_vision
    return signals.extra["region_share"] / average.unsqueeze(1)


def _mass(signals: RolloutSignals, options: Any) -> tuple[Any, list[int]]:
    """Return the attention mass, which a signal that needs it finds measured, and its late layers."""
    mass: Any = signals.attention
    return mass, late_layers(len(mass.vision), getattr(options, "attention_segments", "thirds"))


@registries.signals.register("stability")
@declares(needs=("views",))
def stability(signals: RolloutSignals, options: Any) -> Tensor:
    """Return how little the probability of each token differs between the perturbations: 1 - 2 · std, in [0, 1].

    The standard deviation is that of all perturbations (divided by their number), which is at most 1/2.
    """
    probabilities = torch.stack([signals.views[name] for name in options.perturbations]).exp()
    return 1 - 2 * probabilities.std(0, correction=0)


def _measured(name: str, signals: RolloutSignals, options: Any) -> Any:
    """Return what `RolloutSignals` has by that name."""
    return getattr(signals, name)


for _name in ("similarity", "dependency", "entropies", "logps", "jsd"):
    _signal = declares(needs=("shift" if _name == "jsd" else _name,))(partial(_measured, _name))
    registries.signals.register(_name)(_signal)


SINGLE_COLUMNS = ("vgr", "aei_vision", "aei_instruction", "mdi_balance")
PER_IMAGE = "attention_per_image"
SIGNAL_COLUMNS = (*SINGLE_COLUMNS, "attention_metrics", PER_IMAGE)
QUANTITIES = (*SINGLE_COLUMNS, "attention_vision", "attention_instruction")


def needed_signal_columns(reward: Any) -> set[str]:
    """Return the columns of `SIGNAL_COLUMNS` that a reward function takes by name."""
    named = {*reward.required, *reward.optional} if isinstance(reward, WholeGroups) else set[str]()
    with suppress(TypeError, ValueError):
        named |= set(inspect.signature(reward).parameters)
    return named & set(SIGNAL_COLUMNS)


def reward_columns(segments: dict[str, Tensor]) -> dict[str, list[Any]]:
    """Return per completion the columns of the late segment (else of all layers), and all segments as a dict."""
    rows = dict(zip(segments, torch.stack(list(segments.values())).tolist(), strict=True))
    tables = [
        {name: dict(zip(QUANTITIES, map(_none_for_nan, values[row]), strict=True)) for name, values in rows.items()}
        for row in range(len(rows["all"]))
    ]
    of_reward = [table.get("late", table["all"]) for table in tables]
    return {name: [table[name] for table in of_reward] for name in SINGLE_COLUMNS} | {"attention_metrics": tables}


def attention_metrics(
    segments: dict[str, Tensor], gather: Gather, prompt: dict[str, Tensor] | None = None
) -> dict[str, float]:
    """Return the means over the completions of all processes, `attention/late/vgr` and so on.

    Undefined and infinite values do not enter the means; their shares are `vgr/undefined_fraction` and
    `vgr/infinite_fraction`, of the late segment (else of all layers).

    Args:
        segments: as `measure_segments` returns them.
        prompt: likewise for the queries of the prompt's instruction tokens, for `attention/prompt/late/vgr` and so on;
            None: not measured, on no process.
    """
    every = segments | {f"prompt/{name}": values for name, values in (prompt or {}).items()}
    names = list(every)
    values = gather(torch.stack([every[name] for name in names], dim=1))  # (N of all, segments, 6)
    finite = values.isfinite()
    means = torch.where(finite, values, 0.0).sum(0) / finite.sum(0)  # (segments, 6), NaN where nothing is finite
    vgr = values[:, names.index("late" if "late" in names else "all"), 0]
    shares = torch.stack([vgr.isnan().float().mean(), vgr.isinf().float().mean()])
    # The history of logs keeps every name.
    keys = [intern(f"attention/{segment}/{quantity}") for segment in names for quantity in QUANTITIES]
    keys += ["vgr/undefined_fraction", "vgr/infinite_fraction"]
    return dict(zip(keys, torch.cat([means.flatten(), shares]).tolist(), strict=True))
