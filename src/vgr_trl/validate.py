"""What does not go together, told before the first step: options, passes, and TRL's private names."""

from collections.abc import Iterator
from importlib.metadata import version
from itertools import chain
from typing import Any

import torch
from packaging.version import Version
from peft import PeftModel
from torch import nn
from transformers import GenerationConfig
from trl.trainer import utils

from vgr_trl.config import SWITCHES
from vgr_trl.dapo_config import DAPOConfig
from vgr_trl.efficiency.loss_mask import why_padding_counts
from vgr_trl.efficiency.vision_cache import VisionCache, parts_of_tower, tower_trains, why_not_once
from vgr_trl.forward_passes import DummyImage
from vgr_trl.measure import Measurement
from vgr_trl.rollout import ConstructedTrainer
from vgr_trl.sampling import filter_index
from vgr_trl.sharing.model_support import (
    DROPS_CACHES,
    base_of,
    causal_model,
    checkpoints_drop_caches,
    has_active_dropout,
    is_compiled,
    recomputes_without_graph,
    why_adapter_reads_whole_rows,
    why_not_share,
)
from vgr_trl.sharing.prefix_forward import why_not_pack
from vgr_trl.utils import ConfigError, Feature, UnsupportedTRLError, release


def plan_features(trainer: ConstructedTrainer, measurement: Measurement) -> dict[str, Feature]:
    """Return what the `trainer` computes once and leaves out, or why not, by its options, its loss and its model."""
    args, model = trainer.args, trainer.model
    causal = causal_model(model)
    base = base_of(causal)
    off = {name: f"{name}=off" if getattr(args, name) == "off" else None for name in ("share_prompts", *SWITCHES)}
    columns = _why_columns_count(trainer)
    compiles = "torch.compile" if _compiles(trainer) else None
    compiled = compiles or ("torch.compile" if is_compiled(model) else None)
    headless = "a model that is its own base" if base is causal else None
    router = "the load-balancing loss reads all tokens" if trainer.aux_loss_enabled else None
    option = what_reads_every_token(args)
    read = compiled or router or (option and f"{option} reads all tokens")
    unshared = off["share_prompts"] or columns
    training = unshared or compiles or _why_not_train(trainer) or why_not_share(model, gradients=True)
    alone = "training does not share prompts" if training else None
    tokens = off["skip_zero_advantage_tokens"]
    reasons = {
        "share_generation": unshared or _why_not_generate(trainer) or why_not_share(model, gradients=False),
        "share_scoring": unshared or compiles or why_not_share(model, gradients=False),
        "share_training": training,
        "regroup": alone or (None if args.share_prompts == "on" else _why_order_counts(trainer)),
        "skip_zero_advantage": off["skip_zero_advantage"] or read,
        "skip_zero_advantage_tokens": tokens or read or headless or _why_completions_are_read(trainer),
        "skip_padding": off["skip_padding"] or compiled or router or columns or why_padding_counts(base),
        "skip_head": tokens or compiled or headless,
        "skip_images": _why_images_run(trainer, base),
        "pack_completions": off["pack_completions"] or alone or _why_not_pack(trainer, base),
        "group_by_length": off["group_by_length"] or _why_not_by_length(trainer),
        "reuse_first_pass": off["reuse_first_pass"] or _why_old_logps_are_scored(trainer, measurement),
    }
    return {name: Feature(reason) for name, reason in reasons.items()}


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


def what_reads_every_token(args: DAPOConfig) -> str | None:
    """Return the option by which tokens that have no advantage are trained on too, a term of the loss or a critic."""
    terms = {
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
    return next((name for name, is_on in terms.items() if is_on), None)


def plan_dummy_image(trainer: ConstructedTrainer, has_images: bool) -> DummyImage | None:
    """Return what takes part in the vision tower where only other processes have images; None: nothing need."""
    base = base_of(causal_model(trainer.model))
    processor = getattr(trainer.processing_class, "image_processor", None)
    alone = trainer.accelerator.num_processes == 1 or not (has_images and trainer._is_vlm)
    if alone or processor is None or not hasattr(base, "get_image_features") or _compiles(trainer):
        return None
    return DummyImage(processor, trainer.accelerator, is_sharded(trainer))


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
    if is_sharded(trainer):
        return "sharded parameters: every process has to call the vision tower equally often"
    return why_not_once(base)


def _why_not_pack(trainer: ConstructedTrainer, base: nn.Module) -> str | None:
    """Why completions do not pass behind their prompts without padding; None if they do."""
    return why_not_pack(base) or ("FSDP" if trainer.is_fsdp_enabled else None) or why_padding_counts(base)


def _why_images_run(trainer: ConstructedTrainer, base: nn.Module) -> str | None:
    """Why images run in every pass that is given some, read or not; None if those that are not read need not."""
    if is_sharded(trainer):
        return "sharded parameters"
    if not parts_of_tower(base):
        return "a model without a vision tower"
    return "the vision tower trains" if tower_trains(base) else None


def _why_order_counts(trainer: ConstructedTrainer) -> str | None:
    """Why completions of a prompt cannot come together without a change of the optimizer step; None if they can."""
    if reason := why_rows_matter(trainer, trainer.loss_type):
        return reason
    spread = trainer.args.gradient_accumulation_steps % (trainer.args.steps_per_generation or 1)
    return "a rollout is spread over several optimizer steps" if spread else None


def _why_not_by_length(trainer: ConstructedTrainer) -> str | None:
    """Why which rows share a micro-batch changes an optimizer step; None if it does not."""
    accumulated, generated = trainer.args.gradient_accumulation_steps, trainer.args.steps_per_generation or 1
    if accumulated % generated and generated % accumulated:
        return "optimizer steps begin within a rollout"
    return why_rows_matter(trainer, trainer.loss_type)


# Losses that divide by something that does not depend on which rows share a micro-batch (read in TRL 1.16, and tested).
_REGROUPABLE_LOSSES = {"dapo", "cispo", "vespo", "grpo", "sapo", "dr_grpo", "luspo"}


def why_rows_matter(trainer: ConstructedTrainer, loss_type: str) -> str | None:
    """Why a loss depends on which rows share a micro-batch; None if it does not."""
    if loss_type not in _REGROUPABLE_LOSSES:
        return f"the loss {loss_type} divides by the tokens of a micro-batch"
    if trainer._entropy_bonus_enabled:
        return "the entropy term is a mean over the tokens of a micro-batch"
    if trainer.top_entropy_quantile < 1.0:
        return "top_entropy_quantile is taken over the tokens of a micro-batch"
    return "the load-balancing loss is taken over the tokens of a micro-batch" if trainer.aux_loss_enabled else None


def _why_old_logps_are_scored(trainer: ConstructedTrainer, measurement: Measurement) -> str | None:
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
    for need in ("entropies", "dependency", "logps", "shift", "values"):
        if need in measurement.needed:
            return f"{measurement.needed[need]} needs the pass anyway"
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


def _compiles(trainer: ConstructedTrainer) -> bool:
    return bool(trainer.accelerator.state.dynamo_plugin.backend.value != "NO")


def is_sharded(trainer: ConstructedTrainer) -> bool:
    """Whether a process has only parts of the parameters, under FSDP and ZeRO-3."""
    plugin = trainer.args.deepspeed_plugin if trainer.is_deepspeed_enabled else None
    return bool(trainer.is_fsdp_enabled or (plugin is not None and plugin.zero_stage == 3))


def refuse_unfit_options(trainer: ConstructedTrainer, sharded: bool, has_images: bool) -> None:
    """Raise `ConfigError` for the first option that does not go with a trainer, a `filter_key` without reward too."""
    sentences = chain(_of_choice(trainer), _of_generation(trainer), _of_shards(trainer, sharded), _of_makers(trainer),
                      _of_budget(trainer), _of_noise(trainer, has_images))  # fmt: skip
    if (sentence := next(sentences, None)) is not None:
        raise ConfigError(sentence)
    if trainer.args.online_filtering:
        filter_index(trainer.args.filter_key, trainer.reward_func_names)


def _of_choice(trainer: ConstructedTrainer) -> Iterator[str]:
    args = trainer.args
    if args.advantage_estimator != "grpo" and args.multi_objective_aggregation != "sum_then_normalize":
        yield (
            f"advantage_estimator is {args.advantage_estimator} with multi_objective_aggregation "
            f"{args.multi_objective_aggregation}: the estimators take weighted sums, so use sum_then_normalize."
        )
    if args.selects_groups and args.multi_objective_aggregation != "sum_then_normalize":
        yield (
            f"multi_objective_aggregation is {args.multi_objective_aggregation} with replay_buffer_size, "
            "dynamic_sampling or online_filtering, which find groups without a gradient by weighted sums: use "
            "sum_then_normalize, or drop them."
        )
    if args.advantage_estimator == "remax" and (trainer.use_vllm or trainer.use_transformers_continuous_batching):
        yield (
            "advantage_estimator is remax, whose greedy completions are generated by transformers: switch off vLLM and "
            "continuous batching, or use rloo."
        )


def _of_generation(trainer: ConstructedTrainer) -> Iterator[str]:
    if trainer.use_vllm:
        return
    usual = GenerationConfig()
    for name in trainer.args.generation_kwargs or {}:
        if not hasattr(usual, name):
            yield (
                f"generation_kwargs has {name}, which the generation of transformers does not know and leaves unread: "
                "give names of its GenerationConfig, or drop it."
            )


def _of_shards(trainer: ConstructedTrainer, sharded: bool) -> Iterator[str]:
    args = trainer.args
    if not sharded:
        return
    if args.kl_coef > 0 and args.kl_penalty == "full":
        yield (
            "kl_penalty is full with ZeRO-3 or FSDP, which do not gather the heads it runs again: use low_var_kl, or "
            "ZeRO-2."
        )
    if "shift" in args.readers():
        yield (
            f"{args.readers()['shift'][0]} compares whole distributions, which ZeRO-3 and FSDP do not gather the head "
            "for: use ZeRO-2, or a rule that reads the dependency."
        )
    if args.uses_critic and args.critic == "model":
        yield (
            "critic is model with ZeRO-3 or FSDP, of whose parameters no process has a whole copy: use critic head, or "
            "ZeRO-2."
        )


def _of_makers(trainer: ConstructedTrainer) -> Iterator[str]:
    """What makes completions otherwise than `generate` of the policy does."""
    args = trainer.args
    for name in ("rollout_func", "tools", "environment_factories"):
        given = name.removesuffix("_factories") if getattr(trainer, name, None) else None
        if given and args.selects_groups:
            yield (
                f"Groups cannot be replaced with {given}: drop it, or replay_buffer_size, dynamic_sampling and "
                "online_filtering."
            )
        if given and args.advantage_estimator == "remax":
            yield (
                f"advantage_estimator is remax with {given}, which would not generate greedily: drop it, or use rloo."
            )


def _of_budget(trainer: ConstructedTrainer) -> Iterator[str]:
    """A loss that is not the sum of those of parts; those of `bnpo` are weighed by their tokens."""
    most = trainer.args.max_tokens_per_micro_batch
    reason = why_rows_matter(trainer, "dapo" if trainer.loss_type == "bnpo" else trainer.loss_type)
    if trainer.args.uses_critic:
        reason = "a critic learns from whole micro-batches"
    if most is not None and reason is not None:
        yield (
            f"max_tokens_per_micro_batch is {most}, but {reason}: switch one of the two off, or lower "
            "per_device_train_batch_size instead."
        )


def _of_noise(trainer: ConstructedTrainer, has_images: bool) -> Iterator[str]:
    args, size = trainer.args, int(trainer.num_generations)
    if not args.noisy_generations:
        return
    if args.noisy_generations > size:
        yield f"noisy_generations is {args.noisy_generations} with num_generations {size}: give at most that many."
    measures = args.attention_source == "generate"
    corrects = trainer.use_vllm and trainer.vllm_importance_sampling_correction
    reasons = {
        "the data have no images; add some, or switch it off.": not has_images,
        "of rollout_func and tools; switch one of the two off.": trainer.rollout_func or trainer.tools,
        'attention_source is "generate", which would measure noise; use "scoring".': measures,
        "continuous batching shows no images; switch it off.": trainer.use_transformers_continuous_batching,
        "vllm_importance_sampling_correction would weigh perturbed against clean images; set it to False.": corrects,
    }
    yield from (f"noisy_generations cannot be used here: {why}" for why, is_so in reasons.items() if is_so)


def refuse_targets_without_module(model: PeftModel) -> None:
    """Raise `ConfigError` if an adapter names a target that is no module of the model, which PEFT passes over."""
    targets = getattr(next(iter(model.peft_config.values())), "target_modules", None)
    if isinstance(targets, str) or not targets:
        return
    adapted = getattr(model.base_model, "targeted_module_names", [])
    missing = sorted(target for target in targets if not any(_ends_with(name, target) for name in adapted))
    if missing:
        linear = {name.split(".")[-1] for name, module in model.named_modules() if hasattr(module, "in_features")}
        names = ", ".join(sorted(linear - {"base_layer", "default"}))
        raise ConfigError(
            f"No module of {type(model.get_base_model()).__name__} is named {' or '.join(missing)}, which the adapter "
            f"targets: give other names (linear modules are {names})."
        )


def _ends_with(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def check_head(device: torch.device, installed: str | None = None) -> None:
    """Raise `UnsupportedTRLError` where TRL's fused head cannot run: before 1.16 it is a Triton kernel and no more.

    Args:
        installed: version of TRL, that of the installed package by default.
    """
    kernel = getattr(utils, "_ChunkedLogProbFunction", None)
    of_trl = kernel is None or kernel.__module__.startswith("trl.")
    if release(installed) < Version("1.16") and of_trl and device.type not in ("cuda", "xpu"):
        raise UnsupportedTRLError(
            f"TRL {installed or version('trl')} scores by a Triton kernel, but the model is on {device.type}: train on "
            'a GPU, or pip install "trl>=1.16".'
        )
