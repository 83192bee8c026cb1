"""Plan what passes share and skip: one function per feature returns why it is off."""

from collections.abc import Mapping

from accelerate.utils import broadcast_object_list
from transformers.utils import logging

from vgr_trl.dapo_config import DAPOConfig
from vgr_trl.efficiency.vision_cache import VisionCache, parts_of_tower, tower_trains, why_not_once
from vgr_trl.forward_passes import DummyImage
from vgr_trl.rollout import ConstructedTrainer
from vgr_trl.sharing.model_support import (
    DROPS_CACHES,
    base_of,
    causal_model,
    checkpoints_drop_caches,
    has_active_dropout,
    is_compiled,
    recomputes_without_graph,
    why_adapter_reads_whole_rows,
)
from vgr_trl.sharing.prefix_forward import why_not_pack
from vgr_trl.sharing.probe import why_not_share, why_padding_counts
from vgr_trl.sharing.sharing import why_not_lend, why_not_static
from vgr_trl.utils import Feature, describe_features

logger = logging.get_logger(__name__)


def plan_features(trainer: ConstructedTrainer) -> dict[str, Feature]:
    """Return what the passes of a constructed `trainer` share and skip, or why not, by name."""
    reasons = {
        "share_generation": why_not_share_generation(trainer),
        "share_scoring": why_not_share_scoring(trainer),
        "share_training": why_not_share_training(trainer),
        "share_over_micro_batches": why_not_share_over_micro_batches(trainer),
        "regroup": why_not_regroup(trainer),
        "skip_zero_advantage": why_not_skip_zero_advantage(trainer),
        "skip_zero_advantage_tokens": why_not_skip_zero_advantage_tokens(trainer),
        "skip_padding": why_not_skip_padding(trainer),
        "skip_head": why_not_skip_head(trainer),
        "skip_images": why_not_skip_images(trainer),
        "pack_completions": why_not_pack_completions(trainer),
        "group_by_length": why_not_group_by_length(trainer),
        "reuse_first_pass": why_not_reuse_first_pass(trainer),
    }
    (reasons,) = broadcast_object_list([reasons])  # FSDP may have loaded the weights in the main process alone
    return {name: Feature(reason) for name, reason in reasons.items()}


def why_not_share_generation(trainer: ConstructedTrainer) -> str | None:
    """Return why completions are not generated from prompts computed once."""
    return (
        _why_no_pass_shares(trainer)
        or ("vLLM shares prompts itself" if trainer.use_vllm else None)
        or ("continuous batching" if trainer.use_transformers_continuous_batching else None)
        or ("FSDP" if trainer.is_fsdp_enabled else None)
        or (why_not_static(trainer.model.config) if trainer.args.cache_implementation == "static" else None)
        or why_not_share(trainer.model, gradients=False)
    )


def why_not_share_scoring(trainer: ConstructedTrainer) -> str | None:
    """Return why scoring passes do not share prompts."""
    return _why_no_pass_shares(trainer) or _why_compiles(trainer) or why_not_share(trainer.model, gradients=False)


def why_not_share_training(trainer: ConstructedTrainer) -> str | None:
    """Return why training passes do not share prompts; wrapping and checkpointing come only in `train()`."""
    if why := _why_no_pass_shares(trainer) or _why_compiles(trainer):
        return why
    checkpointing, options = trainer.args.gradient_checkpointing, trainer.args.gradient_checkpointing_kwargs
    if checkpointing:
        reentrant = isinstance(options, dict) and options.get("use_reentrant", False)
    else:
        reentrant = recomputes_without_graph(trainer.model, when_training=True)
    if reentrant:
        return "gradient checkpointing with use_reentrant=True"
    if checkpointing and checkpoints_drop_caches():
        return DROPS_CACHES
    if trainer.aux_loss_enabled:
        return "the load-balancing loss needs the router of every token"
    if trainer.is_fsdp_enabled and trainer.accelerator.state.fsdp_plugin.fsdp_version == 1:
        return "the first version of FSDP"
    return why_not_share(trainer.model, gradients=True)


def why_not_share_over_micro_batches(trainer: ConstructedTrainer) -> str | None:
    """Return why a prompt runs in each micro-batch of its group in training."""
    if why_not_share_training(trainer):
        return "training does not share prompts"
    if is_sharded(trainer):  # which FSDP does in `train()`
        return "sharded parameters"
    return why_not_lend(base_of(causal_model(trainer.model)))


def why_not_regroup(trainer: ConstructedTrainer) -> str | None:
    """Return why the completions of a prompt are not brought into one micro-batch."""
    if why_not_share_training(trainer):
        return "training does not share prompts"
    if trainer.args.share_prompts == "on":
        return None
    return why_rows_matter(trainer, trainer.loss_type) or _why_rollout_is_spread(trainer)


def why_not_skip_zero_advantage(trainer: ConstructedTrainer) -> str | None:
    """Return why completions without an advantage run in training."""
    return _why_off(trainer, "skip_zero_advantage") or _why_noise(trainer) or _why_all_tokens_are_read(trainer)


def why_not_skip_zero_advantage_tokens(trainer: ConstructedTrainer) -> str | None:
    """Return why tokens without an advantage are scored in training."""
    if why := (
        _why_off(trainer, "skip_zero_advantage_tokens") or _why_all_tokens_are_read(trainer) or _why_headless(trainer)
    ):
        return why
    if trainer.importance_sampling_level == "sequence":
        return "importance_sampling_level is sequence, a ratio of whole completions"
    if trainer.loss_type == "vespo":
        return "vespo weighs by the ratio of whole completions"
    if trainer.off_policy_mask_threshold is not None:
        return "off_policy_mask_threshold compares whole completions"
    return None


def why_not_skip_padding(trainer: ConstructedTrainer) -> str | None:
    """Return why columns of padding run in training."""
    router = "the load-balancing loss reads all tokens" if trainer.aux_loss_enabled else None
    return _why_off(trainer, "skip_padding") or router or _why_padding_runs(trainer)


def why_not_skip_head(trainer: ConstructedTrainer) -> str | None:
    """Return why tokens without loss go through the LM head in training."""
    return _why_off(trainer, "skip_zero_advantage_tokens") or _why_compiled(trainer) or _why_headless(trainer)


def why_not_skip_images(trainer: ConstructedTrainer) -> str | None:
    """Return why the images of a micro-batch without loss run."""
    base = base_of(causal_model(trainer.model))
    if is_sharded(trainer):
        return "sharded parameters"
    if not parts_of_tower(base):
        return "a model without a vision tower"
    if tower_trains(base) and trainer.dummy_image is None:
        return "the vision tower trains, and cannot be called alone"
    return None


def why_not_pack_completions(trainer: ConstructedTrainer) -> str | None:
    """Return why completions are not packed without padding behind their prompts."""
    if why := _why_off(trainer, "pack_completions"):
        return why
    if why_not_share_training(trainer):
        return "training does not share prompts"
    if why := why_not_pack(base_of(causal_model(trainer.model))):
        return why
    return "FSDP" if trainer.is_fsdp_enabled else _why_padding_runs(trainer)


def why_not_group_by_length(trainer: ConstructedTrainer) -> str | None:
    """Return why rows of similar length are not brought into one micro-batch."""
    accumulated, generated = trainer.args.gradient_accumulation_steps, trainer.args.steps_per_generation or 1
    cut = "optimizer steps begin within a rollout" if accumulated % generated and generated % accumulated else None
    why = _why_off(trainer, "group_by_length") or _why_noise(trainer) or cut
    return why or why_rows_matter(trainer, trainer.loss_type)


def why_not_reuse_first_pass(trainer: ConstructedTrainer) -> str | None:
    """Return why old log-probabilities do not come from the first training pass."""
    args, needed = trainer.args, trainer.measurement.needed
    if why := _why_off(trainer, "reuse_first_pass"):
        return why
    if trainer.use_vllm and trainer.vllm_importance_sampling_correction:
        return "the correction of vLLM's sampling compares with them"
    if args.gradient_accumulation_steps % ((args.steps_per_generation or 1) * args.num_iterations) == 0:
        return "there are none, as the policy does not change between generation and loss"
    if why := _why_rollout_is_spread(trainer):
        return why
    if args.replay_buffer_size > 0:
        return "replay_buffer_size keeps them"
    for need in ("entropies", "dependency", "logps", "shift", "values"):
        if need in needed:
            return f"{needed[need]} needs the pass anyway"
    random = args.neftune_noise_alpha or has_active_dropout(trainer.model, when_training=True)
    return "dropout, or the noise of NEFTune" if random else None


# Reasons that several features have


def _why_off(trainer: ConstructedTrainer, name: str) -> str | None:
    return f"{name}=off" if getattr(trainer.args, name) == "off" else None


def _why_noise(trainer: ConstructedTrainer) -> str | None:
    return "NEFTune's noise depends on the rows and columns of a pass" if trainer.args.neftune_noise_alpha else None


def _why_no_pass_shares(trainer: ConstructedTrainer) -> str | None:
    return _why_off(trainer, "share_prompts") or _why_columns_matter(trainer)


def _why_columns_matter(trainer: ConstructedTrainer) -> str | None:
    return _why_noise(trainer) or why_adapter_reads_whole_rows(trainer.model)


def _why_compiles(trainer: ConstructedTrainer) -> str | None:
    return "torch.compile" if _compiles(trainer) else None


def _why_compiled(trainer: ConstructedTrainer) -> str | None:
    return "torch.compile" if _compiles(trainer) or is_compiled(trainer.model) else None


def _why_headless(trainer: ConstructedTrainer) -> str | None:
    causal = causal_model(trainer.model)
    return "a model that is its own base" if base_of(causal) is causal else None


def _why_padding_runs(trainer: ConstructedTrainer) -> str | None:
    base = base_of(causal_model(trainer.model))
    return _why_compiled(trainer) or _why_columns_matter(trainer) or why_padding_counts(base)


def _why_all_tokens_are_read(trainer: ConstructedTrainer) -> str | None:
    if why := _why_compiled(trainer):
        return why
    if trainer.aux_loss_enabled:
        return "the load-balancing loss reads all tokens"
    option = find_every_token_option(trainer.args)
    return f"{option} reads all tokens" if option else None


def _why_rollout_is_spread(trainer: ConstructedTrainer) -> str | None:
    spread = trainer.args.gradient_accumulation_steps % (trainer.args.steps_per_generation or 1)
    return "a rollout is spread over several optimizer steps" if spread else None


def find_every_token_option(args: DAPOConfig) -> str | None:
    """Return the first option that puts loss on zero-advantage tokens: a term of the loss, or a critic."""
    options = {
        "beta": args.beta != 0,
        "entropy_coef": args.entropy_coef != 0,
        "use_adaptive_entropy": args.use_adaptive_entropy,
        "top_entropy_quantile": args.top_entropy_quantile < 1,
        "use_entropy_penalty": args.use_entropy_penalty,
        "perception_loss_weight": args.perception_loss_weight > 0,
        "der_loss_weight1": args.der_loss_weight1 > 0,
        "der_loss_weight2": args.der_loss_weight2 > 0,
        "kl_coef": args.has_kl_loss,
        "advantage_estimator": args.uses_critic,
    }
    return next((name for name, is_on in options.items() if is_on), None)


# Losses that divide by something that does not depend on which rows share a micro-batch (read in TRL 1.16, and tested).
_REGROUPABLE_LOSSES = {"dapo", "cispo", "vespo", "grpo", "sapo", "dr_grpo", "luspo"}


def why_rows_matter(trainer: ConstructedTrainer, loss_type: str) -> str | None:
    """Return why a loss depends on which rows share a micro-batch; None if it does not."""
    if loss_type not in _REGROUPABLE_LOSSES:
        return f"the loss {loss_type} divides by the tokens of a micro-batch"
    if trainer._entropy_bonus_enabled:
        return "the entropy term is a mean over the tokens of a micro-batch"
    if trainer.top_entropy_quantile < 1.0:
        return "top_entropy_quantile is taken over the tokens of a micro-batch"
    if trainer.aux_loss_enabled:
        return "the load-balancing loss is taken over the tokens of a micro-batch"
    return None


def plan_dummy_image(trainer: ConstructedTrainer, has_images: bool) -> DummyImage | None:
    """Return what takes part in the vision tower where no image of a process does; None: nothing need, or can."""
    base = base_of(causal_model(trainer.model))
    processor = getattr(trainer.processing_class, "image_processor", None)
    alone = trainer.accelerator.num_processes == 1 and not tower_trains(base)
    if alone or not (has_images and trainer._is_vlm) or processor is None or _compiles(trainer):
        return None
    if not hasattr(base, "get_image_features"):
        return None
    return DummyImage(processor, trainer.accelerator, is_sharded(trainer))


def plan_vision(trainer: ConstructedTrainer, has_images: bool) -> VisionCache:
    """Return the cache of image features of a constructed `trainer`, on or off.

    Args:
        has_images: whether its data have images.
    """
    base, megabytes = base_of(causal_model(trainer.model)), trainer.args.vision_cache_megabytes
    why = None
    if not has_images:
        why = "data without images"
    elif megabytes == 0:
        why = "switched off"
    elif _why_compiled(trainer):
        why = "torch.compile"
    elif is_sharded(trainer):
        why = "sharded parameters: every process has to call the vision tower equally often"
    return VisionCache(base, megabytes, why or why_not_once(base))


def _compiles(trainer: ConstructedTrainer) -> bool:
    return bool(trainer.accelerator.state.dynamo_plugin.backend.value != "NO")


def is_sharded(trainer: ConstructedTrainer) -> bool:
    """Whether a process has only parts of the parameters, under FSDP and ZeRO-3."""
    plugin = trainer.args.deepspeed_plugin if trainer.is_deepspeed_enabled else None
    return bool(trainer.is_fsdp_enabled or (plugin is not None and plugin.zero_stage == 3))


def describe_sharing(features: Mapping[str, Feature], num_generations: int, rows: int) -> str:
    """Return where prompts are computed once, and why not elsewhere, in one or two sentences.

    Args:
        rows: completions in a micro-batch.
    """
    stages: dict[str | None, list[str]] = {}
    for stage in ("generation", "scoring", "training"):
        stages.setdefault(features[f"share_{stage}"].reason, []).append(stage)
    where = [
        f"in {', '.join(names)}" if reason is None else f"not in {', '.join(names)} ({reason})"
        for reason, names in stages.items()
    ]
    sharing = f"Each prompt is computed once for its {num_generations} completions: {'; '.join(where)}."
    if rows >= num_generations or not features["share_training"].enabled:
        return sharing
    parts, over = f"{-(-num_generations // rows)} micro-batches of {rows}", features["share_over_micro_batches"]
    if over.enabled:
        return f"{sharing} In training, one pass over a prompt serves its {parts}."
    return f"{sharing} In training, it is computed in each of its {parts} ({over.reason})."


def warn_of_slow_generation(args: DAPOConfig, device: str) -> str | None:
    """Return what generation by transformers costs on a GPU as it comes; None where it is not used."""
    engine = args.use_vllm or args.use_transformers_continuous_batching
    if device != "cuda" or engine or args.cache_implementation is not None:
        return None
    return (
        "Kernel launches slow down generation by transformers: set use_vllm, or cache_implementation=static, "
        "with which a 7B on an H200 generated 128 tokens of 8 completions in 1.7 s instead of 5.1 s."
    )


def announce(trainer: ConstructedTrainer) -> None:
    """Log in the main process where prompts are shared, and which options have no effect."""
    if not trainer.accelerator.is_main_process:
        return
    features, rows = trainer.features, trainer.args.per_device_train_batch_size
    logger.warning(describe_sharing(features, trainer.num_generations, rows))
    logger.info(describe_features(features))
    if warning := warn_of_slow_generation(trainer.args, trainer.accelerator.device.type):
        logger.warning(warning)
    shared = features["share_generation"].enabled or features["share_training"].enabled
    if shared and has_active_dropout(trainer.model, when_training=True):
        logger.warning("Where prompts are shared, the completions of a prompt share the dropout drawn over it.")
    if trainer._is_vlm:
        logger.info(str(trainer.vision_cache))
    for name, why in trainer.idle_options.items():
        logger.warning(f"{name} has no effect: {why}.")
