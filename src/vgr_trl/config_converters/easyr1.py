"""Every key of EasyR1's configuration (at b44b311) with its default there, and ours or the reason why there is none."""

from dataclasses import dataclass
from typing import Any

# ---------------------------------------------------------------------------------------------------------------------
# What is known of a key of another trainer's configuration.


@dataclass(frozen=True)
class Key:
    """A key of EasyR1.

    Attributes:
        default: its value where the configuration does not state it.
        ours: the option that takes its value as it is.
        why: what is done with it otherwise: a rule reads it, it changes no result, or it has no counterpart.
        fits: the values that need no counterpart; others stop the run. None: all.
        is_read: a rule makes options of it.
    """

    default: Any
    ours: str | None = None
    why: str = ""
    fits: tuple[Any, ...] | None = None
    is_read: bool = False


def same(ours: str, default: Any) -> Key:
    """Return the key of an option that means the same here."""
    return Key(default, ours)


def read(default: Any, why: str = "") -> Key:
    """Return a key that a rule reads."""
    return Key(default, why=why, is_read=True)


def moot(default: Any, why: str) -> Key:
    """Return a key that changes how theirs computes, not what: any value will do."""
    return Key(default, why=why)


def only(default: Any, why: str, *fits: Any) -> Key:
    """Return a key without counterpart: its default and `fits` are what is done here, other values stop the run."""
    return Key(default, why=why, fits=(default, *fits))


# ---------------------------------------------------------------------------------------------------------------------
# Names that MTRL, VPPO and verl have for keys of EasyR1, and defaults in which they differ from it.


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


_SHARDING = "how parameters are spread is in the file that accelerate launch is given"
_MEMORY = "how memory is spread is in the file that accelerate launch is given"
_ITSELF = "theirs sets it by itself"
_ENGINE = "of theirs' engine; changes no result"
_CRITIC = "a critic is made with adv_estimator gae alone"
_REFERENCE = "the reference is kept as TRL keeps it; changes no result"

DATA = {
    "train_files": read("", "data to train on"),
    "val_files": read("", "data to evaluate on"),
    "prompt_key": same("problem_key", "prompt"),
    "answer_key": same("solution_key", "answer"),
    "image_key": read("images", "images and image are looked for anyway"),
    "video_key": read("videos", "videos and video are looked for anyway"),
    "image_dir": same("image_dir", None),
    "video_fps": same("video_fps", 2.0),
    "max_prompt_length": same("max_prompt_length", 512),
    "max_response_length": same("max_completion_length", 512),
    "rollout_batch_size": read(512, "prompts per rollout"),
    "mini_rollout_batch_size": moot(None, "further rounds draw as many prompts as groups are missing"),
    "val_batch_size": moot(-1, "evaluations are cut by per_device_eval_batch_size; changes no result"),
    "format_prompt": read(None, "what the user says"),
    "override_chat_template": only(None, "the chat template is the model's own; save another one with its tokenizer"),
    "shuffle": same("shuffle_dataset", True),
    "seed": same("seed", 1),
    "min_pixels": same("min_pixels", 262144),
    "max_pixels": same("max_pixels", 4194304),
    "filter_overlong_prompts": only(True, "prompts that are too long are always left out, never cut"),
    "filter_overlong_prompts_workers": moot(16, "prompts are counted by each process; changes no result"),
}
ALGORITHM = {
    "gamma": read(1.0, "of GAE"),
    "lam": read(1.0, "of GAE"),
    "adv_estimator": read("grpo"),
    "disable_kl": read(False, "kl_coef 0"),
    "use_kl_loss": read(False),
    "kl_penalty": read("kl"),
    "kl_coef": read(1e-3),
    "kl_type": read("fixed", "of a penalty in the rewards; in the loss theirs is always fixed"),
    "kl_horizon": read(10000.0),
    "kl_target": read(0.1),
    "online_filtering": read(False),
    "filter_key": read("overall"),
    "filter_low": read(0.01),
    "filter_high": read(0.99),
    "enable_entropy_filtering": same("enable_entropy_filtering", False),
    "top_p_entropy_tokens": same("top_p_entropy_tokens", 0.2),
    "enable_perception_filtering": same("enable_perception_filtering", False),
    "top_p_perception_tokens": same("top_p_perception_tokens", 0.2),
    "use_entropy_penalty": same("use_entropy_penalty", False),
    "entropy_penalty_coef": same("entropy_penalty_coef", 0.06),
    "enable_trajectory_reweighting": read(False, "theirs does it with perception filtering alone"),
    "trajectory_scaling_min": same("trajectory_scaling_min", 0.8),
}
MODEL = {
    "model_path": read(None),
    "tokenizer_path": read(None, "the processor is the one saved with the model"),
    "override_config": only({}, "the model's configuration is taken as saved; model_init_kwargs changes it"),
    "enable_gradient_checkpointing": same("gradient_checkpointing", True),
    "trust_remote_code": same("trust_remote_code", True),
    "freeze_vision_tower": read(False, "adapters that leave the tower out freeze it, nothing else does"),
    "lora.rank": read(0),
    "lora.alpha": read(64),
    "lora.target_modules": read("all-linear"),
    "lora.exclude_modules": read(None),
    "lora.dropout": read(0.0, "of MTRL"),
    "peft_type": read(None, "of MTRL"),
}
OPTIMIZER = {
    "lr": same("learning_rate", 1e-6),
    "betas": read((0.9, 0.999)),
    "weight_decay": same("weight_decay", 1e-2),
    "strategy": read("adamw", "optim is transformers' AdamW"),
    "lr_warmup_ratio": read(0.0),
    "lr_warmup_steps": read(None),
    "min_lr_ratio": read(None),
    "lr_scheduler_type": read("constant"),
    "training_steps": moot(-1, _ITSELF),
}
SHARDING = {
    "enable_full_shard": moot(True, _SHARDING),
    "enable_cpu_offload": moot(False, _MEMORY),
    "enable_rank0_init": moot(True, _SHARDING),
    "use_orig_params": moot(False, _SHARDING),
    "torch_dtype": read(None),
    "fsdp_size": moot(-1, _SHARDING),
    "mp_param_dtype": read("bf16"),
    "mp_reduce_dtype": moot("fp32", "gradients are reduced in the type that accelerate is told"),
    "mp_buffer_dtype": moot("fp32", _ENGINE),
}
OFFLOAD = {"offload_params": moot(False, _MEMORY), "offload_optimizer": moot(False, _MEMORY)}
_ULYSSES = only(1, "sequence parallelism is refused by TRL for GRPO; see docs/long_prompts.md")
ACTOR = {
    "strategy": only("fsdp", _SHARDING, "fsdp2"),
    "global_batch_size": read(256, "prompts per update"),
    "micro_batch_size_per_device_for_update": read(4, "completions per pass"),
    "micro_batch_size_per_device_for_experience": moot(16, "scored in the micro-batches of training, by whole groups"),
    "max_grad_norm": same("max_grad_norm", 1.0),
    "clip_ratio_low": read(0.2),
    "clip_ratio_high": read(0.3),
    "clip_ratio_dual": read(3.0),
    "loss_avg_mode": read("token"),
    "loss_type": read("default"),
    "ppo_epochs": same("num_iterations", 1),
    "padding_free": moot(True, "theirs computes without padding, here prompts are shared; changes no result"),
    "dynamic_batching": moot(True, "theirs cuts micro-batches by tokens; the loss of an update is the same"),
    "ulysses_size": _ULYSSES,
    "use_torch_compile": moot(True, _ENGINE),
    "tau_positive": read(1.0, "of sapo"),
    "tau_negative": read(1.05, "of sapo"),
    "global_batch_size_per_device": moot(-1, _ITSELF),
    **dict.fromkeys(
        ("disable_kl", "use_kl_loss", "kl_penalty", "kl_coef"), moot(None, "set by algorithm, in theirs too")
    ),
}
CRITIC_ONLY = {
    "cliprange_value": read(0.5),
    "loss_avg_mode": read("token"),
    "ppo_epochs": read(1),
    "global_batch_size": read(256),
    "micro_batch_size_per_device_for_update": moot(4, "the critic is trained in the micro-batches of the policy"),
    "micro_batch_size_per_device_for_experience": moot(16, "the critic is trained in the micro-batches of the policy"),
    "max_grad_norm": read(1.0),
    "strategy": only("fsdp", _SHARDING, "fsdp2"),
    "padding_free": moot(False, _ENGINE),
    "dynamic_batching": moot(True, _ENGINE),
    "ulysses_size": _ULYSSES,
    "global_batch_size_per_device": moot(-1, _ITSELF),
}
ROLLOUT = {
    "name": read("vllm"),
    "n": read(1),
    "temperature": same("temperature", 1.0),
    "top_p": same("top_p", 1.0),
    "top_k": read(-1),
    "seed": moot(1, "one seed here: that of the data"),
    "limit_images": moot(0, _ENGINE),
    "dtype": moot("bf16", "the engine takes the type of the model"),
    "gpu_memory_utilization": same("vllm_gpu_memory_utilization", 0.6),
    "ignore_eos": only(False, "a completion ends at its end token"),
    "enforce_eager": moot(False, _ENGINE),
    "enable_chunked_prefill": moot(False, _ENGINE),
    "enable_prefix_caching": moot(False, _ENGINE),
    "tensor_parallel_size": read(2),
    "max_model_len": same("vllm_max_model_length", None),
    "max_num_batched_tokens": moot(8192, _ENGINE),
    "disable_log_stats": moot(True, _ENGINE),
    "disable_tqdm": moot(False, _ENGINE),
    "val_override_config": read({}),
    **dict.fromkeys(("prompt_length", "response_length"), moot(-1, _ITSELF)),
    "trust_remote_code": moot(False, _ITSELF),
}
REWARD = {
    "reward_function": read(None),
    "reward_function_kwargs": read({}),
    "reward_type": read(None),
    "skip_special_tokens": only(True, "rewards read completions without special tokens"),
    "num_cpus": same("reward_num_cpus", 1),
    "reward_function_name": moot(None, _ITSELF),
}
TRAINER = {
    "total_epochs": read(15),
    "max_steps": read(None),
    "project_name": read("easy_r1"),
    "experiment_name": same("run_name", "demo"),
    "logger": read(("console", "wandb")),
    "nnodes": read(1, "machines are told to accelerate launch"),
    "n_gpus_per_node": read(8, "processes are told to accelerate launch"),
    "max_try_make_batch": read(20, "of online filtering"),
    "critic_warmup": read(0, "steps in which the policy waits"),
    "val_freq": read(-1),
    "val_before_train": read(True),
    "val_only": read(False, "the command evaluate in place of train"),
    "val_generations_to_log": moot(0, "completions of every evaluation are in the records and logs"),
    "save_freq": read(-1),
    "save_limit": read(-1),
    "save_model_only": same("save_only_model", False),
    "save_checkpoint_path": read(None),
    "load_checkpoint_path": read(None),
    "ray_timeline": only(None, "there is no Ray here"),
    "find_last_checkpoint": read(True),
}


def _under(prefix: str, table: dict[str, Key]) -> dict[str, Key]:
    return {f"{prefix}.{name}": key for name, key in table.items()}


_READ = ("optim.lr", "optim.lr_warmup_steps", "optim.lr_warmup_ratio", "optim.weight_decay", "optim.betas",
         "model.model_path")  # fmt: skip


def _of_critic(table: dict[str, Key]) -> dict[str, Key]:
    reads = {f"worker.critic.{name}" for name in _READ}
    return {
        name: read(key.default, _CRITIC) if key.is_read or name in reads else moot(key.default, _CRITIC)
        for name, key in table.items()
    }


_PARTS = {"model": MODEL, "optim": OPTIMIZER, "fsdp": SHARDING, "offload": OFFLOAD}
_REFERENCES = ("micro_batch_size_per_device_for_experience", "padding_free", "dynamic_batching", "use_torch_compile")
TABLE: dict[str, Key] = {
    **_under("data", DATA),
    **_under("algorithm", ALGORITHM),
    "worker.hybrid_engine": only(True, "generation and training share their GPUs"),
    **_under("worker.actor", ACTOR),
    **{name: key for part, table in _PARTS.items() for name, key in _under(f"worker.actor.{part}", table).items()},
    **_of_critic(_under("worker.critic", CRITIC_ONLY)),
    **{
        name: key
        for part, table in _PARTS.items()
        for name, key in _of_critic(_under(f"worker.critic.{part}", table)).items()
    },
    "worker.ref.strategy": moot("fsdp", _REFERENCE),
    **{f"worker.ref.fsdp.{name}": moot(key.default, _REFERENCE) for name, key in SHARDING.items()},
    **{f"worker.ref.offload.{name}": moot(key.default, _REFERENCE) for name, key in OFFLOAD.items()},
    **{f"worker.ref.{name}": moot(None, _ITSELF) for name in _REFERENCES},
    "worker.ref.ulysses_size": _ULYSSES,
    **_under("worker.rollout", ROLLOUT),
    **_under("worker.reward", REWARD),
    **_under("trainer", TRAINER),
}
WHOLE = tuple(name for name, key in TABLE.items() if isinstance(key.default, dict))  # whose values are no sections
