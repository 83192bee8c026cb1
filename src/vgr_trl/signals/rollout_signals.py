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
        extra: name -> (N, T) float32, named signals; NaN where undefined.
        similarity: (N, T) float32 in [-1, 1], similarity of the hidden state that emits a token to the hidden states of
            the image; NaN without an image, None if it was not measured.
        views: name of a perturbation -> (N, T) float32, log-probabilities of the tokens given the perturbed images; NaN
            without an image.
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
        found = vars(self)["jsd" if need == "shift" else need]
        return None if need == "views" and not found else found


def build_unmeasured_signals(mask: Tensor) -> RolloutSignals:
    """Build signals without measurements for completions whose tokens `mask`, (N, T) bool, count in the loss."""
    nothing = torch.full(mask.shape, torch.nan, device=mask.device)
    return RolloutSignals(nothing, nothing, mask)


_MASS = "signals.attention."


def _transpose(name: str, value: Tensor) -> Tensor:
    """Swap layers and rows of a column with layers, (L, N, T)."""
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

    if not (found := named("signals.")):
        return None
    parts = {name: value for name, value in found.items() if "." not in name}
    attention = AttentionMass(**mass) if (mass := named(_MASS)) else None
    return RolloutSignals(**parts, attention=attention, views=named(VIEWS), extra=named(EXTRA))


def take_signal_rows(signals: RolloutSignals | None, rows: list[int]) -> RolloutSignals | None:
    """Copy the signals of some rows to the CPU."""
    return columns_to_signals({name: value[rows].cpu() for name, value in signals_to_columns(signals).items()})
