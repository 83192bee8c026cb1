"""Named signals: `signal(signals, options) -> (N, T)`, computed from measurements or from other signals.

A signal declares its inputs by `declares(needs=...)`: measurements (`vgr_trl.registries.MEASUREMENTS`), or other
signals by name, which it finds in `signals.extra`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vgr_trl import registries
from vgr_trl.config import MeasureOptions, PluginOptions
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
    found: dict[str, NamedSignal] = {}

    def add(spec: str) -> None:
        requires = tuple(find_measurements([spec]))  # raises for a signal that depends on itself
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
        if need != "regions":  # a measurement without a signal of its own
            add(need)
    return tuple(found.values())


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
        values = signal.function(signals, signal.options)
        if not isinstance(values, Tensor) or values.shape != signals.mask.shape:
            found = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise DataError(f"The signal {signal.name} returned {found}: return a tensor {tuple(signals.mask.shape)}.")
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
    """Return the attention on all image tokens together, averaged over the late layers, (N, T) in [0, 1]."""
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
    """Return the attention mass, measured for every signal that needs it, and its late layers."""
    mass: Any = signals.attention
    return mass, late_layers(len(mass.vision), read_segments(options))


def read_segments(options: Any) -> str:
    """Return the scheme that splits layers into segments: `attention_segments`, or thirds without that option."""
    return options.attention_segments if isinstance(options, MeasureOptions) else "thirds"


@registries.signals.register("stability")
@declares(needs=("views",))
def stability(signals: RolloutSignals, options: Any) -> Tensor:
    """Return the stability of each token's probability over the perturbations, 1 - 2 · std, (N, T) in [0, 1].

    The variance divides by the number of perturbations, so the standard deviation is at most 1/2.
    """
    probabilities = torch.stack([signals.views[name] for name in options.perturbations]).exp()
    return 1 - 2 * probabilities.std(0, correction=0)


def _return_measured(need: str, signals: RolloutSignals, options: Any) -> Any:
    """Return a measurement as a signal."""
    return signals.measured(need)


for _name in ("similarity", "dependency", "entropies", "logps", "jsd"):
    _need = "shift" if _name == "jsd" else _name
    registries.signals.register(_name)(declares(needs=(_need,))(partial(_return_measured, _need)))
