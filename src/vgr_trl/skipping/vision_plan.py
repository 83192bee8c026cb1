"""Where a trainer computes image features once per rollout, where it does not, and why."""

from dataclasses import dataclass
from typing import Any

from vgr_trl.skipping.vision_tower import parts_of_tower, tower_draws

# Families whose image features have been seen to be all that their decoders read of images (transformers 5.23, tested).
FAMILIES = frozenset({
    "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "glm4v", "gemma3", "llava", "llava_next",
    "internvl", "mistral3", "paligemma",
})  # fmt: skip


@dataclass(frozen=True)
class VisionPlan:
    """What `vision_cache_megabytes` comes to in a run; printed as the one line that says so.

    Attributes:
        megabytes: of features that are kept.
        reason_off: why features are computed in every pass; None: they are not.
        trains: whether training passes compute them, because tower or merger train.
        lasts: whether features outlive their rollout, because its rows may.
    """

    megabytes: int
    reason_off: str | None
    trains: bool = False
    lasts: bool = False

    def __str__(self) -> str:
        name = f"vision_cache_megabytes={self.megabytes}"
        if self.reason_off is not None:
            return f"{name}: image features in every pass ({self.reason_off})"
        passes = "generation and scoring; training passes compute them anew (the vision tower trains)"
        return f"{name}: image features once per rollout, for {passes if self.trains else 'all passes'}"


def why_not_once(base: Any) -> str | None:
    """Why the image features of a base model cannot be computed apart from its passes; None if they can."""
    if base.config.model_type not in FAMILIES or not hasattr(base, "get_image_features") or not parts_of_tower(base):
        return f"not tested with models of the type {base.config.model_type}"
    return "dropout in the vision tower" if tower_draws(base) else None
