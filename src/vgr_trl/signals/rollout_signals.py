"""`RolloutSignals`: the measurements of completions, also as columns of a batch."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vgr_trl.registries import (
    LOGPS_PREFIX,
)
from vgr_trl.rows import EXTRA, LAYERED, VIEWS
from vgr_trl.signals.ratios import AttentionMass


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
