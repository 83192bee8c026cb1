"""What a run is going to do, in one screen, before it does it."""

import os
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from accelerate import Accelerator, DistributedType
from rich.console import Console
from rich.table import Table
from trl import GRPOConfig

from vgr_trl.config import DAPOConfig
from vgr_trl.config.effects import changed_options
from vgr_trl.trainer import DAPOTrainer
from vgr_trl.training.recording.before import is_recorded_before

ALWAYS_SHOWN = (
    "loss_type", "epsilon", "epsilon_high", "beta", "learning_rate", "lr_scheduler_type", "warmup_steps",
    "temperature", "max_completion_length", "num_iterations", "scale_rewards", "importance_sampling_level",
    "mask_truncated_completions", "use_vllm", "bf16", "gradient_checkpointing", "seed",
)  # fmt: skip
OWN_OPTIONS = tuple(option.name for option in fields(DAPOConfig) if option.name not in GRPOConfig.__dataclass_fields__)


def describe_run(trainer: DAPOTrainer, source: str, checkpoint: str | None) -> list[tuple[str, str]]:
    """Return what the run is going to do as (what, value) pairs.

    Args:
        checkpoint: where the run continues, or None.
    """
    args = trainer.args
    idle = trainer.idle_options
    switched_on = [name for name in changed_options(args) if name in OWN_OPTIONS and name not in idle]
    model = trainer.accelerator.unwrap_model(trainer.model)
    trainable = sum(_size(parameter) for parameter in model.parameters() if parameter.requires_grad)
    total = sum(_size(parameter) for parameter in model.parameters())
    per_step = args.per_device_train_batch_size * args.world_size * args.gradient_accumulation_steps
    assert args.steps_per_generation is not None  # made certain by the constructor
    steps_per_rollout = args.steps_per_generation * args.num_iterations / args.gradient_accumulation_steps
    return [
        ("model", f"{model.config._name_or_path or type(model).__name__} ({type(model).__name__})"),
        ("processes", describe_processes(trainer.accelerator)),
        ("parameters", f"{trainable:,} trained of {total:,}"),
        ("data", f"{source}: {_rows(trainer.train_dataset)} to train on, {_rows(trainer.eval_dataset)} to evaluate on"),
        ("rewards", _rewards(trainer)),
        ("options", _values(args, ALWAYS_SHOWN)),
        *([("on", _values(args, switched_on))] if switched_on else []),
        *[("without effect", f"{_values(args, [name])} because {why}") for name, why in idle.items()],
        ("rollout", f"{args.prompts_per_rollout} prompts x {args.num_generations} completions = "
                    f"{args.generation_batch_size}"),
        ("step", f"{args.per_device_train_batch_size} per device x {args.world_size} processes x "
                 f"{args.gradient_accumulation_steps} accumulated = {per_step} completions; a rollout serves "
                 f"{steps_per_rollout:g} steps"),
        ("prompts", str(trainer.sharing)),
        *_before(trainer, checkpoint),
        ("steps", str(total_steps(trainer))),
        ("output", f"{args.output_dir}" + (f", continued from {checkpoint}" if checkpoint else "")),
    ]  # fmt: skip


def _before(trainer: DAPOTrainer, checkpoint: str | None) -> list[tuple[str, str]]:
    if checkpoint is not None or not is_recorded_before(trainer):
        return []
    count = trainer.args.eval_batch_size * trainer.accelerator.num_processes
    return [("before step 1", f"{count} completions of the data to evaluate on, with their rewards, for the report")]


def describe_processes(accelerator: Accelerator) -> str:
    """Return how many processes train, on how many machines, by which engine, and how they compute."""
    count = accelerator.num_processes
    machines = count // int(os.environ.get("LOCAL_WORLD_SIZE", count))
    where = f"{count} on {machines} machines" if machines > 1 else str(count)
    computes = (
        "no mixed precision" if accelerator.mixed_precision == "no" else f"computes in {accelerator.mixed_precision}"
    )
    return f"{where}, {_engine(accelerator)}, on {accelerator.device.type}, {computes}"


def _engine(accelerator: Accelerator) -> str:
    if (plugin := accelerator.state.deepspeed_plugin) is not None:
        offload = plugin.deepspeed_config["zero_optimization"].get("offload_optimizer", {}).get("device", "none")
        return f"DeepSpeed ZeRO-{plugin.zero_stage}" + (f", optimizer on {offload}" if offload != "none" else "")
    if accelerator.distributed_type == DistributedType.FSDP:
        return f"FSDP{accelerator.state.fsdp_plugin.fsdp_version}"
    return "DDP" if accelerator.num_processes > 1 else "alone"


def print_plan(rows: list[tuple[str, str]]) -> None:
    """Print the description as a table."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for what, value in rows:
        table.add_row(what, value)
    Console().print(table)


def _size(parameter: Any) -> int:
    """Elements of a parameter, also where ZeRO-3 has left nothing of it on this process."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _rows(dataset: Any) -> str:
    if dataset is None:
        return "none"
    if isinstance(dataset, dict):
        return " + ".join(f"{name} {_rows(part)}" for name, part in dataset.items())
    return f"{len(dataset):,} rows" if hasattr(dataset, "__len__") else "a stream"


def _rewards(trainer: DAPOTrainer) -> str:
    early = trainer.args.early_reward_weights
    lines = []
    for index, (name, weight) in enumerate(
        zip(trainer.reward_func_names, trainer.reward_weights.tolist(), strict=True)
    ):
        start = f" (early {early[index]:g})" if early and index < len(early) else ""
        lines.append(f"{name} x {weight:g}{start}")
    return ", ".join(lines)


def _values(args: DAPOConfig, names: Iterable[str]) -> str:
    return ", ".join(f"{name}={getattr(getattr(args, name), 'value', getattr(args, name))}" for name in names)


def total_steps(trainer: DAPOTrainer) -> int:
    """Return the optimizer steps of the whole run."""
    if trainer.args.max_steps > 0:
        return trainer.args.max_steps
    return trainer.set_initial_training_values(trainer.args, trainer.get_train_dataloader())[-1]
