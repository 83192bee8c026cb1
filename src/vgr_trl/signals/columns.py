"""Columns for rewards and metrics, computed from the signals of completions."""

import inspect
import math
from collections.abc import Sequence
from contextlib import suppress
from sys import intern
from typing import Any

import torch
from torch import Tensor

from vgr_trl.metrics.totals import Gather, Totals
from vgr_trl.rewards.functions import WholeGroups
from vgr_trl.signals.rollout_signals import RolloutSignals


def named_columns(names: Sequence[str], signals: RolloutSignals) -> dict[str, list[float | None]]:
    """Return one column per named signal: the mean over each completion's tokens, None where it is undefined."""
    means = {name: signals.extra[name].nanmean(1).tolist() for name in names}
    return {name: list(map(_none_for_nan, values)) for name, values in means.items()}


def _none_for_nan(value: float) -> float | None:
    return None if math.isnan(value) else value


def named_metrics(names: Sequence[str], signals: RolloutSignals, gather: Gather) -> dict[str, float]:
    """Return `signals/<name>`, the mean over the finite values of all processes' tokens; NaN without finite values.

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
    """Return the columns of `SIGNAL_COLUMNS` that a reward function accepts by name."""
    named = {*reward.required, *reward.optional} if isinstance(reward, WholeGroups) else set[str]()
    with suppress(TypeError, ValueError):
        named |= set(inspect.signature(reward).parameters)
    return named & set(SIGNAL_COLUMNS)


def reward_columns(segments: dict[str, Tensor]) -> dict[str, list[Any]]:
    """Return the reward columns of the late segment (or of all layers), and all segments as `attention_metrics`.

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
    """Return the means over the completions of all processes, `attention/late/vgr` and so on.

    The means leave out undefined and infinite values; their shares in the late segment (or in all layers) are
    `vgr/undefined_fraction` and `vgr/infinite_fraction`.

    Args:
        segments: name of a segment -> its quantities (N, 6), as `measure_segments` returns them.
        gather: concatenates a tensor over all processes.
        prompt: the same for the queries of the prompt's instruction tokens, logged as `attention/prompt/late/vgr` and
            so on; None on every process: they were not measured.
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
