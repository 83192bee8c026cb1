"""Names that MTRL, VPPO and verl have for keys of EasyR1, and defaults in which they differ from it."""

from typing import Any

from vgr_trl.config.foreign.keys import moot, only, read

SECTIONS = {"dataset": "data", "optimization": "algorithm", "training": "trainer"}  # of MTRL
THEIRS = ("data", "algorithm", "worker", "trainer", *SECTIONS, "actor_rollout_ref", "critic", "custom_reward_function")

NAMES = {
    # MTRL
    "algorithm.advantage_estimator": "algorithm.adv_estimator",
    "algorithm.disable_divergence": "algorithm.disable_kl",
    "algorithm.use_divergence_loss": "algorithm.use_kl_loss",
    "algorithm.divergence_penalty": "algorithm.kl_penalty",
    "algorithm.divergence_coef": "algorithm.kl_coef",
    "algorithm.divergence_type": "algorithm.kl_type",
    "algorithm.divergence_target": "algorithm.kl_target",
    "algorithm.divergence_horizon": "algorithm.kl_horizon",
    "worker.actor.optim.warmup_steps": "worker.actor.optim.lr_warmup_steps",
    "worker.actor.fsdp.mixed_precision_dtype": "worker.actor.fsdp.mp_param_dtype",
    "worker.actor.fsdp.cpu_offload": "worker.actor.fsdp.enable_cpu_offload",
    "worker.actor.fsdp.sharding_strategy": "worker.actor.fsdp.enable_full_shard",
    "worker.actor.model.lora_rank": "worker.actor.model.lora.rank",
    "worker.actor.model.lora_alpha": "worker.actor.model.lora.alpha",
    "worker.actor.model.lora_dropout": "worker.actor.model.lora.dropout",
    "worker.actor.model.lora_target_modules": "worker.actor.model.lora.target_modules",
    "worker.rollout.max_new_tokens": "data.max_response_length",
    "worker.reward.reward_fn_path": "worker.reward.reward_function",
    # VPPO
    "algorithm.use_vppo_on_entropy": "algorithm.enable_entropy_filtering",
    "algorithm.use_vppo_on_perception": "algorithm.enable_perception_filtering",
    "algorithm.use_advantage_shaping": "algorithm.enable_trajectory_reweighting",
    "algorithm.advantage_scaling_min": "algorithm.trajectory_scaling_min",
    "worker.actor.optim.warmup_style": "worker.actor.optim.lr_scheduler_type",
}

_ACTOR, _ROLLOUT, _MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
VERL: dict[str, tuple[str, Any]] = {  # verl's key -> EasyR1's, and verl's default
    "data.train_batch_size": ("data.rollout_batch_size", 1024),
    "algorithm.kl_ctrl.type": ("algorithm.kl_type", "fixed"),
    "algorithm.kl_ctrl.kl_coef": ("algorithm.kl_coef", 1e-3),
    "algorithm.kl_ctrl.horizon": ("algorithm.kl_horizon", 10000.0),
    "algorithm.kl_ctrl.target_kl": ("algorithm.kl_target", 0.1),
    f"{_ACTOR}.ppo_mini_batch_size": ("worker.actor.global_batch_size", 256),
    f"{_ACTOR}.ppo_micro_batch_size_per_gpu": ("worker.actor.micro_batch_size_per_device_for_update", 4),
    f"{_ACTOR}.ppo_epochs": ("worker.actor.ppo_epochs", 1),
    f"{_ACTOR}.clip_ratio_low": ("worker.actor.clip_ratio_low", 0.2),
    f"{_ACTOR}.clip_ratio_high": ("worker.actor.clip_ratio_high", 0.2),
    f"{_ACTOR}.clip_ratio_c": ("worker.actor.clip_ratio_dual", 3.0),
    f"{_ACTOR}.grad_clip": ("worker.actor.max_grad_norm", 1.0),
    f"{_ACTOR}.use_kl_loss": ("algorithm.use_kl_loss", False),
    f"{_ACTOR}.use_dynamic_bsz": ("worker.actor.dynamic_batching", False),
    f"{_ACTOR}.ulysses_sequence_parallel_size": ("worker.actor.ulysses_size", 1),
    f"{_ACTOR}.use_torch_compile": ("worker.actor.use_torch_compile", True),
    f"{_ACTOR}.strategy": ("worker.actor.strategy", "fsdp"),
    f"{_ACTOR}.freeze_vision_tower": ("worker.actor.model.freeze_vision_tower", False),
    f"{_ACTOR}.optim.lr": ("worker.actor.optim.lr", 1e-6),
    f"{_ACTOR}.optim.weight_decay": ("worker.actor.optim.weight_decay", 0.01),
    f"{_ACTOR}.optim.betas": ("worker.actor.optim.betas", (0.9, 0.999)),
    f"{_ACTOR}.optim.lr_scheduler_type": ("worker.actor.optim.lr_scheduler_type", "constant"),
    f"{_ACTOR}.optim.min_lr_ratio": ("worker.actor.optim.min_lr_ratio", 0.0),
    f"{_ACTOR}.optim.lr_warmup_steps_ratio": ("worker.actor.optim.lr_warmup_ratio", 0.0),
    f"{_ACTOR}.fsdp_config.param_offload": ("worker.actor.offload.offload_params", False),
    f"{_ACTOR}.fsdp_config.optimizer_offload": ("worker.actor.offload.offload_optimizer", False),
    f"{_ACTOR}.fsdp_config.fsdp_size": ("worker.actor.fsdp.fsdp_size", -1),
    "actor_rollout_ref.ref.fsdp_config.param_offload": ("worker.ref.offload.offload_params", False),
    f"{_MODEL}.path": ("worker.actor.model.model_path", None),
    f"{_MODEL}.trust_remote_code": ("worker.actor.model.trust_remote_code", False),
    f"{_MODEL}.enable_gradient_checkpointing": ("worker.actor.model.enable_gradient_checkpointing", True),
    f"{_MODEL}.use_remove_padding": ("worker.actor.padding_free", True),
    f"{_MODEL}.lora_rank": ("worker.actor.model.lora.rank", 0),
    f"{_MODEL}.lora_alpha": ("worker.actor.model.lora.alpha", 16),
    f"{_MODEL}.target_modules": ("worker.actor.model.lora.target_modules", "all-linear"),
    f"{_MODEL}.exclude_modules": ("worker.actor.model.lora.exclude_modules", None),
    f"{_ROLLOUT}.name": ("worker.rollout.name", "vllm"),
    f"{_ROLLOUT}.n": ("worker.rollout.n", 1),
    f"{_ROLLOUT}.temperature": ("worker.rollout.temperature", 1.0),
    f"{_ROLLOUT}.top_p": ("worker.rollout.top_p", 1.0),
    f"{_ROLLOUT}.top_k": ("worker.rollout.top_k", -1),
    f"{_ROLLOUT}.gpu_memory_utilization": ("worker.rollout.gpu_memory_utilization", 0.5),
    f"{_ROLLOUT}.tensor_model_parallel_size": ("worker.rollout.tensor_parallel_size", 2),
    f"{_ROLLOUT}.max_model_len": ("worker.rollout.max_model_len", None),
    f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu": ("worker.actor.micro_batch_size_per_device_for_experience", None),
    f"{_ROLLOUT}.enforce_eager": ("worker.rollout.enforce_eager", False),
    f"{_ROLLOUT}.enable_chunked_prefill": ("worker.rollout.enable_chunked_prefill", True),
    f"{_ROLLOUT}.enable_prefix_caching": ("worker.rollout.enable_prefix_caching", True),
    f"{_ROLLOUT}.ignore_eos": ("worker.rollout.ignore_eos", False),
    f"{_ROLLOUT}.val_kwargs": ("worker.rollout.val_override_config", {}),
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": (
        "worker.ref.micro_batch_size_per_device_for_experience", None,
    ),
    "trainer.total_training_steps": ("trainer.max_steps", None),
    "trainer.test_freq": ("trainer.val_freq", -1),
    "trainer.log_val_generations": ("trainer.val_generations_to_log", 0),
    "trainer.default_local_dir": ("trainer.save_checkpoint_path", None),
    "trainer.max_actor_ckpt_to_keep": ("trainer.save_limit", -1),
    "trainer.resume_from_path": ("trainer.load_checkpoint_path", None),
    "critic.cliprange_value": ("worker.critic.cliprange_value", 0.5),
    "critic.optim.lr": ("worker.critic.optim.lr", 1e-5),
}  # fmt: skip
VERL_DEFAULTS = {  # keys of the same name, another default
    "data.min_pixels": None,
    "data.max_pixels": None,
    "algorithm.adv_estimator": "gae",
    "trainer.total_epochs": 30,
    "trainer.project_name": "verl_examples",
    "trainer.experiment_name": "gsm8k",
}
_REWARD = "reward functions of verl take (data_source, solution_str, …); write one for --reward_funcs"
VERL_KEYS = {  # which EasyR1 has not
    "algorithm.use_kl_in_reward": read(False),
    "algorithm.norm_adv_by_std_in_grpo": only(True, "scale_rewards none is the option for it"),
    f"{_ACTOR}.kl_loss_coef": read(1e-3),
    f"{_ACTOR}.kl_loss_type": read("low_var_kl"),
    f"{_ACTOR}.loss_agg_mode": read("token-mean"),
    f"{_ACTOR}.policy_loss.loss_mode": read("vanilla"),
    f"{_ACTOR}.entropy_coeff": only(0, "entropy_coef and entropy_penalty_coef are other terms"),
    f"{_ACTOR}.clip_ratio": moot(0.2, "clip_ratio_low and clip_ratio_high hold"),
    f"{_MODEL}.use_shm": moot(False, "changes no result"),
    "data.truncation": moot("error", "prompts that are too long are left out"),
    "custom_reward_function.path": only(None, _REWARD),
    "custom_reward_function.name": moot("compute_score", _REWARD),
    "trainer.resume_mode": only("auto", "load_checkpoint_path and find_last_checkpoint say it"),
    "trainer.device": moot("cuda", "use_cpu says it"),
    "trainer.balance_batch": moot(True, "changes no result"),
}
_MODES = {"token-mean": "token", "seq-mean-token-mean": "seq", "vanilla": "default"}


def of_mtrl(key: str) -> str:
    """Return the name that a key of MTRL or VPPO has in EasyR1."""
    section, dot, rest = key.partition(".")
    key = f"{SECTIONS.get(section, section)}{dot}{rest}"
    return NAMES.get(key, key)


def of_verl(stated: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return values of EasyR1's keys, verl's defaults among them, and the key of verl that each one comes from."""
    found = dict(VERL_DEFAULTS)
    names: dict[str, str] = {}
    for key, (theirs, default) in VERL.items():
        found[theirs], names[theirs] = stated.get(key, default), key
    found |= {key: value for key, value in stated.items() if key not in VERL and key not in VERL_KEYS}
    given = {key: stated.get(key, known.default) for key, known in VERL_KEYS.items()}
    loss, penalty = bool(found["algorithm.use_kl_loss"]), bool(given["algorithm.use_kl_in_reward"])
    found["algorithm.disable_kl"] = not (loss or penalty)
    if loss:
        found["algorithm.kl_coef"] = given[f"{_ACTOR}.kl_loss_coef"]
        found["algorithm.kl_penalty"] = given[f"{_ACTOR}.kl_loss_type"]
        names |= {"algorithm.kl_coef": f"{_ACTOR}.kl_loss_coef", "algorithm.kl_penalty": f"{_ACTOR}.kl_loss_type"}
    for key, theirs in ((f"{_ACTOR}.loss_agg_mode", "loss_avg_mode"), (f"{_ACTOR}.policy_loss.loss_mode", "loss_type")):
        found[f"worker.actor.{theirs}"] = _MODES.get(given[key], given[key])
        names[f"worker.actor.{theirs}"] = key
    return found, names


def is_verl(stated: dict[str, Any]) -> bool:
    """Whether keys are those of verl."""
    return any(key.startswith("actor_rollout_ref.") for key in stated)
