"""Check options, rewards, model and adapter before the first generation."""

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from importlib.metadata import version
from inspect import signature
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from packaging.version import Version
from peft import PeftModel
from transformers import AutoProcessor, GenerationConfig, PreTrainedModel, ProcessorMixin
from transformers.integrations import get_available_reporting_integrations as trackers
from transformers.utils import is_torchvision_available, logging
from trl.trainer import utils

from vgr_trl.config import REMOVE_IMAGE
from vgr_trl.dapo_config import DAPOConfig
from vgr_trl.errors import ConfigError, UnsupportedTRLError, naming_torchvision, release
from vgr_trl.loss.kl import kl_penalty_reward
from vgr_trl.options import unused_options
from vgr_trl.pixels import TOKEN_TYPES
from vgr_trl.rewards.calling import RewardSchedule
from vgr_trl.rewards.functions import gather_groups, needed_columns, scale_by_accuracy
from vgr_trl.rewards.loading import is_reward_name, load_reward, replace_by_hard_negative
from vgr_trl.run import Run, RunFacts
from vgr_trl.sampling.zero_variance import filter_index
from vgr_trl.sharing.model_support import causal_model
from vgr_trl.validate.features import why_rows_matter

logger = logging.get_logger(__name__)


def validate_config(args: DAPOConfig | None, model: str | PreTrainedModel, options: Mapping[str, Any]) -> DAPOConfig:
    """Return the options of a trainer; raise `ConfigError` if they do not fit its other named arguments.

    TRL loads the model before the processor, so a processor that lacks torchvision is refused here.

    Args:
        args: options as given; None: the defaults, with an output folder named after the model.
        model: a loaded model, a folder or a hub name.
        options: other named arguments of the trainer; target modules of `peft_config` lose trailing commas.
    """
    if args is not None and not isinstance(args, DAPOConfig):
        raise ConfigError(f"args is a {type(args).__name__}: give a DAPOConfig, which takes the same options.")
    if isinstance(model, str) and options.get("processing_class") is None and not is_torchvision_available():
        with naming_torchvision(model), suppress(OSError, ValueError):
            AutoProcessor.from_pretrained(model, trust_remote_code=args is not None and args.trust_remote_code)
    targets = getattr(options.get("peft_config"), "target_modules", None)
    if isinstance(targets, set):  # TRL's own commands say --lora_target_modules "q_proj", "v_proj", comma included
        options["peft_config"].target_modules = {name.rstrip(",") for name in targets}
    if args is None:
        name = model if isinstance(model, str) else model.config._name_or_path
        return DAPOConfig(f"{name.rstrip('/').split('/')[-1]}-DAPO")
    if missing := {"mlflow", "swanlab", "tensorboard", "trackio", "wandb"} & {*(args.report_to or ())} - {*trackers()}:
        raise ConfigError(f"report_to names {min(missing)}, which is not available: pip install it, or give none.")
    if args.max_prompt_length is not None and options.get("environment_factory") is not None:
        raise ConfigError("max_prompt_length needs prompts of the data, but environment_factory makes them.")
    return args


def plan_rewards(
    reward_funcs: Any, args: DAPOConfig, num_generations: Callable[[], int]
) -> tuple[list[Any], RewardSchedule]:
    """Return the reward functions to pass to TRL, and the schedule of their weights.

    Rewards that compare the completions of a prompt are wrapped so that they read whole groups.

    Args:
        reward_funcs: None, one or several reward functions or names of rewards.
        num_generations: returns the number of completions per prompt of the current mode.
    """
    several = reward_funcs if isinstance(reward_funcs, list | tuple) else [reward_funcs]
    sizes: Any = {"max_completion_length": args.max_completion_length, "soft_punish_cache": args.soft_punish_cache}
    rewards = [load_reward(spec, **sizes) if is_reward_name(spec) else spec for spec in several if spec is not None]
    if args.vgr_hard_negative:
        rewards = replace_by_hard_negative(rewards)
    if args.attention_reward_scale == "accuracy":
        rewards = scale_by_accuracy(rewards)
    schedule = RewardSchedule.for_rewards(rewards, args.reward_weights, args.early_reward_weights)
    for index, reward in enumerate(rewards):
        if needed_columns(reward) is not None:
            rewards[index] = gather_groups(reward, gather_object, PartialState().process_index, num_generations)
    return rewards + [kl_penalty_reward] * args.penalises_kl, schedule


MAY_DIFFER_BY_PROCESS = {  # options that may differ between the processes of a run
    "local_rank", "output_dir", "logging_dir", "run_name", "rollout_log_path", "eval_log_path", "log_level",
    "log_level_replica", "disable_tqdm", "report_to", "dataloader_num_workers", "dataloader_prefetch_factor",
    "dataloader_pin_memory", "hub_token", "resume_from_checkpoint",
}  # fmt: skip


def refuse_differing_options(args: DAPOConfig) -> None:
    """Raise `ConfigError` on all processes if their options differ, because training would be silently wrong."""
    plain = (str, int, float, list, dict, type(None))
    options = {name: repr(value) for name, value in vars(args).items() if isinstance(value, plain) and name[0] != "_"}
    of_all = gather_object([{name: value for name, value in options.items() if name not in MAY_DIFFER_BY_PROCESS}])
    for name in of_all[0]:
        for number, others_options in enumerate(of_all):
            if others_options.get(name) != of_all[0][name]:
                values = f"{of_all[0][name]} in process 0 and {others_options.get(name)} in process {number}"
                raise ConfigError(f"{name} is {values}: give all processes the same options.")


def refuse_unfit_options(facts: RunFacts, views: Collection[str]) -> None:
    """Raise `ConfigError` for the first option that does not fit the rewards, the model, the data or the launch.

    Args:
        views: perturbations under which completions are scored.
    """
    args, estimator, maker = facts.args, facts.args.advantage_estimator, facts.completion_maker
    aggregation, batching = args.multi_objective_aggregation, args.use_transformers_continuous_batching
    if aggregation != "sum_then_normalize" and (estimator != "grpo" or args.selects_groups):  # these read weighted sums
        needed = "advantage_estimator grpo without replay_buffer_size, dynamic_sampling and online_filtering"
        raise ConfigError(f"multi_objective_aggregation is {aggregation}: use sum_then_normalize, or {needed}.")
    if estimator == "remax" and (maker or args.use_vllm or batching):
        engine = maker or ("vLLM" if args.use_vllm else "continuous batching")
        raise ConfigError(f"advantage_estimator is remax with {engine}, but needs transformers to generate: use rloo.")
    of_transformers = {} if args.use_vllm else args.generation_kwargs or {}
    if unknown := [name for name in of_transformers if name not in vars(GenerationConfig())]:
        raise ConfigError(f"generation_kwargs has {', '.join(unknown)}, which GenerationConfig of transformers lacks.")
    if facts.is_sharded and args.uses_critic and args.critic == "model":
        raise ConfigError("critic is model with ZeRO-3 or FSDP, but it needs whole parameters: use ZeRO-2, or head.")
    by_head = [*args.readers().get("shift", ()), *(["kl_penalty full"] if args.needs_full_kl else [])]
    by_head += [term for need, term in args.term_needs().items() if need == "teacher_top"]
    if facts.fsdp_version == 1 and by_head:
        raise ConfigError(f"{by_head[0]} with FSDP 1, but it needs the model's whole head: use fsdp_version 2.")
    if maker == "rollout_func" and args.selects_groups:
        raise ConfigError(f"replay_buffer_size, dynamic_sampling and online_filtering cannot be used with {maker}.")
    if REMOVE_IMAGE in views and maker:
        raise ConfigError(f"Images are perturbed by remove_image with {maker}, which may add images: use mask_image.")
    if args.perturb_images == "tools" and not facts.has_tools:
        raise ConfigError('perturb_images is "tools", but the run has none: give tools, or "all".')
    cuts = (args.most_rows_per_pass or args.per_device_train_batch_size) < args.per_device_train_batch_size
    if args.max_tokens_per_micro_batch is not None or cuts:
        # The losses of parts add up to the loss of a micro-batch; with bnpo, if parts are weighted by their tokens. The
        # loss of a critic does not count all tokens.
        weighs = args.loss_type == "bnpo" and not args.uses_critic
        if parts := why_rows_matter(facts, "dapo" if weighs else args.loss_type):
            name = "rows_per_pass" if cuts else "max_tokens_per_micro_batch"
            raise ConfigError(f"{name} cannot be used here ({parts}): drop one.")
    refuse_unfit_noise(facts)
    if args.online_filtering:
        filter_index(args.filter_key, list(facts.rewards))  # raises if no reward matches
    if args.distil_failed_only:
        filter_index(args.distil_failed_only, list(facts.rewards), "distil_failed_only")


def refuse_unfit_noise(facts: RunFacts) -> None:
    """Raise `ConfigError` if `noisy_generations` or `degraded_by` fits neither data nor tools nor generation."""
    args = facts.args
    if args.degraded_by and not facts.has_images:
        raise ConfigError(f"degraded_by is {args.degraded_by}, but the data have no images: leave it out.")
    vllm_corrects = args.use_vllm and args.vllm_importance_sampling_correction
    reasons = {
        "the data have no images": not facts.has_images,
        "rollout_func and tools generate otherwise": facts.completion_maker,
        'attention_source "generate" would measure the noise': args.attention_source == "generate",
        "vllm_importance_sampling_correction would compare perturbed with clean images": vllm_corrects,
    }
    for why, holds in reasons.items():
        if args.noisy_generations and holds:
            raise ConfigError(f"noisy_generations cannot be used here, because {why}: switch one of the two off.")


def refuse_targets_without_module(model: PeftModel) -> None:
    """Raise `ConfigError` if an adapter names a target that is no module of the model; PEFT ignores it."""
    targets = getattr(next(iter(model.peft_config.values())), "target_modules", None)
    if isinstance(targets, str) or not targets:
        return
    adapted: Any = model.base_model.targeted_module_names
    missing = sorted(target for target in targets if not any(f".{name}".endswith(f".{target}") for name in adapted))
    if missing:
        linear = {name.split(".")[-1] for name, module in model.named_modules() if hasattr(module, "in_features")}
        names = ", ".join(sorted(linear - {"base_layer", "default"}))
        name = type(model.get_base_model()).__name__
        raise ConfigError(f"No module of {name} is named {' or '.join(missing)}, but linear modules are {names}.")


def refuse_unfit_model(model: Any, processor: Any) -> None:
    """Raise `ConfigError` if no weight is trained, virtual tokens are lost, or token types and tokens have two sides.

    Args:
        processor: processor of the model, or its tokenizer.
    """
    # TRL copies a loaded adapter as its reference, and the copy is trainable.
    if not any(weight.requires_grad and ".ref." not in name for name, weight in model.named_parameters()):
        cure = "load the adapter with PeftModel.from_pretrained(…, is_trainable=True)"
        raise ConfigError(f"No weight of {type(model).__name__} requires a gradient: {cure}, or unfreeze the model.")
    # PEFT looks for the cache under its old name: virtual tokens are left out of `generate`, or put before each token.
    newer, older = version("transformers"), version("peft")
    differ = Version(newer) >= Version("5.24") and Version(older) <= Version("0.21.2")
    if differ and isinstance(model, PeftModel) and model.active_peft_config.is_prompt_learning:
        mismatch = f"transformers {newer} generates otherwise than peft {older} trains"
        raise ConfigError(f'{mismatch} virtual tokens: pip install "transformers<5.24", or train LoRA.')
    # The processor pads its token types on the right, and TRL the prompts on the left: positions are silently wrong.
    reads_types = any(name in signature(type(causal_model(model)).forward).parameters for name in TOKEN_TYPES)
    if reads_types and isinstance(processor, ProcessorMixin) and processor.tokenizer.padding_side != "left":
        name = type(processor).__name__
        raise ConfigError(f'{name} pads on the right: load it with from_pretrained(…, padding_side="left").')


def check_head(device: torch.device, installed: str | None = None) -> None:
    """Raise `UnsupportedTRLError` if TRL's fused head cannot run: before 1.16 it is only a Triton kernel.

    Args:
        installed: version of TRL; None: the installed version.
    """
    kernel = getattr(utils, "_ChunkedLogProbFunction", None)
    of_trl = kernel is None or kernel.__module__.startswith("trl.")
    if release(installed) < Version("1.16") and of_trl and device.type not in ("cuda", "xpu"):
        mismatch = f"TRL {installed or version('trl')} scores by a Triton kernel, but the model is on {device.type}"
        raise UnsupportedTRLError(f'{mismatch}: train on a GPU, or pip install "trl>=1.16".')


def find_idle_options(run: Run, changes_weights: bool, evaluates: bool) -> dict[str, str]:
    """Explain by name which options without their default value have no effect in a run.

    Args:
        run: options, rewards and measurements.
        changes_weights: whether the reward weights change during the run.
        evaluates: whether the run has evaluation data.
    """
    needed = run.measurement.needed
    present = {
        "attention": "attention" in needed,
        "similarity": "similarity" in needed,
        "blind_answers": "blind" in needed,
        "changing_weights": changes_weights,
        "evaluation": evaluates,
        "length_reward": any("overlong" in name for name in run.facts.rewards),
    }
    return unused_options(run.args, [name for name, holds in present.items() if not holds])
