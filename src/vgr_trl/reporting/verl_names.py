"""The names that verl, EasyR1 and MTRL have for metrics of ours, for trackers (`metric_names verl`)."""

from collections.abc import Mapping
from typing import Any

VERL: dict[str, tuple[str, ...]] = {
    "policy_loss": ("actor/pg_loss",), "grad_norm": ("actor/grad_norm",), "learning_rate": ("actor/lr",),
    "entropy": ("actor/entropy",), "approx_kl": ("actor/approx_kl",),
    "clip_ratio/region_mean": ("actor/clipfrac", "actor/pg_clipfrac"),
    "kl": ("actor/kl_loss",), "kl/mean": ("actor/kl_loss",), "kl/completion": ("actor/kl_penalty",),
    "kl/coefficient": ("actor/kl_coef",), "critic/value_loss": ("critic/vf_loss",),
    "critic/explained_variance": ("critic/vf_explained_var",), "critic/learning_rate": ("critic/lr",),
    "reward": ("critic/rewards/mean", "reward/overall"), "eval_reward": ("val/reward_score",),
    "completions/mean_length": ("response_length/mean",), "completions/min_length": ("response_length/min",),
    "completions/max_length": ("response_length/max",), "completions/clipped_ratio": ("response_length/clip_ratio",),
    "step_time": ("perf/time_per_step", "timing_s/step"), "timing/generation": ("timing_s/gen",),
    "timing/reward": ("timing_s/reward",), "timing/old_logps": ("timing_s/old",),
    "timing/reference": ("timing_s/ref",), "timing/perceive": ("timing_s/aug",), "timing/choose": ("timing_s/adv",),
    "timing/values": ("timing_s/values",),
}  # fmt: skip
_OF_ACTOR = {
    "entropy_token_fraction", "perception_token_fraction", "combined_token_fraction", "sensitivity_score_mean",
    "scaling_factor_mean", "dynamic_scaling_max", "low_var_kl_mean_selected", "low_var_kl_mean_rejected",
    "low_var_kl_threshold", "entropy_mean_selected", "entropy_mean_rejected", "entropy_threshold",
}  # fmt: skip


def in_verl(logs: Mapping[str, Any], processes: int = 1) -> dict[str, Any]:
    """Return what is logged under the names of verl; metrics that it has no name for keep theirs.

    `actor/pg_loss` is the whole loss where TRL logs no part of it; `perf/throughput` tokens per second and process;
    `timing_s/update_actor` passes and optimizer together.

    Args:
        processes: of the run.
    """
    found: dict[str, Any] = {}
    for name, value in logs.items():
        for other in _names(name):
            if other == name or other not in logs:
                found[other] = value
    if "loss" in logs:
        found.setdefault("actor/pg_loss", logs["loss"])
    if "perf/tokens_per_second" in logs:
        found["perf/throughput"] = logs["perf/tokens_per_second"] / processes
    if seconds := [found.pop(name) for name in ("timing/update", "timing/optimizer") if name in found]:
        found["timing_s/update_actor"] = sum(seconds)
    return found


def _names(name: str) -> tuple[str, ...]:
    if name in VERL:
        return VERL[name]
    if name in _OF_ACTOR:
        return (f"actor/{name}",)
    evaluated, plain = name.startswith("eval_"), name.removeprefix("eval_")
    if plain.startswith("rewards/") and plain.endswith("/mean"):
        reward = plain.removeprefix("rewards/").removesuffix("/mean")
        return (f"val/{reward}_reward" if evaluated else f"reward/{reward}",)
    if evaluated and plain.startswith("reward/"):
        return (f"val/{plain.removeprefix('reward/')}_reward",)
    if evaluated and plain.startswith("completions/") and plain in VERL:
        return tuple(f"val_{other}" for other in VERL[plain])
    return (name,)
