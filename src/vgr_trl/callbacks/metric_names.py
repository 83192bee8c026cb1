"""Rename metrics as verl or MTRL name them."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

VERL_NAMES: dict[str, list[str]] = yaml.safe_load(
    Path(__file__).with_name("verl_names.yaml").read_text(encoding="utf-8")
)


def rename_for_verl(logs: Mapping[str, Any], processes: int = 1) -> dict[str, Any]:
    """Return what is logged under verl's names; metrics that it has no name for keep theirs.

    `actor/pg_loss` is the whole loss where TRL logs no part of it; `perf/throughput` tokens per second and process;
    `timing_s/update_actor` passes and optimizer together.

    Args:
        processes: of the run.
    """
    named = [(name, other) for name in logs for other in _verl_names(name)]
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
    """Return what is logged under MTRL's names: verl's, but `agent/` for `actor/` and `divergence` for `kl`."""
    named = rename_for_verl(logs, processes).items()
    return {_MTRL_NAMES.get(name, re.sub("^actor/", "agent/", name)): value for name, value in named}


def _verl_names(name: str) -> Sequence[str]:
    if name in VERL_NAMES:
        return VERL_NAMES[name]
    plain = name.removeprefix("eval_")
    if reward := re.fullmatch("rewards/(.*)/mean", plain):
        return (f"reward/{reward[1]}" if plain == name else f"val/{reward[1]}_reward",)
    if plain != name and plain.startswith("reward/"):
        return (f"val/{plain.removeprefix('reward/')}_reward",)
    if plain != name and plain.startswith("completions/") and plain in VERL_NAMES:
        return [f"val_{other}" for other in VERL_NAMES[plain]]
    return (name,)
