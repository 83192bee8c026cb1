"""Plan what passes share and skip: one function per feature returns why it is off."""

from collections.abc import Mapping
from typing import Any

from accelerate.utils import broadcast_object_list
from transformers.utils import logging

from vgr_trl.config import SWITCHES
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
from vgr_trl.utils import Feature, describe_features

logger = logging.get_logger(__name__)


def plan_features(trainer: ConstructedTrainer) -> dict[str, Feature]:
    """Return what the passes of a constructed `trainer` share and skip, or why not, by name."""
    args, model, causal = trainer.args, trainer.model, causal_model(trainer.model)
    base = base_of(causal)
    off = {name: f"{name}=off" if getattr(args, name) == "off" else None for name in ("share_prompts", *SWITCHES)}
    noise = args.neftune_noise_alpha and "NEFTune's noise depends on the rows and columns of a pass"
    columns = noise or why_adapter_reads_whole_rows(model)
    compiles, compiled = _compiles(trainer) and "torch.compile", _is_compiled(trainer) and "torch.compile"
    tower_in_use = tower_trains(base) and trainer.dummy_image is None
    headless = base is causal and "a model that is its own base"
    router = trainer.aux_loss_enabled and "the load-balancing loss reads all tokens"
    term = find_every_token_option(args)
    every_token = compiled or router or (term and f"{term} reads all tokens")
    accumulated, generated = args.gradient_accumulation_steps, args.steps_per_generation or 1
    spread = accumulated % generated and "a rollout is spread over several optimizer steps"
    cut = spread and generated % accumulated and "optimizer steps begin within a rollout"
    rows = why_rows_matter(trainer, trainer.loss_type)
    unshared = off["share_prompts"] or columns
    untrained = unshared or compiles or _why_not_share_training(trainer)

    def why_padding_runs() -> Any:
        return compiled or columns or why_padding_counts(base)

    reasons: dict[str, Any] = {
        "share_generation": unshared
        or (trainer.use_vllm and "vLLM shares prompts itself")
        or (trainer.use_transformers_continuous_batching and "continuous batching")
        or (trainer.is_fsdp_enabled and "FSDP")
        or why_not_share(model, gradients=False),
        "share_scoring": unshared or compiles or why_not_share(model, gradients=False),
        "share_training": untrained,
        "regroup": (untrained and "training does not share prompts")
        or (args.share_prompts != "on" and (rows or spread)),
        "skip_zero_advantage": off["skip_zero_advantage"] or noise or every_token,
        "skip_zero_advantage_tokens": off["skip_zero_advantage_tokens"]
        or every_token
        or headless
        or (trainer.importance_sampling_level == "sequence" and "importance_sampling_level is sequence")
        or (trainer.loss_type == "vespo" and "vespo weighs by the ratio of whole completions")
        or (trainer.off_policy_mask_threshold is not None and "off_policy_mask_threshold compares whole completions"),
        "skip_padding": off["skip_padding"] or router or why_padding_runs(),
        "skip_head": off["skip_zero_advantage_tokens"] or compiled or headless,
        "skip_images": (is_sharded(trainer) and "sharded parameters")
        or (not parts_of_tower(base) and "a model without a vision tower")
        or (tower_in_use and "the vision tower trains, and cannot be called alone"),
        "pack_completions": off["pack_completions"]
        or (untrained and "training does not share prompts")
        or why_not_pack(base)
        or (trainer.is_fsdp_enabled and "FSDP")
        or why_padding_runs(),
        "group_by_length": off["group_by_length"] or noise or cut or rows,
        "reuse_first_pass": off["reuse_first_pass"] or _why_not_reuse_first_pass(trainer, spread),
    }
    (reasons,) = broadcast_object_list([reasons])  # FSDP may have loaded the weights in the main process alone
    return {name: Feature(reason or None) for name, reason in reasons.items()}


def _why_not_share_training(trainer: ConstructedTrainer) -> str | None:
    """Return why training passes cannot share prompts; wrapping and checkpointing come only in `train()`."""
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


def _why_not_reuse_first_pass(trainer: ConstructedTrainer, spread: Any) -> Any:
    """Return why old log-probabilities cannot come from the first training pass."""
    args, needed = trainer.args, trainer.measurement.needed
    if trainer.use_vllm and trainer.vllm_importance_sampling_correction:
        return "the correction of vLLM's sampling compares with them"
    if args.gradient_accumulation_steps % ((args.steps_per_generation or 1) * args.num_iterations) == 0:
        return "the policy does not change between generation and loss: there are none"
    if spread or args.replay_buffer_size > 0:
        return spread or "replay_buffer_size keeps them"
    for need in ("entropies", "dependency", "logps", "shift", "values"):
        if need in needed:
            return f"{needed[need]} needs the pass anyway"
    random = args.neftune_noise_alpha or has_active_dropout(trainer.model, when_training=True)
    return random and "dropout, or the noise of NEFTune"


def find_every_token_option(args: DAPOConfig) -> str | None:
    """Return the first option that puts loss on zero-advantage tokens: a term of the loss, or a critic."""
    terms = (
        *("beta", "entropy_coef", "use_adaptive_entropy", "use_entropy_penalty"),
        *("perception_loss_weight", "der_loss_weight1", "der_loss_weight2"),
    )
    options = {name: bool(getattr(args, name)) for name in terms}
    options |= {"top_entropy_quantile": args.top_entropy_quantile < 1, "kl_coef": args.has_kl_loss}
    options |= {"advantage_estimator": args.uses_critic}
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
    why: Any = (
        (not has_images and "data without images")
        or (megabytes == 0 and "switched off")
        or (_is_compiled(trainer) and "torch.compile")
        or (is_sharded(trainer) and "sharded parameters: every process has to call the vision tower equally often")
        or why_not_once(base)
    )
    return VisionCache(base, megabytes, why)


def _compiles(trainer: ConstructedTrainer) -> bool:
    return bool(trainer.accelerator.state.dynamo_plugin.backend.value != "NO")


def _is_compiled(trainer: ConstructedTrainer) -> bool:
    return _compiles(trainer) or is_compiled(trainer.model)


def is_sharded(trainer: ConstructedTrainer) -> bool:
    """Whether a process has only parts of the parameters, under FSDP and ZeRO-3."""
    plugin = trainer.args.deepspeed_plugin if trainer.is_deepspeed_enabled else None
    return bool(trainer.is_fsdp_enabled or (plugin is not None and plugin.zero_stage == 3))


def describe_sharing(features: Mapping[str, Feature], num_generations: int) -> str:
    """Return a sentence on where prompts are computed once, and why not elsewhere."""
    stages: dict[str | None, list[str]] = {}
    for stage in ("generation", "scoring", "training"):
        stages.setdefault(features[f"share_{stage}"].reason, []).append(stage)
    where = [
        f"in {', '.join(names)}" if reason is None else f"not in {', '.join(names)} ({reason})"
        for reason, names in stages.items()
    ]
    return f"Each prompt is computed once for its {num_generations} completions: {'; '.join(where)}."


def announce(trainer: ConstructedTrainer) -> None:
    """Log in the main process where prompts are shared, and which options have no effect."""
    if not trainer.accelerator.is_main_process:
        return
    features = trainer.features
    logger.warning(describe_sharing(features, trainer.num_generations))
    logger.info(describe_features(features))
    shared = features["share_generation"].enabled or features["share_training"].enabled
    if shared and has_active_dropout(trainer.model, when_training=True):
        logger.warning("Where prompts are shared, the completions of a prompt share the dropout drawn over it.")
    if trainer._is_vlm:
        logger.info(str(trainer.vision_cache))
    for name, why in trainer.idle_options.items():
        logger.warning(f"{name} is without effect because {why}.")
