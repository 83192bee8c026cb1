"""`vgr-trl train`: train a vision-language model with DAPO, describe the planned run, or only check it."""

import json
import math
import os
import re
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from contextlib import nullcontext
from copy import copy
from dataclasses import fields
from enum import Enum
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from rich.console import Console
from rich.table import Column, Table
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig, ModelConfig, get_peft_config, get_quantization_config

from vgr_trl.atomic_files import write_atomic
from vgr_trl.callbacks.stopping import EXIT_STATUS
from vgr_trl.callbacks.trackers import format_duration, progress_lines
from vgr_trl.checkpoints import (
    TRACES,
    how_to_go_on,
    lock_folder,
    refuse_finished,
    resolve_checkpoint,
    resume_mode,
)
from vgr_trl.cli.arguments import (
    DataArguments,
    RewardArguments,
    RunArguments,
    evaluation_source,
    image_root,
    keep_offline,
    load_processor,
    load_rows,
    load_system_prompt,
    parse,
    raise_config_errors,
    refuse_adapter,
    source_name,
)
from vgr_trl.dapo_config import DAPOConfig
from vgr_trl.data.checked_rows import SkippedRow, report_skipped
from vgr_trl.data.convert import train_test_split
from vgr_trl.data.load import MEANT, parse_data_files, readable
from vgr_trl.data.prompts import PromptTemplate
from vgr_trl.data.read_row import FLAGS
from vgr_trl.errors import CollapseError, ConfigError, DataError, MissingSplitError
from vgr_trl.options import changed_options
from vgr_trl.patches.transformers import close_group_at_exit, wait_for_gloo
from vgr_trl.prepare import read_context, reads_boxes
from vgr_trl.reporting.console import print_record
from vgr_trl.reporting.recorder import RecordBeforeTraining, needs_record_before_training
from vgr_trl.reporting.records import IDENTITY_FILE, read_object, read_run, refuse_unwritable
from vgr_trl.rewards.calling import reads_solution
from vgr_trl.rewards.loading import replace_by_hard_negative
from vgr_trl.tools import load_environment
from vgr_trl.trainer import DAPOTrainer

METRICS = "metrics.json"
TINY_MODEL_PARAMETERS = 1e8  # models below this use the learning rate of the demo
LARGE_MEMORY = 40e9  # bytes beside the weights: enough for 8 completions of 512 tokens and their images


def main(argv: Sequence[str]) -> int:
    """Parse flags (or `--config x.yaml`, which flags override), train, and return 0."""
    groups = RunArguments, DataArguments, RewardArguments, DAPOConfig, ModelConfig
    how, data, rewards, config, model = parse(groups, "train", argv)
    close_group_at_exit()
    if not model.model_name_or_path:
        raise ConfigError("model_name_or_path is missing: give a checkpoint folder or a hub name.")
    refuse_adapter(model.model_name_or_path)
    sources = data.dataset_name, evaluation_source(data).dataset_name
    keep_offline(model.model_name_or_path, rewards.reward_model_name_or_path, *sources)
    separate_lora_modules(model)
    prints_logs, config.disable_tqdm = config.disable_tqdm, True  # step lines replace the progress bar

    def build() -> DAPOTrainer:
        trainer = build_trainer(data, rewards, config, model)
        if prints_logs:  # without a bar TRL prints dictionaries, which scripts read
            trainer.add_callback(PrinterCallback)
        return trainer

    if how.dry_run:
        with raise_config_errors():
            dry_run(config, source_name(data), build, how)
        return 0
    identity = run_identity(data, rewards, config, model) | {"recipe": how.recipe}
    with lock_folder(Path(config.output_dir or "trainer_output")):  # before anything is written
        return EXIT_STATUS if train(data, config, identity, build, how.verbose).termination.stopped else 0


def train(
    data: DataArguments, config: DAPOConfig, identity: dict[str, Any], build: Callable[[], DAPOTrainer], verbose: bool
) -> DAPOTrainer:
    """Train, save model, state and metrics to `output_dir`, and return the trainer.

    Args:
        data: flags of the data.
        config: options of the trainer.
        identity: settings by `run_identity`, and the recipe.
        build: makes the trainer from `config`.
        verbose: whether the plan lists every feature.

    Raises:
        ConfigError, DataError, RewardError: an option, the data or a reward cannot be used; nothing was trained.
        CollapseError: `stop_on_collapse` stopped the training.
    """
    output_dir, resume = Path(config.output_dir or "trainer_output"), resume_mode(config.resume_from_checkpoint)
    check_output_dir(output_dir, identity, resume)
    checkpoint = resolve_checkpoint(resume, output_dir)
    if checkpoint is not None:
        config.eval_on_start = False  # the run has evaluated this step, or a later one, before it was interrupted
    with raise_config_errors():
        trainer = build()
    trainer.data_source = source_name(data)
    metrics_file, steps, is_main = output_dir / METRICS, total_steps(trainer), trainer.accelerator.is_main_process
    is_trained = trainer.lacks_final_model_only(checkpoint, steps, metrics_file)  # metrics are written last
    if not is_trained:
        refuse_finished(checkpoint, steps)
    before = RecordBeforeTraining(trainer)
    trainer.add_callback(before)
    if is_main:
        write_identity(output_dir, identity)
        print_plan(describe_run(trainer, source_name(data), checkpoint, verbose, identity["recipe"]))
    trainer.accelerator.wait_for_everyone()  # every process has checked for the metrics file
    if is_trained:
        trainer.load_trained(str(checkpoint))
    else:
        metrics_file.unlink(missing_ok=True)
        try:
            with readable(source_name(data), "the data") if data.dataset_streaming else nullcontext():
                trainer.train(resume_from_checkpoint=checkpoint or False)
        except KeyboardInterrupt as interrupted:
            raise KeyboardInterrupt(how_to_go_on(output_dir)) from interrupted
    if trainer.state.global_step == 0:
        raise DataError("Nothing was trained: a rollout needs more rows than are usable; see the skipped rows above.")
    collapsed = None
    if trainer.termination.stopped:
        if is_main:
            print(f"Stopped by SIGTERM at step {trainer.state.global_step}: --resume_from_checkpoint continues.")
    else:
        collapsed = trainer.collapse_watch.warning if config.stop_on_collapse else None
        trainer.save_state()
    if not (collapsed or trainer.termination.stopped):
        save_results(trainer, before, metrics_file)
    trainer.accelerator.wait_for_everyone()
    wait_for_gloo()
    trainer.accelerator.end_training()  # `trainer.end` does this, but transformers 5.17 lacks it
    if collapsed is not None:
        raise CollapseError(f"{collapsed} Training stopped; no model was saved.")
    return trainer


def save_results(trainer: DAPOTrainer, before: RecordBeforeTraining, metrics_file: Path) -> None:
    """Save model and metrics of a completed training beside each other, and print how the rewards changed."""
    output_dir = metrics_file.parent
    trainer.save_model(str(output_dir))
    metrics = final_metrics(trainer)
    if trainer.accelerator.is_main_process:
        write_atomic(metrics_file, (json.dumps(metrics, indent=2) + "\n").encode())
        rows = count_rows(trainer.eval_dataset)
        print(*progress_lines(trainer.state.log_history, rows, before.scores, before.completions), sep="\n")
        print(f"Model, metrics and completions are in {output_dir}. Next: vgr-trl report {output_dir}")


def build_trainer(data: DataArguments, rewards: RewardArguments, config: DAPOConfig, model: ModelConfig) -> DAPOTrainer:
    """Load data and rewards and return the trainer; the main process reports skipped rows and unused options.

    Args:
        data: flags of the data.
        rewards: flags of rewards and tools.
        config: options of the trainer; loading options of the model are added.
        model: flags of model and adapter.

    Raises:
        ConfigError, DataError, RewardError: an option, the data or a reward cannot be used.
    """
    reward_funcs = rewards.load(rewards.reward_funcs, config.max_completion_length, config.soft_punish_cache)
    if rewards.reward_model_name_or_path:
        reward_funcs.insert(0, rewards.reward_model_name_or_path)
    is_main, skipped_file = config.process_index == 0, Path(config.output_dir or "trainer_output") / "skipped.jsonl"
    named = str(model.model_name_or_path), model.model_revision, config.trust_remote_code
    processor = cache(partial(load_processor, *named))
    load = partial(
        load_rows,
        needs_solution=any(map(reads_solution, reward_funcs)),
        on_skipped=lambda row: report_skipped([row] if is_main else [], skipped_file, "a"),
        processor=processor,
        boxes=reads_boxes(config, reward_funcs),
        context=read_context(config),
        full_images="sharper" in config.row_views.values(),
    )
    order = config.seed if config.shuffle_dataset else None
    rows, skipped = load(data, data.dataset_train_split, limit=data.max_train_rows, shuffle_seed=order)
    if data.dataset_streaming:
        config.shuffle_dataset = False  # TRL's shuffle buffer would hold 1,000 rows of decoded images
    load_test = partial(load, evaluation_source(data), limit=data.max_test_rows)
    rows, test_rows, skipped_tests, note = select_evaluation_rows(data, config, rows, load_test)
    if is_main:
        for sentence in filter(None, (note, _adapter_options_warning(model))):
            print(sentence, file=sys.stderr)
        report_skipped([*skipped, *skipped_tests], skipped_file)
    loading = {"revision": model.model_revision, "attn_implementation": model.attn_implementation, "dtype": model.dtype}
    config.model_init_kwargs = {**loading, **(config.model_init_kwargs or {})}  # type: ignore[dict-item]
    return DAPOTrainer(
        model=model.model_name_or_path,
        reward_funcs=reward_funcs,
        args=config,
        train_dataset=rows,
        eval_dataset=test_rows,
        processing_class=processor(),
        quantization_config=get_quantization_config(model),
        peft_config=get_peft_config(model),
        environment_factory=None if rewards.environment is None else load_environment(rewards.environment),
    )


def select_evaluation_rows(
    data: DataArguments, config: DAPOConfig, train_rows: Any, load: Callable[[str], tuple[Any, list[SkippedRow]]]
) -> tuple[Any, Any, list[SkippedRow], str | None]:
    """Return training rows, evaluation rows, skipped evaluation rows, and a note about their origin.

    Args:
        data: flags of the data.
        config: options of the trainer.
        train_rows: loaded training rows.
        load: loads a split. Without a split `test`, the validation split is used, else part of `train_rows`.

    Raises:
        DataError: evaluation is on, but there are no rows for it.
    """
    if config.eval_strategy == "no":
        config.eval_on_start = False  # there is nothing to evaluate on
        return train_rows, None, [], None
    try:
        return train_rows, *load(data.dataset_test_split), None
    except MissingSplitError as missing:
        validations = [split for split in missing.splits if MEANT.get(split) == "validation"]
        if data.dataset_test_split == "test" and validations and data.dataset_train_split not in validations:
            return train_rows, *load(validations[0]), f"The data have no test split: evaluating on {validations[0]}."
        if data.test_dataset is not None or data.dataset_streaming:
            raise
    root = image_root(data, data.dataset_train_split, train_rows)
    kept, test_rows = train_test_split(train_rows, config.seed, root, data.max_test_rows)
    held_out = f"{len(test_rows)} of {len(train_rows)} rows are held out for evaluation, chosen by image and seed"
    return kept, test_rows, [], f"The data have no {data.dataset_test_split} split: {held_out} {config.seed}."


def _adapter_options_warning(model: ModelConfig) -> str | None:
    unused = [name for name in changed_options(model) if name.startswith(("lora_", "use_rslora", "use_dora"))]
    if model.use_peft or not unused:
        return None
    return f"Without effect: {', '.join(unused)}. Add --use_peft to train an adapter."


def separate_lora_modules(model: ModelConfig) -> None:
    """Split LoRA module names at commas and spaces; keep text with other characters as a PEFT pattern.

    TRL turns a list of one module into a string, which PEFT would match against the whole module name.
    """
    modules = model.lora_target_modules
    if isinstance(modules, str) and re.fullmatch(r"[\w.]+", modules.replace(",", "").replace(" ", "")):
        modules = [modules]
    if isinstance(modules, list):
        model.lora_target_modules = [name for text in modules for name in re.split(r"[,\s]+", text.strip()) if name]


def run_identity(
    data: DataArguments, rewards: RewardArguments, config: DAPOConfig, model: ModelConfig
) -> dict[str, Any]:
    """Return the settings that must not change when a run is resumed: model, data, prompt, rewards, tools, adapter.

    Args:
        data: flags of the data.
        rewards: flags of rewards and tools.
        config: options of the trainer.
        model: flags of model and adapter.
    """
    source = data.dataset_name or str(Path(str(data.dataset_path)).resolve())
    if data.data_files:  # independent of how the paths are written
        files = parse_data_files(data.data_files)
        source = ",".join(f"{key}={'+'.join(str(path.resolve()) for path in files[key])}" for key in sorted(files))
    columns = [f" {flag}={vars(data)[flag]}" for flag in FLAGS if vars(data)[flag] is not None]
    names, prompt = rewards.reward_funcs, load_system_prompt(data)
    if isinstance(prompt, str):
        prompt = PromptTemplate(prompt)
    return {
        "model": model.model_name_or_path,
        "data": "".join([source, *columns]),
        "dataset_config": data.dataset_config,
        "dataset_train_split": data.dataset_train_split,
        "system_prompt": None if prompt is None else {"role": prompt.role, "text": prompt.text},
        "reward_funcs": replace_by_hard_negative(names) if config.vgr_hard_negative else names,
        "reward_model": rewards.reward_model_name_or_path,
        "environment": rewards.environment,
        "lora": [model.lora_r, model.lora_target_modules, model.use_dora] if model.use_peft else None,
    }


def check_output_dir(output_dir: Path, identity: dict[str, Any], resume: str | None, may_repeat: bool = False) -> None:
    """Raise `ConfigError` if a folder has a run in it, unless that run is resumed with the same settings.

    Args:
        output_dir: folder of the run.
        identity: settings by `run_identity`.
        resume: checkpoint to resume from by `resume_mode`; None: a new run.
        may_repeat: whether the same run may overwrite itself.
    """
    refuse_unwritable(output_dir, "output_dir", is_folder=True)
    file = output_dir / IDENTITY_FILE
    before = read_object(file)
    if not before and file.exists():
        raise ConfigError(f"{file} is no object of JSON: choose another output_dir.")
    if resume is None and not (may_repeat and before == identity):
        # A run that failed before its first checkpoint leaves nothing to lose.
        present = [path.name for name in (*TRACES, "checkpoint-*") for path in sorted(output_dir.glob(name))]
        if present:
            cure = "" if may_repeat else ", or continue that run with --resume_from_checkpoint latest"
            raise ConfigError(f"output_dir {output_dir} holds a run ({present[0]}): choose another one{cure}.")
    for name, value in identity.items() if resume is not None else ():
        if before.get(name, value) != value:
            differs = f"has a run in it with {name} {before[name]!r}, not {value!r}"
            raise ConfigError(f"output_dir {output_dir} {differs}: continue it with the same, or choose another one.")


def write_identity(output_dir: Path, identity: dict[str, Any]) -> None:
    """Write `run.json`, from which a later start recognises the run in the folder."""
    write_atomic(output_dir / IDENTITY_FILE, (json.dumps(identity, indent=2) + "\n").encode())


def suggest_options(parameters: float, memory: float, device: str) -> dict[str, str]:
    """Return options for a first training that fits in memory and takes minutes, or up to an hour on a GPU.

    Args:
        parameters: number of parameters of the model.
        memory: memory of the device, in bytes.
        device: `cpu` or `cuda`.

    Raises:
        ConfigError: the weights alone take more than 70 % of the memory.
    """
    on_cpu, is_tiny = device == "cpu", parameters < TINY_MODEL_PARAMETERS
    adapts = 16 * parameters > memory / 2  # weights, gradients and two moments in float32, and as much for activations
    weights = parameters * (4 if on_cpu or not adapts else 2)
    if weights > 0.7 * memory:
        size = f"{parameters / 1e9:.1f} billion parameters, {weights / 2**30:.0f} GiB"
        raise ConfigError(f"The model has {size}, but the {device} has {memory / 2**30:.0f} GiB: choose a smaller one.")
    free = memory - weights * (1 if adapts else 4)
    batch = 64 if is_tiny else 8 if free > LARGE_MEMORY else 4 if free > LARGE_MEMORY / 4 else 2
    steps = 80 if on_cpu else 100
    fitting: dict[str, Any] = {
        "dtype": "bfloat16" if adapts and not on_cpu else "float32", "max_completion_length": 64 if on_cpu else 512,
        "learning_rate": "3e-4" if is_tiny else "1e-5" if adapts else "1e-6", "max_pixels": 1_000_000,
        "num_generations": 8, "per_device_train_batch_size": batch, "gradient_accumulation_steps": 64 // batch,
        "warmup_steps": 3, "max_steps": steps, "save_steps": steps // 2, "save_total_limit": 1, "max_test_rows": 64,
        "eval_strategy": "steps", "eval_steps": steps, "eval_on_start": "true", "num_generations_eval": 2,
        "per_device_eval_batch_size": 2 * batch,
    }  # fmt: skip
    if on_cpu:
        fitting |= {"use_cpu": "true", "bf16": "false", "gradient_checkpointing": "false"}
    if adapts:
        fitting |= {"use_peft": "true", "lora_target_modules": "q_proj,k_proj,v_proj,o_proj"}
    return {name: str(value) for name, value in fitting.items()}


def final_metrics(trainer: DAPOTrainer) -> dict[str, float]:
    """Return the evaluation metrics of the trained model; empty without evaluation data."""

    def logged() -> dict[str, float]:
        entries = (entry for entry in trainer.state.log_history if entry["step"] == trainer.state.global_step)
        return {name: value for entry in entries for name, value in entry.items() if name.startswith("eval_")}

    if trainer.eval_dataset is not None and (trainer.args.load_best_model_at_end or not logged()):
        trainer.evaluate()
    return logged()


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
    sizes = [(getattr(weight, "ds_numel", weight.numel()), weight.requires_grad) for weight in model.parameters()]
    trained = f"{sum(size for size, trains in sizes if trains):,} of {sum(size for size, _ in sizes):,} parameters"
    data = f"training {count_rows(trainer.train_dataset)}, evaluation {count_rows(trainer.eval_dataset)}"
    per_step = args.per_device_train_batch_size * args.world_size * args.gradient_accumulation_steps
    uses = args.steps_per_rollout
    rollout = f"{args.prompts_per_rollout} prompts x {args.num_generations} completions = {args.generation_batch_size}"
    saved = f"a checkpoint every {args.save_steps:g} steps" if args.save_strategy == "steps" else "the model at the end"
    before = args.eval_batch_size * trainer.accelerator.num_processes
    starts = checkpoint is None and needs_record_before_training(args, trainer.eval_dataset)
    step = f"each rollout ({rollout}) is used for {uses:g} step{'s' * (uses != 1)}"
    rows: list[tuple[str, Any]] = [
        ("model", f"{model.config._name_or_path or type(model).__name__} ({type(model).__name__}), trains {trained}"),
        ("processes", describe_processes(trainer.accelerator)),
        ("data", f"{source}: {data}"),
        ("recipe", recipe),
        ("rewards", _format_rewards(trainer.named_reward_weights(), args.early_reward_weights)),
        ("options", _format_options(args, [*PLAN_OPTIONS, *["metric_for_best_model"] * args.load_best_model_at_end])),
        ("tools", ", ".join(tool.__name__ for tool in trainer.tools)),
        ("changed", _format_options(args, switched_on)),
        ("passes", verbose and str(trainer.run.features)),
        ("images", verbose and str(trainer.run.vision_cache)),
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
    """Format the number of rows of a data set."""
    return "none" if dataset is None else f"{len(dataset):,} rows" if isinstance(dataset, Sized) else "a stream"


def _format_rewards(weights_by_name: Mapping[str, float], early_weights: Sequence[float] | None) -> str:
    early: Sequence[float | None] = early_weights or [None] * len(weights_by_name)
    rows = zip(weights_by_name, weights_by_name.values(), early, strict=True)
    return ", ".join(f"{name} x {late:g}{'' if first is None else f' (early {first:g})'}" for name, late, first in rows)


def _format_options(args: DAPOConfig, names: Iterable[str]) -> str:
    values = {name: vars(args)[name] for name in names}
    return ", ".join(f"{name}={value.value if isinstance(value, Enum) else value}" for name, value in values.items())


DRY_RUN_PROMPTS = 3


def dry_run(config: DAPOConfig, source: str, build: Callable[[], DAPOTrainer], how: RunArguments) -> None:
    """Run two small steps; print completions, and an estimate of the whole run's time and memory by the second.

    Args:
        config: options of the run; changed in place so that the step is small and writes to a temporary folder.
        source: data source, as text.
        build: makes the trainer from `config`.
        how: flags of the command; `verbose` and `recipe` are read.
    """
    whole = copy(config)
    with tempfile.TemporaryDirectory(prefix="vgr_trl_dry_run_") as folder:
        _shrink_config(config, folder)
        trainer = build()
        trainer.remove_callback(PrinterCallback)
        trainer.args.eval_strategy = "no"
        if trainer.accelerator.is_main_process:
            print_plan(describe_run(trainer, source, None, how.verbose, how.recipe)[:-2])  # not its steps and output
        clock = _StepClock()
        trainer.add_callback(clock)
        trainer.train(resume_from_checkpoint=False)
        trainer.accelerator.wait_for_everyone()
        if not trainer.accelerator.is_main_process:
            return
        *_, record = read_run(folder).records("train")
        print_record(record, prompt_length=300)
    for group, images in {completion.group: completion.images for completion in record.completions}.items():
        sizes = [f"{image.width}x{image.height} px, {'x'.join(map(str, image.grid or '?'))} tokens" for image in images]
        print(f"prompt {group}: {'; '.join(sizes) or 'no image'}")
    per_step = whole.per_device_train_batch_size * whole.world_size * whole.gradient_accumulation_steps
    small, steps = int(config.generation_batch_size or 1), whole.max_steps
    if steps <= 0:
        rows = len(trainer.train_dataset)
        steps = int(whole.num_train_epochs * (rows // whole.prompts_per_rollout) * whole.steps_per_rollout)
    where, peak = "CPU", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    if torch.cuda.is_available():
        memory = trainer.rows_per_pass.memory  # has reset the peak
        where, peak = "GPU", max(torch.cuda.max_memory_allocated(), 0 if memory is None else memory.peak)
    print(f"measured: {small} completions of at most {config.max_completion_length} tokens in {clock.seconds:.1f} s, "
          f"memory {peak / 2**30:.2f} GiB per process ({where})\n"
          f"total: about {format_duration(steps * per_step * clock.seconds / small)} for {steps} steps of "
          f"{per_step} completions, without evaluations and checkpoints")  # fmt: skip


class _StepClock(TrainerCallback):
    """Measures the newest step: the first also compiles, selects kernels and allocates memory."""

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Start the clock."""
        self._started = time.monotonic()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Keep the seconds since the step began."""
        self.seconds = time.monotonic() - self._started


def _shrink_config(config: DAPOConfig, folder: str) -> None:
    """Reduce the options to two steps with a few whole groups that write only to `folder`."""
    batch, group = config.per_device_train_batch_size * config.world_size, config.num_generations or 1
    whole = math.lcm(batch, group)  # the fewest completions that are whole groups
    parts = min(math.ceil(DRY_RUN_PROMPTS * group / whole) * whole // batch, config.steps_per_generation or 1)
    config.steps_per_generation = config.gradient_accumulation_steps = parts
    config.generation_batch_size = batch * parts
    config.num_iterations, config.max_steps = 1, 2
    config.output_dir, config.report_to, config.push_to_hub = folder, [], False
    config.save_strategy, config.load_best_model_at_end, config.logging_steps = "no", False, 1
    config.rollout_log_steps, config.rollout_log_samples = 1, 2 * DRY_RUN_PROMPTS
    config.markdown_logs = config.log_completions = config.colorize_output = False
    config.rollout_log_path = config.eval_log_path = None
    config.attention_diag_log_path = config.token_weights_log_path = None
