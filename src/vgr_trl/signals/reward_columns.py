"""Signals of completions as columns for rewards and tables, and as metrics."""

import inspect
import math
from collections.abc import Callable
from contextlib import suppress
from sys import intern
from typing import Any

import torch

from vgr_trl.batch.signals import AttentionMass
from vgr_trl.signals.ratios import (
    attention_efficiency_index,
    mdi_balance,
    mean_attention,
    split_layers,
    vision_gain_ratio,
)

SINGLE_COLUMNS = ("vgr", "aei_vision", "aei_instruction", "mdi_balance")
SIGNAL_COLUMNS = (*SINGLE_COLUMNS, "attention_metrics")
QUANTITIES = (*SINGLE_COLUMNS, "attention_vision", "attention_instruction")


def columns_needed_by(reward: Any) -> set[str]:
    """Return the columns of `SIGNAL_COLUMNS` that a reward function takes by name."""
    named = set(getattr(reward, "required", ())) | set(getattr(reward, "optional", ()))
    with suppress(TypeError, ValueError):
        named |= set(inspect.signature(reward).parameters)
    return named & set(SIGNAL_COLUMNS)


def measure_segments(mass: AttentionMass, scheme: str, mdi_balance_ratio: float) -> dict[str, torch.Tensor]:
    """Return, per segment of layers, the six `QUANTITIES` (N, 6) of the completions; NaN where undefined."""
    segments = {}
    for name, layers in split_layers(len(mass.vision), scheme).items():
        vgr = vision_gain_ratio(mass, layers)  # (N,)
        vision, instruction = attention_efficiency_index(mass, layers)  # (N,), (N,)
        balance = mdi_balance(vgr, mdi_balance_ratio)
        segments[name] = torch.stack([vgr, vision, instruction, balance, *mean_attention(mass, layers)], dim=1)
    return segments


def reward_columns(segments: dict[str, torch.Tensor]) -> dict[str, list[Any]]:
    """Return the `SIGNAL_COLUMNS`: per completion those of the late segment (else of all layers), and all as a dict."""
    rows = {name: values.tolist() for name, values in segments.items()}
    count = len(rows["all"])
    dicts = [
        {name: dict(zip(QUANTITIES, map(_defined, values[row]), strict=True)) for name, values in rows.items()}
        for row in range(count)
    ]
    of_reward = [found.get("late", found["all"]) for found in dicts]
    single = {name: [found[name] for found in of_reward] for name in SINGLE_COLUMNS}
    return {**single, "attention_metrics": dicts}


def _defined(value: float) -> float | None:
    return None if math.isnan(value) else value


def attention_metrics(
    segments: dict[str, torch.Tensor],
    gather: Callable[[torch.Tensor], torch.Tensor],
    prompt: dict[str, torch.Tensor] | None = None,
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
    metrics = {
        intern(f"attention/{segment}/{quantity}"): means[i, j].item()  # the history of logs keeps every name
        for i, segment in enumerate(names)
        for j, quantity in enumerate(QUANTITIES)
    }
    vgr = values[:, names.index("late" if "late" in names else "all"), 0]
    metrics["vgr/undefined_fraction"] = vgr.isnan().float().mean().item()
    metrics["vgr/infinite_fraction"] = vgr.isinf().float().mean().item()
    return metrics
