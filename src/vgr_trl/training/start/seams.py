"""The places where this library joins TRL, checked before they are used."""

import inspect
from importlib.metadata import version

import torch
from packaging.version import Version
from trl.trainer import grpo_trainer, utils

from vgr_trl.errors import UnsupportedTRLError
from vgr_trl.trl_release import CURE, check_release, release, supported

SEAMS = {
    "_calculate_rewards": ("inputs", "prompts", "completions", "completion_ids_list"),
    "_compute_loss": ("model", "inputs"),
    "_generate": ("prompts",),
    "_generate_and_score_completions": ("inputs",),
    "_generate_single_turn": (),
    "_get_per_token_logps_and_entropies": (
        "model",
        "input_ids",
        "attention_mask",
        "logits_to_keep",
        "batch_size",
        "compute_entropy",
    ),
    "_get_dataloader": ("dataset",),
    "_get_train_sampler": ("dataset",),
    "_get_eval_sampler": ("eval_dataset",),
    "_get_output_dir": ("trial",),
    "_load_best_model": (),
    "_log_completion_extra": ("column", "values"),
    "_load_optimizer_and_scheduler": ("checkpoint",),
    "_prepare_inputs": ("generation_batch",),
    "_save_checkpoint": ("model", "trial"),
    "_save_rng_state": ("output_dir",),
    "_load_from_checkpoint": ("resume_from_checkpoint", "model"),
    "_tokenize_prompts": ("prompts",),
    "create_model_card": ("model_name", "dataset_name", "tags"),
    "log": ("logs", "start_time"),
    "train": ("resume_from_checkpoint",),
}


# What ours replaces in the module of TRL's trainer while a batch is dealt to micro-batches.
MODULE_SEAMS = ("shuffle_sequence_dict", "unsplit_pixel_values_by_grid")

# What ours reads of a constructed trainer.
ATTRIBUTES = (
    "_buffered_inputs",
    "_entropy_bonus_enabled",
    "_is_vlm",
    "_logs",
    "_metrics",
    "_pending_extra_logs",
    "_pending_metrics",
    "_step",
    "_tokenizer",
    "aux_loss_enabled",
    "beta",
    "environment_factories",
    "eos_token_ids",
    "importance_sampling_level",
    "log_multimodal",
    "loss_type",
    "num_generations",
    "num_generations_eval",
    "num_iterations",
    "off_policy_mask_threshold",
    "pad_to_multiple_of",
    "ref_model",
    "reward_func_names",
    "reward_funcs",
    "reward_weights",
    "rollout_func",
    "shuffle_dataset",
    "temperature",
    "tools",
    "top_entropy_quantile",
    "use_transformers_continuous_batching",
    "use_vllm",
    "vllm_importance_sampling_correction",
)


def check_attributes(trainer: object) -> None:
    """Raise `UnsupportedTRLError` unless the constructed `trainer` has the attributes that ours reads."""
    for name in ATTRIBUTES:
        if not hasattr(trainer, name):
            raise UnsupportedTRLError(
                f"TRL {version('trl')} is installed, and its trainer has no attribute {name}; {CURE}"
            )


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


def check_seams(trainer_class: type, installed: str | None = None) -> None:
    """Raise `UnsupportedTRLError` unless `trainer_class`, TRL's trainer, has the methods that ours extends."""
    check_release(installed)
    found = supported(installed)
    for name in MODULE_SEAMS:
        if not hasattr(grpo_trainer, name):
            raise UnsupportedTRLError(f"{found}, and its module grpo_trainer has no {name}; {CURE}")
    for name, expected in SEAMS.items():
        method = getattr(trainer_class, name, None)
        if method is None:
            raise UnsupportedTRLError(f"{found}, and {trainer_class.__name__} has no method {name}; {CURE}")
        names = list(inspect.signature(method).parameters)
        missing = [parameter for parameter in expected if parameter not in names]
        if missing:
            raise UnsupportedTRLError(
                f"{found}, and {trainer_class.__name__}.{name} has no parameter {missing[0]}; {CURE}"
            )
