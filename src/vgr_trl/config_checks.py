"""Options checked against each other: what contradicts, what steers nothing, and what TRL wants."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from types import NoneType
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from vgr_trl.options import LARGEST, SMALLEST, check_integer, check_number, is_number
from vgr_trl.utils import ConfigError

if TYPE_CHECKING:
    from vgr_trl.dapo_config import DAPOConfig


# ---------------------------------------------------------------------------------------------------------------------
# Options of different stages that do not go together.


_RATIO_LOSSES = ("dapo", "grpo", "dr_grpo", "bnpo", "sapo", "luspo")


def refuse_conflicts(options: "DAPOConfig") -> None:
    """Raise `ConfigError` for the first two that would undo one another, or of which one would be ignored."""
    _refuse_ignored_credit(options)
    _refuse_two_kinds_of_kl(options)
    _refuse_unfit_critic(options)


def _refuse_ignored_credit(options: "DAPOConfig") -> None:
    differs = options.shapes_tokens or options.uses_critic
    if options.importance_sampling_level == "sequence" and differs and options.loss_type in _RATIO_LOSSES:
        raise ConfigError(
            f"importance_sampling_level is sequence with loss_type {options.loss_type}: the gradient would ignore "
            "token weights and filters, and what a critic says of tokens, so use importance_sampling_level token, "
            "or loss_type cispo or vespo."
        )


def _refuse_unfit_critic(options: "DAPOConfig") -> None:
    if not options.uses_critic:
        return
    if options.critic_warmup > 0 and options.weight_decay > 0:
        raise ConfigError(
            f"critic_warmup is {options.critic_warmup} and weight_decay is {options.weight_decay}, which would move "
            "the policy meanwhile: give weight_decay 0, or no critic_warmup."
        )
    if options.torch_compile:
        raise ConfigError("advantage_estimator is gae with torch_compile, which hides what a critic reads: drop one.")


def _refuse_two_kinds_of_kl(options: "DAPOConfig") -> None:
    if options.kl_coef > 0 and options.beta > 0:
        raise ConfigError(
            f"kl_coef is {options.kl_coef} and beta is {options.beta}: give kl_coef, or beta (low_var_kl in the loss, "
            "as TRL has it)."
        )
    if options.penalises_kl and options.multi_objective_aggregation != "sum_then_normalize":
        raise ConfigError(
            f"multi_objective_aggregation is {options.multi_objective_aggregation} with a KL in the rewards, which it "
            "would divide by its deviation: use sum_then_normalize, or use_kl_loss."
        )


# ---------------------------------------------------------------------------------------------------------------------
# Options that were given but steer nothing, because what they belong to is off.


Reason = Callable[[Any], str | None]


def changed_options(args: Any) -> dict[str, Any]:
    """Return the options of a dataclass that differ from their defaults, by name."""
    return {
        option.name: getattr(args, option.name)
        for option in fields(args)
        if getattr(args, option.name) != _default(option)
    }


@dataclass(frozen=True)
class Circumstances:
    """What a run has besides its options: what is measured, whether reward weights change, and so on."""

    measures_attention: bool
    measures_similarity: bool
    answers_blindly: bool
    weights_change: bool
    evaluates: bool
    reward_names: Sequence[str]


def options_without_effect(args: Any, circumstances: Circumstances) -> dict[str, str]:
    """Return why each option that is not at its default has no effect in a run, by name."""
    changed = changed_options(args)
    rules = {name: reason for names, reason in _RULES.items() for name in names if name in changed}
    reasons = {name: why for name, reason in rules.items() if (why := reason(args))}
    reasons |= _circumstantial(circumstances)
    return {name: reasons[name] for name in changed if name in reasons}


def options_in_effect(args: Any, names: Collection[str]) -> dict[str, str]:
    """Return the `help` of the options that steer a run beyond its defaults, by name.

    Those are options that are not at their defaults, and behind them those that belong to one of them, whatever their
    value.
    """
    rules = {name: reason for names, reason in _RULES.items() for name in names}
    helps = {option.name: option.metadata["help"] for option in fields(args) if option.name in names}
    steering = {
        name for name in helps if getattr(args, name) is not None and (name not in rules or rules[name](args) is None)
    }
    changed = [name for name in helps if name in changed_options(args) and name in steering]
    belonging = [name for name in helps if name in rules and name in steering and name not in changed]
    return {name: helps[name] for name in (*changed, *belonging)}


def _circumstantial(given: Circumstances) -> dict[str, str]:
    """Reasons that lie in the rewards and the data."""
    found: dict[str, str] = {}
    if not given.measures_attention:
        names = ("attention_source", "attention_segments", "mdi_balance_ratio", "vision_token_ids")
        found |= dict.fromkeys(names, "attention is not measured")
    if not given.measures_similarity:
        of_similarity = ("hidden_similarity_layer", "hidden_similarity_over")
        found |= dict.fromkeys(of_similarity, "no reward, rule of credit or signal reads the similarity")
    if not given.answers_blindly:
        of_answers = ("blind_tag", "blind_without_tag", "blind_prompt")
        found |= dict.fromkeys(of_answers, "no reward reads blind answers")
    if not given.weights_change:
        found["early_reward_weights"] = "they equal reward_weights"
    if not given.evaluates:
        found |= dict.fromkeys(("eval_log_path", "eval_num_generations"), "there are no data to evaluate on")
    if not any("overlong" in name for name in given.reward_names):
        found["soft_punish_cache"] = "there is no length reward"
    return found


def _default(option: Field[Any]) -> Any:
    return option.default if option.default_factory is MISSING else option.default_factory()


def _off(option: str) -> Reason:
    return lambda args: None if getattr(args, option) else f"{option} is {getattr(args, option)!r}"


def _no_files(args: Any) -> str | None:
    return None if args.log_completions else _off("rollout_log_steps")(args)


def _no_soft_weights(args: Any) -> str | None:
    soft = args.enable_perception_filtering and args.perception_weighting == "soft"
    return None if args.token_weights or soft else "token_weights is False"


def _no_filter_share(args: Any) -> str | None:
    if args.enable_perception_filtering and args.perception_weighting == "soft":
        return "perception_weighting is soft, which keeps all tokens"
    return _off("enable_perception_filtering")(args)


def _no_perturbation(args: Any) -> str | None:
    return None if _scored(args) else "nothing is measured on perturbed images"


def _unscored_perturbation(args: Any) -> str | None:
    return _no_perturbation(args) or (
        None if args.perturbation in _scored(args) else f"images are perturbed by {' and '.join(sorted(_scored(args)))}"
    )


def _scored(args: Any) -> set[str]:
    """Perturbations that completions are scored under."""
    return {*args.read_views(args.needs_dependency), *([args.perturbation] if args.uses_perception_loss else [])}


def _no_decay(args: Any) -> str | None:
    return _off("noisy_generations")(args) or ("noisy_decay is none" if args.noisy_decay == "none" else None)


def _other_decay(*kinds: str) -> Reason:
    return lambda args: _no_decay(args) or (None if args.noisy_decay in kinds else f"noisy_decay is {args.noisy_decay}")


def _no_dependency(args: Any) -> str | None:
    return None if args.needs_dependency else "no rule of credit and no signal reads the dependency"


def _no_views(args: Any) -> str | None:
    return None if "views" in args.readers() else _no_dependency(args)


def _one_view(args: Any) -> str | None:
    return _no_dependency(args) or (None if args.further_perturbations else "there are no further_perturbations")


def _other_perturbation(*names: str) -> Reason:
    def reason(args: Any) -> str | None:
        made = _scored(args) | set(getattr(args, "noisy_perturbations", ()))
        if not made:
            return _no_perturbation(args)
        return None if made & set(names) else f"images are perturbed by {' and '.join(sorted(made))}"

    return reason


def _no_dead_groups(args: Any) -> str | None:
    if args.selects_groups or args.enable_trajectory_reweighting:
        return None
    return "replay_buffer_size, dynamic_sampling, online_filtering and enable_trajectory_reweighting are off"


def _other_loss(*losses: str) -> Reason:
    return lambda args: f"loss_type is {args.loss_type}" if args.loss_type in losses else None


def _loss_other_than(loss: str) -> Reason:
    return lambda args: None if args.loss_type == loss else f"loss_type is {args.loss_type}"


def _no_lower_clip(args: Any) -> str | None:
    unused = ("sapo", "vespo") if args.epsilon_high is None else ("cispo", "sapo", "vespo")
    return _other_loss(*unused)(args)


def _no_adaptive_kl(args: Any) -> str | None:
    return _off("kl_coef")(args) or (None if args.kl_type == "adaptive" else f"kl_type is {args.kl_type}")


def _never_dead(args: Any) -> str | None:
    if args.uses_critic and not args.online_filtering:
        return "advantage_estimator is gae, by which no group is dead, and online_filtering is False"
    return None


def _no_scale(args: Any) -> str | None:
    return None if args.advantage_estimator == "grpo" else f"advantage_estimator is {args.advantage_estimator}"


def _no_critic(args: Any) -> str | None:
    return None if args.uses_critic else f"advantage_estimator is {args.advantage_estimator}"


def _no_markdown(args: Any) -> str | None:
    paths = (args.rollout_log_path, args.eval_log_path, args.attention_diag_log_path, args.token_weights_log_path)
    return None if any(paths) or args.markdown_logs else "no Markdown log is written"


_RULES: dict[tuple[str, ...], Reason] = {
    ("filter_key", "filter_mode", "filter_low", "filter_high"): _off("online_filtering"),
    ("filter_min_reward", "replay_max_age"): _off("replay_buffer_size"),
    ("replay_var_epsilon",): _no_dead_groups,
    ("dynamic_sampling_max_rounds",): _off("dynamic_sampling"),
    ("token_weights_topk_ratio", "token_weights_smooth_sigma", "token_weights_last_k_layers",
     "token_weights_positive_only"): _off("token_weights"),
    ("token_weights_clip",): _no_soft_weights,
    ("perception_weighting",): _off("enable_perception_filtering"),
    ("top_p_perception_tokens",): _no_filter_share,
    ("top_p_entropy_tokens",): _off("enable_entropy_filtering"),
    ("trajectory_scaling_min",): _off("enable_trajectory_reweighting"),
    ("entropy_penalty_coef",): _off("use_entropy_penalty"),
    ("use_bias_correction_kl",): _off("beta"),
    ("scale_rewards",): _no_scale,
    ("dynamic_sampling",): _never_dead,
    ("gamma", "lam", "critic", "critic_learning_rate", "critic_warmup_steps", "critic_warmup",
     "cliprange_value"): _no_critic,
    ("vllm_mode", "vllm_model_impl", "vllm_enable_sleep_mode", "vllm_structured_outputs_regex", "vllm_server_base_url",
     "vllm_server_host", "vllm_server_port", "vllm_server_timeout", "vllm_group_port", "vllm_gpu_memory_utilization",
     "vllm_max_model_length", "vllm_tensor_parallel_size", "vllm_importance_sampling_correction",
     "vllm_importance_sampling_mode", "vllm_importance_sampling_clip_min",
     "vllm_importance_sampling_clip_max"): _off("use_vllm"),
    ("ref_model_sync_steps", "ref_model_mixup_alpha"): _off("sync_ref_model"),
    ("entropy_target", "entropy_coef_min", "entropy_coef_max", "entropy_coef_delta"): _off("use_adaptive_entropy"),
    ("num_completions_to_print", "log_unique_prompts"): _off("log_completions"),
    ("sapo_temperature_neg", "sapo_temperature_pos"): _loss_other_than("sapo"),
    ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"): _loss_other_than("vespo"),
    ("kl_penalty", "use_kl_loss", "kl_type"): _off("kl_coef"),
    ("kl_target", "kl_horizon"): _no_adaptive_kl,
    ("perturbation",): _unscored_perturbation,
    ("perturb_per",): _no_perturbation,
    ("further_perturbations",): _no_views,
    ("dependency_over",): _one_view,
    ("patch_size",): _other_perturbation("blacken_patches", "shuffle_patches"),
    ("black_prob",): _other_perturbation("blacken_patches"),
    ("diffusion_steps",): _other_perturbation("diffusion_noise"),
    ("noisy_perturbation", "noisy_importance", "noisy_decay"): _off("noisy_generations"),
    ("noisy_decay_of",): _no_decay,
    ("noisy_decay_coef",): _other_decay("power", "exponential", "sigmoid"),
    ("noisy_decay_midpoint",): _other_decay("sigmoid"),
    ("crop_share",): _other_perturbation("crop_image"),
    ("noise_std",): _other_perturbation("add_gaussian_noise"),
    ("blur_radius",): _other_perturbation("gaussian_blur"),
    ("mask_value",): _other_perturbation("mask_image"),
    ("rollout_log_samples",): _off("rollout_log_steps"),
    ("rollout_log_max_megabytes",): _no_files,
    ("realtime_rollout_logging", "prompt_preview_length", "completion_preview_length"): _no_markdown,
    ("epsilon",): _no_lower_clip,
    ("epsilon_high",): _other_loss("sapo", "vespo"),
    ("delta",): _other_loss("cispo", "sapo", "vespo"),
}  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# Ranges of the options of TRL and transformers, which these check late, or not at all.


_WHOLE_NUMBERS_OF_TRL = (
    "max_prompt_length", "max_completion_length", "num_generations_eval", "num_iterations", "steps_per_generation",
    "per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps",
)  # fmt: skip
_NUMBERS = {int: "an integer", float: "a number"}
_RANGES_OF_TRL = {
    "beta": (0, LARGEST, "of at least 0"),
    "epsilon": (0, LARGEST, "of at least 0"),
    "epsilon_high": (0, LARGEST, "of at least 0"),
    "delta": (0, LARGEST, "above 1 + epsilon_high"),
    "learning_rate": (0, LARGEST, "of at least 0"),
    "temperature": (SMALLEST, LARGEST, "above 0"),
    "top_p": (1e-9, 1, "in (0, 1]"),
    "min_p": (0, 1, "in [0, 1]"),
    "repetition_penalty": (1e-9, LARGEST, "above 0"),
    "weight_decay": (0, LARGEST, "of at least 0"),
    "max_grad_norm": (0, LARGEST, "of at least 0, where 0 clips nothing"),
    "adam_beta1": (0, 1 - 1e-9, "in [0, 1)"),
    "adam_beta2": (0, 1 - 1e-9, "in [0, 1)"),
    "adam_epsilon": (0, LARGEST, "of at least 0"),
    "top_k": (0, LARGEST, "of at least 0, where 0 keeps all tokens"),
}


def check_options_of_trl(options: "DAPOConfig") -> None:
    """Raise `ConfigError` for options of TRL's or transformers' that are out of range, or None though they may not."""
    hints = get_type_hints(type(options), include_extras=True)
    left_open = {name for name, hint in hints.items() if getattr(options, name) is None and NoneType in get_args(hint)}
    for name in _WHOLE_NUMBERS_OF_TRL:
        if name not in left_open:
            check_integer(name, getattr(options, name), 1)
    check_integer("num_generations", options.num_generations, 2)
    for name in (f"{what}_steps" for what in ("save", "eval") if getattr(options, f"{what}_strategy") == "steps"):
        if (value := getattr(options, name)) is not None and not (is_number(value) and value > 0):
            raise ConfigError(f"{name} is {value!r}: give a number above 0, or {name[:4]}_strategy no.")
    for name, (low, high, meaning) in _RANGES_OF_TRL.items():
        if name not in left_open:
            check_number(name, getattr(options, name), low, high, meaning)
    for field in fields(options):
        if getattr(options, field.name) is None and hints[field.name] in _NUMBERS and field.default is not None:
            raise ConfigError(
                f"{field.name} is None: give {_NUMBERS[hints[field.name]]}, or leave it out for its default, "
                f"{field.default}."
            )
    if options.output_dir is not None and not str(options.output_dir).strip():
        raise ConfigError("output_dir is empty: give a folder, or leave it out.")
    highest = 1 + (options.epsilon if options.epsilon_high is None else options.epsilon_high)
    reads_delta = options.loss_type not in ("cispo", "sapo", "vespo")
    if reads_delta and options.delta is not None and options.delta <= highest:
        raise ConfigError(
            f"delta (clip_ratio_dual) is {options.delta}, which would clip ratios of up to {highest:g}, those of "
            "tokens with positive advantage too: give a number above 1 + epsilon_high, such as 3.0."
        )
    if options.max_steps == 0 or (options.max_steps < 0 and options.num_train_epochs <= 0):
        raise ConfigError(
            f"max_steps is {options.max_steps} and num_train_epochs {options.num_train_epochs}, so nothing would be "
            "trained: give max_steps of at least 1, or more epochs."
        )
