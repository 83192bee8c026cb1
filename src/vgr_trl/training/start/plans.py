"""What passes of a run compute once, and what they leave out; where, and why not elsewhere."""

from typing import Any

from torch import nn

from vgr_trl.config.stages.skip import SWITCHES
from vgr_trl.sharing import Place, SharingPlan, has_active_dropout, why_not_regroup, why_not_share
from vgr_trl.sharing.backbone import (
    DROPS_CACHES,
    base_of,
    causal_model,
    checkpoints_drop_caches,
    is_compiled,
    recomputes_without_graph,
)
from vgr_trl.sharing.fitness import why_adapter_reads_whole_rows
from vgr_trl.sharing.packing import why_not_pack
from vgr_trl.signals import Wanted
from vgr_trl.skipping import SkippingPlan, VisionCache
from vgr_trl.skipping.plan import why_padding_counts
from vgr_trl.skipping.vision_cache import why_not_once
from vgr_trl.skipping.vision_tower import parts_of_tower, tower_trains
from vgr_trl.training.constructed import ConstructedTrainer
from vgr_trl.training.loss import what_reads_every_token
from vgr_trl.training.passes.blank_image import BlankImage


def plan_sharing(trainer: ConstructedTrainer) -> SharingPlan:
    """Return where the constructed `trainer` shares prompts, by its option `share_prompts` and its model."""
    mode = trainer.args.share_prompts
    sharded = _is_sharded(trainer)
    regroup_reason = why_rows_matter(
        trainer,
        trainer.loss_type,
        steps_per_generation=trainer.args.steps_per_generation or 1,
        gradient_accumulation_steps=trainer.args.gradient_accumulation_steps,
    )
    model = trainer.model
    everywhere = "share_prompts=off" if mode == "off" else _why_columns_count(trainer)
    generation = everywhere or _why_not_generate(trainer) or why_not_share(model, gradients=False)
    compiled = "torch.compile" if _compiles(trainer) else None
    scoring = everywhere or compiled or why_not_share(model, gradients=False)
    training = everywhere or compiled or _why_not_train(trainer) or why_not_share(model, gradients=True)
    return SharingPlan(
        mode=mode,
        generation=Place(generation),
        scoring=Place(scoring),
        training=Place(training),
        regroup_reason=regroup_reason,
        regroups=training is None and (regroup_reason is None or mode == "on"),
        sharded=sharded,
        dropout=None in (generation, training) and has_active_dropout(model, when_training=True),
        in_order=bool(trainer.is_deepspeed_enabled),
    )


def _why_columns_count(trainer: ConstructedTrainer) -> str | None:
    """Why passes keep the columns that TRL gives them; None if they need not."""
    neftune = "the scale of NEFTune's noise depends on the columns" if trainer.args.neftune_noise_alpha else None
    return neftune or why_adapter_reads_whole_rows(trainer.model)


def _why_not_generate(trainer: ConstructedTrainer) -> str | None:
    if trainer.use_vllm:
        return "vLLM shares prompts itself"
    if trainer.use_transformers_continuous_batching:
        return "continuous batching"
    return "FSDP" if trainer.is_fsdp_enabled else None


def _why_not_train(trainer: ConstructedTrainer) -> str | None:
    """What only shows once the trainer has started: it wraps the model and switches checkpointing on later."""
    if trainer.args.gradient_checkpointing:
        options: Any = trainer.args.gradient_checkpointing_kwargs or {}
        reentrant = options.get("use_reentrant", False)
    else:
        reentrant = recomputes_without_graph(trainer.model, when_training=True)
    if reentrant:
        return "gradient checkpointing with use_reentrant=True"
    if trainer.args.gradient_checkpointing and checkpoints_drop_caches():
        return DROPS_CACHES
    if trainer.aux_loss_enabled:
        return "the load-balancing loss needs the router of every token"
    if trainer.is_fsdp_enabled and trainer.accelerator.state.fsdp_plugin.fsdp_version == 1:
        return "the first version of FSDP"
    return None


def plan_blank_image(trainer: ConstructedTrainer, has_images: bool) -> BlankImage | None:
    """Return what takes part in the vision tower where only other processes have images; None: nothing need."""
    base = base_of(causal_model(trainer.model))
    processor = getattr(trainer.processing_class, "image_processor", None)
    alone = trainer.accelerator.num_processes == 1 or not (has_images and trainer._is_vlm)
    if alone or processor is None or not hasattr(base, "get_image_features") or _compiles(trainer):
        return None
    return BlankImage(processor, trainer.accelerator, _is_sharded(trainer))


def plan_vision(trainer: ConstructedTrainer, has_images: bool) -> VisionCache:
    """Return the cache of the constructed `trainer`, off or on; `has_images`: whether its data have any."""
    base = base_of(causal_model(trainer.model))
    reason = _why_not_once(trainer, base) if has_images else "data without images"
    return VisionCache(base, trainer.args.vision_cache_megabytes, reason)


def _why_not_once(trainer: ConstructedTrainer, base: nn.Module) -> str | None:
    if trainer.args.vision_cache_megabytes == 0:
        return "switched off"
    if _compiles(trainer) or is_compiled(trainer.model):
        return "torch.compile"
    if _is_sharded(trainer):
        return "sharded parameters: every process has to call the vision tower equally often"
    return why_not_once(base)


def plan_skipping(trainer: ConstructedTrainer, wanted: Wanted, sharing: SharingPlan) -> SkippingPlan:
    """Return what the constructed `trainer` leaves out of its passes, by its options, its loss and its model."""
    causal = causal_model(trainer.model)
    base = base_of(causal)
    off = {name: _switched_off(trainer, name) for name in SWITCHES}
    accumulated, generated = trainer.args.gradient_accumulation_steps, trainer.args.steps_per_generation or 1
    compiled = "torch.compile" if _compiles(trainer) or is_compiled(trainer.model) else None
    router = "the load-balancing loss reads all tokens" if trainer.aux_loss_enabled else None
    option = what_reads_every_token(trainer.args)
    read = compiled or router or (option and f"{option} reads all tokens")
    headless = "a model that is its own base" if base is causal else None
    columns = _why_columns_count(trainer)
    return SkippingPlan(
        rows=Place(off["skip_dead_rows"] or read),
        tokens=Place(off["skip_dead_tokens"] or read or headless or _why_completions_are_read(trainer)),
        padding=Place(off["skip_padding"] or compiled or router or columns or why_padding_counts(base)),
        packing=Place(off["pack_completions"] or _why_not_pack(trainer, base, sharing)),
        head=(off["skip_dead_tokens"] or compiled or headless) is None,
        dealing=Place(off["deal_by_length"] or _why_not_deal(trainer)),
        old_logps=Place(off["reuse_first_pass"] or _why_old_logps_are_scored(trainer, wanted)),
        images=_is_sharded(trainer) or not parts_of_tower(base) or tower_trains(base),
        window=trainer.args.per_device_train_batch_size * min(accumulated, generated),
    )


def _why_not_pack(trainer: ConstructedTrainer, base: nn.Module, sharing: SharingPlan) -> str | None:
    """Why completions do not pass behind their prompts without padding; None if they do."""
    if sharing.training.reason_off is not None:
        return "training does not share prompts"
    return why_not_pack(base) or ("FSDP" if trainer.is_fsdp_enabled else None) or why_padding_counts(base)


def _why_not_deal(trainer: ConstructedTrainer) -> str | None:
    """Why which rows share a micro-batch changes an optimizer step; None if it does not."""
    accumulated, generated = trainer.args.gradient_accumulation_steps, trainer.args.steps_per_generation or 1
    if accumulated % generated and generated % accumulated:
        return "optimizer steps begin within a rollout"
    return why_rows_matter(trainer, trainer.loss_type)


def why_rows_matter(trainer: ConstructedTrainer, loss_type: str, **windows: int) -> str | None:
    """Why a loss depends on which rows share a micro-batch, in an optimizer step by default; None if it does not."""
    return why_not_regroup(
        loss_type=loss_type,
        entropy_bonus=trainer._entropy_bonus_enabled,
        top_entropy_quantile=trainer.top_entropy_quantile,
        router_loss=trainer.aux_loss_enabled,
        **windows,
    )


def _why_old_logps_are_scored(trainer: ConstructedTrainer, wanted: Wanted) -> str | None:
    """Why old log-probabilities cannot come from the first training pass; None if they can."""
    args = trainer.args
    accumulated, generated = args.gradient_accumulation_steps, args.steps_per_generation or 1
    if trainer.use_vllm and trainer.vllm_importance_sampling_correction:
        return "the correction of vLLM's sampling compares with them"
    if accumulated % (generated * args.num_iterations) == 0:
        return "the policy does not change between generation and loss: there are none"
    if accumulated % generated:
        return "a rollout is spread over several optimizer steps"
    if args.replay_buffer_size > 0:
        return "replay_buffer_size keeps them"
    if wanted.head or wanted.values:
        return f"{[*wanted.entropies, *wanted.dependency, *wanted.logps, *wanted.values][0]} needs the pass anyway"
    random = trainer.args.neftune_noise_alpha or has_active_dropout(trainer.model, when_training=True)
    return "dropout, or the noise of NEFTune" if random else None


def _why_completions_are_read(trainer: ConstructedTrainer) -> str | None:
    """Why the loss reads tokens without an advantage in completions that have one; None if it does not."""
    if trainer.importance_sampling_level == "sequence":
        return "importance_sampling_level is sequence, a ratio of whole completions"
    if trainer.loss_type == "vespo":
        return "vespo weighs by the ratio of whole completions"
    if trainer.off_policy_mask_threshold is not None:
        return "off_policy_mask_threshold compares whole completions"
    return None


def _switched_off(trainer: ConstructedTrainer, option: str) -> str | None:
    return f"{option}=off" if getattr(trainer.args, option) == "off" else None


def _compiles(trainer: ConstructedTrainer) -> bool:
    return bool(trainer.accelerator.state.dynamo_plugin.backend.value != "NO")


def _is_sharded(trainer: ConstructedTrainer) -> bool:
    plugin = trainer.args.deepspeed_plugin if trainer.is_deepspeed_enabled else None
    return bool(trainer.is_fsdp_enabled or (plugin is not None and plugin.zero_stage == 3))
