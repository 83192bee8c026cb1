"""What a run is going to do, on one screen before it starts; and `--dry_run`: one small step, which leaves nothing."""

import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from itertools import groupby
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from rich.console import Console
from rich.table import Table
from transformers import PrinterCallback, ProgressCallback
from trl import GRPOConfig

from vgr_trl.dapo_config import DAPOConfig
from vgr_trl.options import changed_options
from vgr_trl.reporting.markdown import duration
from vgr_trl.reporting.recorder import is_recorded_before
from vgr_trl.reporting.records import Completion, read_run
from vgr_trl.trainer import DAPOTrainer
from vgr_trl.utils import describe_features, printable

ALWAYS_SHOWN = (
    "loss_type", "epsilon", "epsilon_high", "beta", "learning_rate", "lr_scheduler_type", "warmup_steps",
    "temperature", "max_completion_length", "num_iterations", "scale_rewards", "importance_sampling_level",
    "mask_truncated_completions", "use_vllm", "bf16", "gradient_checkpointing", "seed",
)  # fmt: skip
OWN_OPTIONS = tuple(option.name for option in fields(DAPOConfig) if option.name not in GRPOConfig.__dataclass_fields__)
PROMPTS = 3  # of a dry run
SHOWN = 300  # characters of a prompt or completion
QUANTITIES = ("vgr", "aei_vision", "mdi_balance")


def describe_run(trainer: DAPOTrainer, source: str, checkpoint: str | None) -> list[tuple[str, str]]:
    """Return what the run is going to do as (what, value) pairs.

    Args:
        checkpoint: where the run continues, or None.
    """
    args, idle = trainer.args, trainer.idle_options
    switched_on = [name for name in changed_options(args) if name in OWN_OPTIONS and name not in idle]
    model = trainer.accelerator.unwrap_model(trainer.model)
    sizes = [  # ZeRO-3 leaves nothing of a parameter on this process but its number of elements
        (int(getattr(each, "ds_numel", each.numel())), each.requires_grad) for each in model.parameters()
    ]
    per_step = args.per_device_train_batch_size * args.world_size * args.gradient_accumulation_steps
    steps_per_rollout = (args.steps_per_generation or 1) * args.num_iterations / args.gradient_accumulation_steps
    before = args.eval_batch_size * trainer.accelerator.num_processes
    return [
        ("model", f"{model.config._name_or_path or type(model).__name__} ({type(model).__name__})"),
        ("processes", describe_processes(trainer.accelerator)),
        ("parameters", f"{sum(size for size, trained in sizes if trained):,} trained of {sum(s for s, _ in sizes):,}"),
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
        ("passes", describe_features(trainer.features)),
        *([("before step 1", f"{before} completions of the data to evaluate on, with their rewards, for the report")]
          if checkpoint is None and is_recorded_before(trainer) else []),
        ("steps", str(total_steps(trainer))),
        ("output", f"{args.output_dir}" + (f", continued from {checkpoint}" if checkpoint else "")),
    ]  # fmt: skip


def describe_processes(accelerator: Accelerator) -> str:
    """Return how many processes train, on how many machines, by which engine, and how they compute."""
    count = accelerator.num_processes
    machines = count // int(os.environ.get("LOCAL_WORLD_SIZE", count))
    where = f"{count} on {machines} machines" if machines > 1 else str(count)
    if (plugin := accelerator.state.deepspeed_plugin) is not None:
        offload = plugin.deepspeed_config["zero_optimization"].get("offload_optimizer", {}).get("device", "none")
        engine = f"DeepSpeed ZeRO-{plugin.zero_stage}" + (f", optimizer on {offload}" if offload != "none" else "")
    elif accelerator.distributed_type == DistributedType.FSDP:
        engine = f"FSDP{accelerator.state.fsdp_plugin.fsdp_version}"
    else:
        engine = "DDP" if count > 1 else "alone"
    precision = accelerator.mixed_precision
    computes = "no mixed precision" if precision == "no" else f"computes in {precision}"
    return f"{where}, {engine}, on {accelerator.device.type}, {computes}"


def print_plan(rows: list[tuple[str, str]]) -> None:
    """Print the description as a table."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for what, value in rows:
        table.add_row(what, value)
    Console().print(table)


def total_steps(trainer: DAPOTrainer) -> int:
    """Return the optimizer steps of the whole run."""
    if trainer.args.max_steps > 0:
        return trainer.args.max_steps
    return trainer.set_initial_training_values(trainer.args, trainer.get_train_dataloader())[-1]


def _rows(dataset: Any) -> str:
    if isinstance(dataset, dict):
        return " + ".join(f"{name} {_rows(part)}" for name, part in dataset.items())
    return "none" if dataset is None else f"{len(dataset):,} rows" if hasattr(dataset, "__len__") else "a stream"


def _rewards(trainer: DAPOTrainer) -> str:
    weights = zip(trainer.reward_func_names, trainer.reward_weights.tolist(), strict=True)
    early = [f" (early {weight:g})" for weight in trainer.args.early_reward_weights or ()]
    return ", ".join(f"{name} x {weight:g}{''.join(early[at : at + 1])}" for at, (name, weight) in enumerate(weights))


def _values(args: DAPOConfig, names: Iterable[str]) -> str:
    return ", ".join(f"{name}={getattr(getattr(args, name), 'value', getattr(args, name))}" for name in names)


def dry_run(config: DAPOConfig, source: str, build: Callable[[], DAPOTrainer]) -> None:
    """Build a trainer, let it make one small step, and print what came out and what the whole run would take.

    Args:
        config: of the run; it is changed, so that the step is small and writes to a folder that is removed.
        build: makes the trainer from `config`.
    """
    batch = config.per_device_train_batch_size * config.world_size
    completions, per_step = int(config.generation_batch_size or batch), batch * config.gradient_accumulation_steps
    prompts, epochs, max_steps = config.prompts_per_rollout, config.num_train_epochs, config.max_steps
    steps_per_rollout = (config.steps_per_generation or 1) * config.num_iterations / config.gradient_accumulation_steps
    with tempfile.TemporaryDirectory(prefix="vgr_trl_dry_run_") as folder:
        _make_small(config, folder)
        trainer = build()
        rows = len(trainer.train_dataset) if hasattr(trainer.train_dataset, "__len__") else None
        for callback in (PrinterCallback, ProgressCallback):
            trainer.remove_callback(callback)
        trainer.args.eval_strategy = "no"
        if trainer.accelerator.is_main_process:
            of_small_step = ("rollout", "step", "steps", "output")
            print_plan([row for row in describe_run(trainer, source, None) if row[0] not in of_small_step])
        started = time.monotonic()
        trainer.train()
        seconds = time.monotonic() - started
        trainer.accelerator.wait_for_everyone()
        if not trainer.accelerator.is_main_process:
            return
        (record,) = read_run(folder).records("train")
        print("\n".join(_completions(record.completions)), end="\n\n")
    steps = max_steps
    if steps <= 0:
        steps = 0 if rows is None else int(epochs * (rows // prompts) * steps_per_rollout)
    small = int(config.generation_batch_size or batch)
    if torch.cuda.is_available():
        where, peak = "GPU", torch.cuda.max_memory_allocated()
    else:
        where, peak = "CPU", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        peak *= 1 if sys.platform == "darwin" else 1024
    print(
        f"measured: {small} completions of at most {config.max_completion_length} tokens in {seconds:.1f} s, "
        f"memory {peak / 2**30:.2f} GiB per process ({where})"
    )
    peak += max(completions - small, 0) // config.world_size * _cache_bytes(trainer)
    print(estimates(completions, per_step, steps, seconds / small, peak))


def estimates(completions: int, per_step: int, steps: int, seconds: float, peak: int) -> str:
    """Return lines on the memory and the time of the whole run.

    Args:
        completions: of a rollout, on all processes.
        per_step: completions that an optimizer step trains on.
        steps: of the whole run; 0: not known.
        seconds: per completion of the small step, an upper bound: it also chooses kernels and takes memory.
        peak: bytes of memory of one process during a whole rollout.
    """
    step = seconds * per_step
    return (
        f"memory: about {peak / 2**30:.2f} GiB per process with the {completions} completions of a whole rollout\n"
        f"time per step: at most about {duration(step)} ({per_step} completions)\n"
        f"total: {f'at most about {duration(steps * step)} for {steps} steps' if steps else 'not known'}"
    )


def _make_small(config: DAPOConfig, folder: str) -> None:
    """Change the options to one step with a few whole groups, recorded in `folder` and nowhere else."""
    batch, group = config.per_device_train_batch_size * config.world_size, config.num_generations or 1
    whole = [parts for parts in range(1, (config.steps_per_generation or 1) + 1) if batch * parts % group == 0]
    enough = [parts for parts in whole if batch * parts >= PROMPTS * group]
    parts = (enough or whole[-1:] or [config.steps_per_generation or 1])[0]
    config.steps_per_generation = config.gradient_accumulation_steps = parts
    config.generation_batch_size = batch * parts
    config.num_iterations, config.max_steps = 1, 1
    config.output_dir, config.report_to, config.push_to_hub = folder, [], False
    config.save_strategy, config.load_best_model_at_end, config.logging_steps = "no", False, 1
    config.rollout_log_steps, config.rollout_log_samples = 1, 2 * PROMPTS
    config.markdown_logs = config.log_completions = config.colorize_output = False
    config.rollout_log_path = config.eval_log_path = None
    config.attention_diag_log_path = config.token_weights_log_path = None


def _completions(completions: Sequence[Completion]) -> list[str]:
    """Lines of the first completions of the first prompts, with their rewards and what was measured."""
    lines = []
    for group, members in groupby(completions, key=lambda completion: completion.group):
        for number, each in enumerate(members):
            if number == 0:
                images = [
                    f"{image.width}x{image.height} px"
                    + ("" if image.grid is None else " ({}x{} tokens)".format(*image.grid))
                    for image in each.images
                ]
                lines += ["", f"prompt {group + 1}: {', '.join(images) or 'no image'}; right: {each.solution}"]
                lines += [_indented(each.prompt)]
            rewards = ", ".join(f"{name} {_number(value)}" for name, value in each.rewards.items())
            lines += ["  completion", _indented(each.text)]
            lines += [f"    {rewards}; reward {_number(each.reward)}; advantage {_number(each.advantage)}"]
            if each.metrics:
                lines += [f"    {_signals(each.metrics)}"]
    return lines


def _cache_bytes(trainer: DAPOTrainer) -> int:
    """Bytes of the keys and values of a completion of full length, without its prompt, which may be shared."""
    config = trainer.accelerator.unwrap_model(trainer.model).config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", 0)
    size = getattr(config, "head_dim", None) or config.hidden_size // max(config.num_attention_heads, 1)
    width = torch.finfo(trainer.model.dtype).bits // 8
    return int(2 * config.num_hidden_layers * heads * size * width * (trainer.args.max_completion_length or 0))


def _signals(metrics: Mapping[str, Mapping[str, float | None]]) -> str:
    segment = "late" if "late" in metrics else "all"
    measured = metrics.get(segment, {})
    return f"{segment} layers: " + ", ".join(f"{name} {_number(measured.get(name))}" for name in QUANTITIES)


def _indented(text: str) -> str:
    cut = text if len(text) <= SHOWN else f"{text[:SHOWN]} […]"
    return "\n".join(f"    {line}" for line in printable(cut).splitlines() or [""])


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
