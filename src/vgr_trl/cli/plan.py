"""Describe a run before it starts: model, processes, data, options, steps and output."""

import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import fields
from enum import Enum
from typing import Any

from accelerate import Accelerator, DistributedType
from rich.console import Console
from rich.table import Column, Table
from trl import GRPOConfig

from vgr_trl.dapo_config import DAPOConfig
from vgr_trl.options import changed_options
from vgr_trl.reporting.first_record import needs_record_before_training
from vgr_trl.trainer import DAPOTrainer

PLAN_OPTIONS = "learning_rate", "temperature", "max_completion_length", "loss_type", "beta", "use_vllm", "seed"
OWN_OPTIONS = tuple(option.name for option in fields(DAPOConfig) if option.name not in GRPOConfig.__dataclass_fields__)


def describe_run(
    trainer: DAPOTrainer, source: str, checkpoint: str | None, verbose: bool = False, recipe: str | None = None
) -> list[tuple[str, str]]:
    """Describe the run as (label, text) pairs, printed before the first step.

    Args:
        source: data source, as text.
        checkpoint: folder to resume from, or None.
        verbose: also list every feature, with a reason if it is off, and options without effect.
        recipe: name of the recipe, or None.
    """
    args, idle = trainer.args, trainer.idle_options
    switched_on = [name for name in changed_options(args) if name in OWN_OPTIONS and name not in idle]
    model = trainer.accelerator.unwrap_model(trainer.model)
    # ZeRO-3 keeps only the number of elements of a parameter.
    sizes = [(getattr(each, "ds_numel", each.numel()), each.requires_grad) for each in model.parameters()]
    trained = f"{sum(size for size, trains in sizes if trains):,} of {sum(size for size, _ in sizes):,} parameters"
    data = f"training {count_rows(trainer.train_dataset)}, evaluation {count_rows(trainer.eval_dataset)}"
    per_step = args.per_device_train_batch_size * args.world_size * args.gradient_accumulation_steps
    uses = steps_per_rollout(args)
    rollout = f"{args.prompts_per_rollout} prompts x {args.num_generations} completions = {args.generation_batch_size}"
    saved = f"a checkpoint every {args.save_steps:g} steps" if args.save_strategy == "steps" else "the model at the end"
    before = args.eval_batch_size * trainer.accelerator.num_processes
    starts = checkpoint is None and needs_record_before_training(trainer)
    step = f"each rollout ({rollout}) is used for {uses:g} step{'s' * (uses != 1)}"
    rows: list[tuple[str, Any]] = [
        ("model", f"{model.config._name_or_path or type(model).__name__} ({type(model).__name__}), trains {trained}"),
        ("processes", describe_processes(trainer.accelerator)),
        ("data", f"{source}: {data}"),
        ("recipe", recipe),
        ("rewards", _format_rewards(trainer)),
        ("options", _format_options(args, PLAN_OPTIONS)),
        ("tools", ", ".join(tool.__name__ for tool in trainer.tools)),
        ("changed", _format_options(args, switched_on)),
        ("passes", verbose and str(trainer.features)),
        ("images", verbose and str(trainer.vision_cache)),
        *(("without effect", verbose and f"{_format_options(args, [name])}: {why}") for name, why in idle.items()),
        ("at step 0", starts and f"{before} evaluation completions and their rewards are recorded for the report"),
        ("steps", f"{total_steps(trainer)} steps of {per_step} completions; {step}"),
        ("output", f"{args.output_dir}, {saved}" + (f", continued from {checkpoint}" if checkpoint else "")),
    ]
    return [(label, text) for label, text in rows if text]


def describe_processes(accelerator: Accelerator) -> str:
    """Return the number of processes and machines, the engine, the device and the precision."""
    count, state = accelerator.num_processes, accelerator.state
    machines = count // int(os.environ.get("LOCAL_WORLD_SIZE", count))
    where = f"{count} process{'es' * (count > 1)}" + f" on {machines} machines" * (machines > 1)
    engine = "DDP, " * (count > 1)
    if state.deepspeed_plugin is not None:
        engine = f"DeepSpeed ZeRO-{state.deepspeed_plugin.zero_stage}, "
    elif accelerator.distributed_type == DistributedType.FSDP:
        engine = f"FSDP{state.fsdp_plugin.fsdp_version}, "
    device = {"cpu": "CPU", "cuda": "GPU"}.get(accelerator.device.type, accelerator.device.type)
    return f"{where}, {engine}{device}, {accelerator.mixed_precision.replace('no', 'no mixed precision')}"


def print_plan(rows: list[tuple[str, str]]) -> None:
    """Print the description of a run as a table."""
    table = Table(Column(style="bold", no_wrap=True), Column(overflow="fold"), show_header=False, box=None)
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 100).print(table)


def total_steps(trainer: DAPOTrainer) -> int:
    """Return the number of optimizer steps of the run."""
    if trainer.args.max_steps > 0:
        return trainer.args.max_steps
    return trainer.set_initial_training_values(trainer.args, trainer.get_train_dataloader())[-1]


def count_rows(dataset: Any) -> str:
    """Format the number of rows of a data set, or of each of its parts."""
    if isinstance(dataset, dict):
        return " + ".join(f"{name} {count_rows(part)}" for name, part in dataset.items())
    return "none" if dataset is None else f"{len(dataset):,} rows" if hasattr(dataset, "__len__") else "a stream"


def _format_rewards(trainer: DAPOTrainer) -> str:
    early: Sequence[float | None] = trainer.args.early_reward_weights or [None] * len(trainer.reward_func_names)
    weights = zip(trainer.reward_func_names, trainer.reward_weights.tolist(), early, strict=True)
    return ", ".join(f"{name} x {late:g}{'' if one is None else f' (early {one:g})'}" for name, late, one in weights)


def _format_options(args: DAPOConfig, names: Iterable[str]) -> str:
    values = {name: vars(args)[name] for name in names}
    return ", ".join(f"{name}={each.value if isinstance(each, Enum) else each}" for name, each in values.items())


def steps_per_rollout(config: DAPOConfig) -> float:
    """Return how many optimizer steps use a rollout."""
    return (config.steps_per_generation or 1) * config.num_iterations / config.gradient_accumulation_steps
