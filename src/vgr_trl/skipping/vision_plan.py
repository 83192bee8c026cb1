"""Where a trainer computes image features once per rollout, where it does not, and why."""

from dataclasses import dataclass
from typing import Any

from vgr_trl.sharing.backbone import base_of, causal_model, is_compiled
from vgr_trl.skipping.vision_tower import parts_of_tower, tower_draws, tower_trains

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


def plan_vision(trainer: Any, has_images: bool) -> VisionPlan:
    """Return where the constructed `trainer` computes image features once.

    Args:
        trainer: of TRL.
        has_images: whether its data have any.
    """
    args = trainer.args
    base = base_of(causal_model(trainer.model))
    reason = _why_not(trainer, base) if has_images else "data without images"
    trains = reason is None and tower_trains(base)
    return VisionPlan(args.vision_cache_megabytes, reason, trains, lasts=not trains and args.replay_buffer_size > 0)


def _why_not(trainer: Any, base: Any) -> str | None:
    if trainer.args.vision_cache_megabytes == 0:
        return "switched off"
    if trainer.accelerator.state.dynamo_plugin.backend.value != "NO" or is_compiled(trainer.model):
        return "torch.compile"
    if _is_sharded(trainer):
        return "sharded parameters: every process has to call the vision tower equally often"
    return why_not_once(base)


def why_not_once(base: Any) -> str | None:
    """Why the image features of a base model cannot be computed apart from its passes; None if they can."""
    if base.config.model_type not in FAMILIES or not hasattr(base, "get_image_features") or not parts_of_tower(base):
        return f"not tested with models of the type {base.config.model_type}"
    return "dropout in the vision tower" if tower_draws(base) else None


def _is_sharded(trainer: Any) -> bool:
    plugin = trainer.args.deepspeed_plugin if trainer.is_deepspeed_enabled else None
    return bool(trainer.is_fsdp_enabled or (plugin is not None and plugin.zero_stage == 3))
