"""Rename metrics to verl's or MTRL's names."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

VERL_METRICS: dict[str, list[str]] = yaml.safe_load(
    Path(__file__).with_name("verl_names.yaml").read_text(encoding="utf-8")
)


def rename_for_verl(logs: Mapping[str, Any], processes: int = 1) -> dict[str, Any]:
    """Rename metrics to verl's names; metrics without a name in verl keep their names.

    `actor/pg_loss` is the whole loss if TRL logs no part of it, `perf/throughput` counts tokens per second and process,
    `timing_s/update_actor` sums passes and optimizer.

    Args:
        logs: metrics by their names in this library.
        processes: number of processes of the run.
    """
    named = [(name, other) for name in logs for other in _find_verl_names(name)]
    found = {other: logs[name] for name, other in named if other == name or other not in logs}
    if "loss" in logs:
        found.setdefault("actor/pg_loss", logs["loss"])
    if "perf/tokens_per_second" in logs:
        found["perf/throughput"] = logs["perf/tokens_per_second"] / processes
    if seconds := [found.pop(name) for name in ("timing/update", "timing/optimizer") if name in found]:
        found["timing_s/update_actor"] = sum(seconds)
    return found


_MTRL_NAMES = {"actor/kl_loss": "agent/divergence_loss", "actor/kl_coef": "agent/divergence_coef"}


def rename_for_mtrl(logs: Mapping[str, Any], processes: int = 1) -> dict[str, Any]:
    """Rename metrics to MTRL's names: verl's names with `agent/` for `actor/` and `divergence` for `kl`."""
    named = rename_for_verl(logs, processes).items()
    return {_MTRL_NAMES.get(name, re.sub("^actor/", "agent/", name)): value for name, value in named}


def _find_verl_names(name: str) -> Sequence[str]:
    if name in VERL_METRICS:
        return VERL_METRICS[name]
    plain = name.removeprefix("eval_")
    if reward := re.fullmatch("rewards/(.*)/mean", plain):
        return (f"reward/{reward[1]}" if plain == name else f"val/{reward[1]}_reward",)
    if plain != name and plain.startswith("reward/"):
        return (f"val/{plain.removeprefix('reward/')}_reward",)
    if plain != name and plain.startswith("completions/") and plain in VERL_METRICS:
        return [f"val_{other}" for other in VERL_METRICS[plain]]
    return (name,)
