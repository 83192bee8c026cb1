"""Named signals: `signal(signals, options) -> (N, T)`, computed from measurements or from other signals.

A signal declares its inputs by `declares(needs=...)`: measurements (`vgr_trl.registries.MEASUREMENTS`), or other
signals by name, which it finds in `signals.extra`.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vgr_trl import registries
from vgr_trl.config import PluginOptions
from vgr_trl.errors import DataError
from vgr_trl.registries import (
    declares,
    find_measurements,
    is_measured_after_rewards,
    is_measurement,
    needed_signals,
    short_name,
)
from vgr_trl.signals.ratios import late_layers, token_vision_gain_ratio
from vgr_trl.signals.rollout_signals import RolloutSignals


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
