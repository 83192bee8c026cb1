"""`vgr-trl train`: train a vision-language model with DAPO."""

import json
import logging
import os
import re
import resource
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from functools import cache, partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from datasets import IterableDataset
from rich.console import Console
from rich.table import Table
from transformers import (
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_utils import IntervalStrategy
from trl import GRPOConfig, ModelConfig, get_peft_config, get_quantization_config

from vgr_trl.callbacks import EXIT_STATUS, SaveOnTermination
from vgr_trl.checkpoints import TRACES, how_to_go_on, refuse_finished, resolve_checkpoint, resume_mode
from vgr_trl.cli.arguments import DataArguments, DefaultRewards, RewardArguments, RunArguments, one_sentence
from vgr_trl.cli.flags import config_values, flags_in, recipe_options
from vgr_trl.cli.loading import image_root, load_processor, load_rows, refuse_missing_folder, tested
from vgr_trl.cli.parsing import parse
from vgr_trl.dapo_config import DAPOConfig
from vgr_trl.data.columns import FLAGS, image_columns, images_of, undecoded
from vgr_trl.data.load import hold_out
from vgr_trl.data.read import parse_data_files, readable
from vgr_trl.data.rows import SkippedRow, append_skipped, report_skipped
from vgr_trl.options import changed_options
from vgr_trl.patches import close_group_at_exit, let_gloo_finish
from vgr_trl.prepare import reads_boxes
from vgr_trl.reporting.markdown import duration, step_line
from vgr_trl.reporting.recorder import RecordBefore, is_recorded_before
from vgr_trl.reporting.records import Completion, read_run, refuse_unwritable
from vgr_trl.resume import load_trained, only_lacks_its_model
from vgr_trl.rewards.loading import hardened, load_rewards, reads_solution
from vgr_trl.trainer import DAPOTrainer
from vgr_trl.utils import CollapseError, ConfigError, DataError, MissingSplitError, printable, write_whole

# ---------------------------------------------------------------------------------------------------------------------
# What a run evaluates on: the split for it, rows held out where there is none, or nothing, and why.


logger = logging.getLogger(__name__)

Load = Callable[[], tuple[Any, list[SkippedRow]]]


@dataclass
class Evaluated:
    """Rows to train and to evaluate on, those left out of the latter, and what the start says about it."""

    train: Any
    test: Any = None
    skipped: list[SkippedRow] = field(default_factory=list)
    said: str | None = None


def is_stated(name: str, argv: Sequence[str] | None) -> bool:
    """Return whether an option is given by a flag, in the file of `--config`, or by a recipe."""
    arguments = sys.argv[1:] if argv is None else argv
    return name in dict(flags_in(arguments)) | config_values(arguments) | recipe_options(arguments)


def rows_to_evaluate(data: DataArguments, config: DAPOConfig, train: Any, load: Load, follows: bool) -> Evaluated:
    """Return what is evaluated on, and let `eval_strategy` follow where the user has left it open.

    Args:
        config: the options of the run; `eval_strategy` is changed.
        load: gives the rows of the split to evaluate on.
        follows: whether `eval_strategy` was not stated, so that it is on where a hub data set or a folder has rows for
            it.

    Raises:
        DataError: evaluation is asked for, and there are no rows for it.
    """
    asked = config.eval_strategy != "no"
    split = data.dataset_test_split
    has_own = data.test_dataset is not None
    if not asked and not has_own and data.data_files and split in parse_data_files(data.data_files):
        because = "because eval_strategy is no: add --eval_strategy steps."
        return Evaluated(train, said=f"{split}= is given, but nothing is evaluated, {because}")
    if not asked and (not follows or (data.data_files and not has_own) or data.dataset_streaming):
        return Evaluated(train)
    if not asked and (why := _why_not(config)) is not None:
        return Evaluated(train, said=f"Nothing is evaluated, because {why}")
    try:
        found = _loaded(data, config, train, load)
    except DataError as error:
        if asked:
            raise
        return Evaluated(train, said=f"Nothing is evaluated: {error}")
    if not asked:
        config.eval_strategy, config.do_eval = IntervalStrategy.EPOCH, True
        known = found.said or f"The data have the split {split}."
        found.said = f"{known} It is evaluated every epoch (not with --eval_strategy no)."
    return found


def _loaded(data: DataArguments, config: DAPOConfig, train: Any, load: Load) -> Evaluated:
    try:
        return Evaluated(train, *load())
    except MissingSplitError as error:
        if data.test_dataset is not None:
            raise
        if data.dataset_streaming:
            raise DataError(f"{error} A stream cannot be split: name one, or drop --eval_strategy.") from error
    kept, test = hold_out(train, config.seed, image_root(data, data.dataset_train_split))
    said = (
        f"The data have no split {data.dataset_test_split}: {len(test)} of {len(train)} rows are held out of training "
        f"for it, by image and seed {config.seed}."
    )
    return Evaluated(kept, test.select(range(min(len(test), data.max_test_rows or len(test)))), said=said)


def _why_not(config: DAPOConfig) -> str | None:
    """What TRL refuses where evaluation is asked for."""
    size = config.per_device_eval_batch_size * config.world_size
    generations = config.num_generations_eval or config.num_generations or 1
    if size % generations == 0:
        return None
    return (
        f"a batch of {size} completions (per_device_eval_batch_size) is no multiple of {generations} completions per "
        "prompt (eval_num_generations): change one of the two."
    )


# ---------------------------------------------------------------------------------------------------------------------
# The trainer that the flags of `vgr-trl train` describe: its rewards, its rows and its model, loaded and checked.


FIRST_ROWS = 16  # of a stream, which say whether it has images


def build_trainer(
    data: DataArguments, rewards: RewardArguments, config: DAPOConfig, model: ModelConfig, eval_follows: bool
) -> DAPOTrainer:
    """Return the trainer of a run, its data loaded; say on the main process which rows and options are left out.

    Raises:
        ConfigError, DataError, RewardError: an option, the data or a reward cannot be used.
    """
    if data.dataset_streaming and config.max_steps <= 0:
        raise ConfigError("dataset_streaming is on, so the number of steps is not known: give max_steps.")
    reward_funcs = _reward_functions(rewards, config)
    skipped_file = Path(config.output_dir or "trainer_output") / "skipped.jsonl"
    on_skipped = partial(append_skipped, path=skipped_file) if config.process_index == 0 else lambda row: None
    processor = cache(
        partial(load_processor, str(model.model_name_or_path), model.model_revision, config.trust_remote_code)
    )
    load = partial(
        load_rows,
        needs_solution=any(map(reads_solution, reward_funcs)),
        on_skipped=on_skipped,
        processor=processor,
        boxes=reads_boxes(config, reward_funcs),
    )
    order = config.seed if config.shuffle_dataset else None
    train_rows, skipped = load(data, data.dataset_train_split, limit=data.max_train_rows, shuffle_seed=order)
    if data.dataset_streaming:
        config.shuffle_dataset = False  # TRL's buffer would hold a thousand rows with decoded images
    load_test = partial(load, tested(data), data.dataset_test_split, limit=data.max_test_rows)
    evaluated = rows_to_evaluate(data, config, train_rows, load_test, eval_follows)
    skipped += evaluated.skipped
    reward_funcs, left_out = _without_vgr(rewards, config, reward_funcs, evaluated.train)
    if config.process_index == 0:
        for said in filter(None, (evaluated.said, left_out, _idle_adapter(model))):
            print(said, file=sys.stderr)
        report_skipped(skipped, skipped_file)
    loading = {"revision": model.model_revision, "attn_implementation": model.attn_implementation, "dtype": model.dtype}
    if isinstance(config.model_init_kwargs, str):
        raise ConfigError(f"model_init_kwargs is {config.model_init_kwargs!r}: give a JSON object.")
    config.model_init_kwargs = loading | (config.model_init_kwargs or {})
    return DAPOTrainer(
        model=model.model_name_or_path,
        reward_funcs=reward_funcs,
        args=config,
        train_dataset=evaluated.train,
        eval_dataset=evaluated.test,
        processing_class=processor(),
        quantization_config=get_quantization_config(model),
        peft_config=get_peft_config(model),
    )


def _reward_functions(rewards: RewardArguments, config: DAPOConfig) -> list[Any]:
    """The reward functions of a run, and before them the reward model, if there is one."""
    if isinstance(rewards.reward_funcs, DefaultRewards):
        rewards.reward_funcs = DefaultRewards.of_run(config.reward_weights or config.early_reward_weights)
    functions: list[Any] = load_rewards(
        rewards.reward_funcs,
        max_completion_length=config.max_completion_length,
        soft_punish_cache=config.soft_punish_cache,
        files=rewards.file_options(),
        options=rewards.plugin_options,
    )
    if rewards.reward_model_name_or_path:
        refuse_missing_folder(rewards.reward_model_name_or_path)
        functions.insert(0, rewards.reward_model_name_or_path)
    return functions


def _without_vgr(
    rewards: RewardArguments, config: DAPOConfig, functions: list[Any], rows: Any
) -> tuple[list[Any], str | None]:
    """Return the reward functions, the default ones without `vgr` where no row has an image, and a sentence on that."""
    names = rewards.reward_funcs
    wanted = config.vgr_hard_negative or config.attention_reward_scale != "none"
    if not isinstance(names, DefaultRewards) or wanted or _has_images(rows):
        return functions, None
    offset = len(functions) - len(names)
    place = names.index("vgr") + offset
    for option in ("reward_weights", "early_reward_weights"):
        weights = getattr(config, option)
        if weights is not None and len(weights) == len(functions):
            setattr(config, option, [weight for number, weight in enumerate(weights) if number != place])
    kept = [function for number, function in enumerate(functions) if number != place]
    return kept, "The data have no images: the reward vgr, which needs them, is left out, and its weight with it."


def _idle_adapter(model: ModelConfig) -> str | None:
    """Which options of an adapter are given without one."""
    of_adapters = ("lora_", "use_rslora", "use_dora")
    idle = [name for name in changed_options(model) if name.startswith(of_adapters)]
    if model.use_peft or not idle:
        return None
    names = f"{' and '.join(idle)} {'is' if len(idle) == 1 else 'are'}"
    return f"{names} without effect because use_peft is False, so all weights train: add --use_peft."


def _has_images(rows: Any) -> bool:
    if isinstance(rows, IterableDataset):
        return any(map(images_of, rows.take(FIRST_ROWS)))
    return bool(image_columns(rows)) and any(map(images_of, undecoded(rows.with_format(None))))


def source_of(data: DataArguments) -> str:
    """Return what names the data: a name on the hub, a folder or files."""
    return str(data.dataset_name or data.dataset_path or data.data_files)


def separate_lora_modules(model: ModelConfig) -> None:
    """Take commas between names, and spaces, as separators; a text with other signs is a pattern of PEFT's.

    TRL turns a list of one module into a text, which PEFT reads as a pattern for the whole name.
    """
    modules = model.lora_target_modules
    if isinstance(modules, str) and re.fullmatch(r"[\w.]+", modules.replace(",", "").replace(" ", "")):
        modules = [modules]
    if isinstance(modules, list):
        names = [name for text in modules for name in re.split(r"[,\s]+", text.strip()) if name]
        model.lora_target_modules = names


# ---------------------------------------------------------------------------------------------------------------------
# What a run is going to do, in one screen, before it does it.


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


# ---------------------------------------------------------------------------------------------------------------------
# `--dry_run`: everything is loaded, a few prompts go through one step, and nothing stays on disk.


PROMPTS = 3
SHOWN = 300  # characters of a prompt or completion
QUANTITIES = ("vgr", "aei_vision", "mdi_balance")


@dataclass(frozen=True)
class Whole:
    """A run as its options say, beside which the dry run is a part.

    Attributes:
        completions: of a rollout, on all processes.
        per_step: completions that an optimizer step trains on.
        rows: of the data; None: a stream.
        max_steps: as the options say; 0 or less: epochs count.
        epochs: over the data.
        passes: optimizer steps of a rollout.
        prompts: of a rollout.
    """

    completions: int
    per_step: int
    rows: int | None
    max_steps: int
    epochs: float
    passes: float
    prompts: int

    @property
    def steps(self) -> int | None:
        """Optimizer steps; None for a stream without `max_steps`."""
        if self.max_steps > 0:
            return self.max_steps
        return None if self.rows is None else int(self.epochs * (self.rows // self.prompts) * self.passes)


def dry_run(config: DAPOConfig, source: str, build: Callable[[], DAPOTrainer]) -> None:
    """Build a trainer, let it make one small step, and print what came out and what the whole run would take.

    Args:
        config: of the run; it is changed, so that the step is small and writes to a folder that is removed.
        build: makes the trainer from `config`.
    """
    with tempfile.TemporaryDirectory(prefix="vgr_trl_dry_run_") as folder, _small(config, folder) as sizes:
        trainer = build()
        rows = len(trainer.train_dataset) if hasattr(trainer.train_dataset, "__len__") else None
        whole = Whole(rows=rows, **sizes)
        for callback in (PrinterCallback, ProgressCallback):
            trainer.remove_callback(callback)
        trainer.args.eval_strategy = "no"
        if trainer.accelerator.is_main_process:
            print_plan([row for row in describe_run(trainer, source, None) if row[0] not in _MISLEADING])
        started = time.monotonic()
        trainer.train()
        seconds = time.monotonic() - started
        trainer.accelerator.wait_for_everyone()
        if not trainer.accelerator.is_main_process:
            return
        (record,) = read_run(folder).records("train")
        for line in [*shown(record.completions), *estimates(whole, config, seconds, _peak(), _row_bytes(trainer))]:
            print(line)


_MISLEADING = ("rollout", "step", "steps", "output")  # of the small step


@contextmanager
def _small(config: DAPOConfig, folder: str) -> Iterator[dict[str, Any]]:
    """Change the options to those of the small step; give the sizes of the whole run."""
    batch, group = config.per_device_train_batch_size * config.world_size, config.num_generations or 1
    accumulated, generated = config.gradient_accumulation_steps, config.steps_per_generation or 1
    sizes = {
        "completions": config.generation_batch_size or batch,
        "per_step": batch * accumulated,
        "max_steps": config.max_steps,
        "epochs": config.num_train_epochs,
        "passes": generated * config.num_iterations / accumulated,
        "prompts": config.prompts_per_rollout,
    }
    fitting = [parts for parts in range(1, generated + 1) if batch * parts % group == 0]
    enough = [parts for parts in fitting if batch * parts >= PROMPTS * group]
    parts = (enough or fitting[-1:] or [generated])[0]
    config.steps_per_generation = config.gradient_accumulation_steps = parts
    config.generation_batch_size = batch * parts
    config.num_iterations, config.max_steps = 1, 1
    config.output_dir, config.report_to, config.push_to_hub = folder, [], False
    config.save_strategy, config.load_best_model_at_end, config.logging_steps = "no", False, 1
    config.rollout_log_steps, config.rollout_log_samples = 1, 2 * PROMPTS
    config.markdown_logs = config.log_completions = config.colorize_output = False
    config.rollout_log_path = config.eval_log_path = None
    config.attention_diag_log_path = config.token_weights_log_path = None
    yield sizes


def shown(completions: Sequence[Completion]) -> list[str]:
    """Return the first completions of the first prompts, with what they earned and what was measured."""
    lines = []
    for group, members in groupby(completions, key=lambda completion: completion.group):
        of_prompt = list(members)
        first = of_prompt[0]
        images = ", ".join(f"{image.width}x{image.height} px" + _tokens(image.grid) for image in first.images)
        lines += ["", f"prompt {group + 1}: {images or 'no image'}; right: {first.solution}", _indented(first.prompt)]
        for completion in of_prompt:
            rewards = ", ".join(f"{name} {_number(value)}" for name, value in completion.rewards.items())
            lines += ["  completion", _indented(completion.text)]
            lines.append(
                f"    {rewards}; reward {_number(completion.reward)}; advantage {_number(completion.advantage)}"
            )
            if completion.metrics:
                lines.append(f"    {_signals(completion.metrics)}")
    return lines


def estimates(whole: Whole, config: DAPOConfig, seconds: float, peak: int, row_bytes: int) -> list[str]:
    """Return lines on the memory and the time of the whole run.

    Args:
        config: of the small step.
        seconds: of the small step, the first, in which kernels are chosen and memory is taken.
        peak: bytes of memory of this process at most, during the small step.
        row_bytes: keys and values of one completion of full length, of which a whole rollout holds more.
    """
    small = int(config.generation_batch_size or 1)
    more = max(whole.completions - small, 0) // config.world_size
    step = seconds * whole.per_step / small
    gib = 2**30
    lines = [
        "",
        f"measured: {small} completions of at most {config.max_completion_length} tokens in {seconds:.1f} s, "
        f"memory {peak / gib:.2f} GiB per process ({'GPU' if torch.cuda.is_available() else 'CPU'})",
        f"memory: about {(peak + more * row_bytes) / gib:.2f} GiB per process with the {whole.completions} completions "
        "of a whole rollout",
        f"time per step: at most about {duration(step)} ({whole.per_step} completions)",
    ]
    total = whole.steps
    return [*lines, f"total: at most about {duration(total * step)} for {total} steps" if total else "total: not known"]


def _peak() -> int:
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _row_bytes(trainer: DAPOTrainer) -> int:
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


def _tokens(grid: tuple[int, int] | None) -> str:
    return "" if grid is None else f" ({grid[0]}x{grid[1]} tokens)"


def _indented(text: str) -> str:
    cut = text if len(text) <= SHOWN else f"{text[:SHOWN]} […]"
    return "\n".join(f"    {line}" for line in printable(cut).splitlines() or [""])


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


# ---------------------------------------------------------------------------------------------------------------------
# The folder of a run: whose it is.


RUN_FILE = "run.json"


def identity_of(
    data: DataArguments, rewards: RewardArguments, config: DAPOConfig, model: ModelConfig
) -> dict[str, Any]:
    """Return what must be the same for a run to be continued."""
    return {
        "model": model.model_name_or_path,
        "data": _resolved(data),
        "dataset_config": data.dataset_config,
        "dataset_train_split": data.dataset_train_split,
        "reward_funcs": hardened(rewards.reward_funcs) if config.vgr_hard_negative else rewards.reward_funcs,
        "reward_model": rewards.reward_model_name_or_path,
        "lora": [model.lora_r, model.lora_target_modules, model.use_dora] if model.use_peft else None,
    }


def _resolved(data: DataArguments) -> str:
    """The source of the data, however its path is spelled, and which of its columns are read."""
    named = "".join(f" {flag}={getattr(data, flag)}" for flag in FLAGS.values() if getattr(data, flag) is not None)
    if data.data_files:
        files = parse_data_files(data.data_files)
        resolved = {split: "+".join(str(path.resolve()) for path in files[split]) for split in sorted(files)}
        return ",".join(f"{split}={paths}" for split, paths in resolved.items()) + named
    return str(data.dataset_name or Path(str(data.dataset_path)).resolve()) + named


def claim(output_dir: Path, identity: dict[str, Any], resume: str | None) -> None:
    """Refuse a folder that holds a run, unless that is continued with the same model, data set and rewards.

    Args:
        identity: what makes the run the same one: model, data, reward functions.
        resume: as `resume_mode` returns it.

    Raises:
        ConfigError: naming what is there, or what differs.
    """
    refuse_unwritable(output_dir, "output_dir", is_folder=True)
    previous = output_dir / RUN_FILE
    if resume is None:
        if traces := _traces(output_dir):
            raise ConfigError(
                f"output_dir {output_dir} holds a run ({traces[0].name}): choose another output_dir, or continue that "
                "run with --resume_from_checkpoint latest."
            )
    elif previous.exists():
        for name, before in _read(previous).items():
            if name in identity and before != identity[name]:
                raise ConfigError(
                    f"output_dir {output_dir} holds a run with {name} {before!r}, but {identity[name]!r} was given: "
                    "continue it with the same, or choose another output_dir."
                )


def claim_again(output_dir: Path, identity: dict[str, Any]) -> None:
    """Refuse a folder that cannot be written to or holds another run than one of `identity`, which may be repeated.

    Raises:
        ConfigError: naming what is there.
    """
    refuse_unwritable(output_dir, "output_dir", is_folder=True)
    run_file = output_dir / RUN_FILE
    if (traces := _traces(output_dir)) and not (run_file.exists() and _read(run_file) == identity):
        raise ConfigError(
            f"output_dir {output_dir} holds another run ({traces[0].name}): choose another output_dir, or empty it."
        )


def _traces(output_dir: Path) -> list[Path]:
    """What a run leaves behind that must not be overwritten; one that failed before its first checkpoint left none."""
    return [output_dir / name for name in TRACES if (output_dir / name).exists()] + sorted(
        output_dir.glob("checkpoint-*")
    )


def _read(file: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{file} cannot be read ({error}): remove it to continue the run unchecked.") from error


def write_identity(output_dir: Path, identity: dict[str, Any]) -> None:
    """Write `run.json`, from which a later start sees whose folder it is."""
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"output_dir {output_dir} cannot be made ({error}): choose another.") from error
    write_whole(output_dir / RUN_FILE, (json.dumps(identity, indent=2) + "\n").encode())


# ---------------------------------------------------------------------------------------------------------------------
# The evaluation at the end of a run, which its last step may have made already.


class LastEvaluation(TrainerCallback):
    """Keeps the metrics of the newest step that was evaluated, of all parts of the data."""

    def __init__(self) -> None:
        self.step, self.metrics = -1, dict[str, float]()

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        """Add the metrics of a part of the data, or begin anew with those of another step."""
        if state.global_step != self.step:
            self.step, self.metrics = state.global_step, {}
        self.metrics |= given["metrics"]

    def of_final_model(self, trainer: DAPOTrainer) -> dict[str, float]:
        """Return the metrics of the model as it is once trained; nothing where there are no data to evaluate on."""
        if trainer.eval_dataset is None:
            return {}
        if self.step != trainer.state.global_step or trainer.args.load_best_model_at_end:
            trainer.evaluate()
        return self.metrics


# ---------------------------------------------------------------------------------------------------------------------
# The terminal while training: one line a step, in place of a dictionary of a hundred numbers.


WINDOW = 20  # logs over which the seconds of a step are averaged


class StepLines(TrainerCallback):
    """Prints `step_line` whenever something of training is logged, and one line for an evaluation."""

    def __init__(self) -> None:
        self._times: deque[tuple[int, float]] = deque(maxlen=WINDOW)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock."""
        self._times.append((state.global_step, time.monotonic()))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Print a line on the main process."""
        if not logs or not state.is_world_process_zero:
            return
        if "eval_reward" in logs:
            numbers = {"reward": "eval_reward", "accuracy": "eval_rewards/accuracy_reward/mean"}
            shown = [f"{name} {logs[key]:.3f}" for name, key in numbers.items() if key in logs]
            print(f"evaluation at step {state.global_step}  {'  '.join(shown)}", flush=True)
        elif "loss" in logs:
            self._times.append((state.global_step, time.monotonic()))
            (first, started), (last, now) = self._times[0], self._times[-1]
            seconds = (now - started) / (last - first) if last > first else None
            print(step_line(state.global_step, state.max_steps, logs, seconds), flush=True)


def print_steps_as_lines(trainer: Trainer) -> None:
    """Let `trainer` print lines instead of its dictionaries and its bar; files and trackers get all numbers as ever."""
    for callback in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(callback)
    trainer.add_callback(StepLines())


METRICS = "metrics.json"


def main(argv: Sequence[str] | None = None) -> int:
    """Parse flags (or `--config x.yaml`, which flags override), train, and return 0."""
    groups = (RunArguments, DataArguments, RewardArguments, DAPOConfig, ModelConfig)
    how, data, rewards, config, model = parse(groups, "train", argv)
    close_group_at_exit()
    eval_follows = not is_stated("eval_strategy", argv)
    if how.dry_run:
        _check(model)
        with one_sentence():
            dry_run(config, source_of(data), partial(build_trainer, data, rewards, config, model, eval_follows))
        return 0
    trainer = train(data, rewards, config, model, eval_follows)
    return EXIT_STATUS if was_terminated(trainer) else 0


def was_terminated(trainer: DAPOTrainer) -> bool:
    """Whether SIGTERM has ended the training."""
    return any(isinstance(each, SaveOnTermination) and each.stopped for each in trainer.callback_handler.callbacks)


def _check(model: ModelConfig) -> None:
    if not model.model_name_or_path:
        raise ConfigError("model_name_or_path is missing: give a checkpoint folder or a hub name.")
    separate_lora_modules(model)


def train(
    data: DataArguments,
    rewards: RewardArguments,
    config: DAPOConfig,
    model: ModelConfig,
    eval_follows: bool = False,
) -> DAPOTrainer:
    """Train as the four groups of options say, save model, state and metrics to `output_dir`, return the trainer.

    With `eval_follows` a data set of the hub or a folder is evaluated on where it can be, though `eval_strategy` is no.

    Raises:
        ConfigError, DataError, RewardError: an option, the data or a reward cannot be used; nothing was trained.
        CollapseError: `stop_on_collapse` ended the training.
    """
    _check(model)
    output_dir = Path(config.output_dir or "trainer_output")
    identity = identity_of(data, rewards, config, model)
    resume = resume_mode(config.resume_from_checkpoint)
    claim(output_dir, identity, resume)
    checkpoint = resolve_checkpoint(resume, output_dir)

    with one_sentence():
        trainer = build_trainer(data, rewards, config, model, eval_follows)
    trainer.data_source = source_of(data)
    written_last = output_dir / METRICS
    is_trained = only_lacks_its_model(trainer, checkpoint, total_steps(trainer), written_last)
    if not is_trained:
        refuse_finished(checkpoint, total_steps(trainer))
    print_steps_as_lines(trainer)
    trainer.add_callback(last_evaluation := LastEvaluation())
    trainer.add_callback(RecordBefore(trainer, trainer.recorder.evaluated))
    trainer.add_callback(SaveOnTermination(trainer.accelerator))
    if trainer.accelerator.is_main_process:
        write_identity(output_dir, identity)
        print_plan(describe_run(trainer, source_of(data), checkpoint))
    trainer.accelerator.wait_for_everyone()  # all have looked for what is written last
    if is_trained:
        load_trained(trainer, str(checkpoint))
    else:
        written_last.unlink(missing_ok=True)
        try:
            with readable(source_of(data), "the data") if data.dataset_streaming else nullcontext():
                trainer.train(resume_from_checkpoint=checkpoint)
        except KeyboardInterrupt as interrupted:
            raise KeyboardInterrupt(how_to_go_on(output_dir)) from interrupted
    if trainer.state.global_step == 0:
        raise DataError("Nothing was trained: the data gave no whole rollout; see the rows left out above.")
    if was_terminated(trainer):
        if trainer.accelerator.is_main_process:
            print(f"Stopped by SIGTERM at step {trainer.state.global_step}: --resume_from_checkpoint continues.")
        _end(trainer)
        return trainer
    if config.stop_on_collapse and trainer.collapse_watch.found is not None:
        trainer.save_state()
        _end(trainer)
        raise CollapseError(f"{trainer.collapse_watch.found} Training was stopped there, and no model was saved.")
    trainer.save_model(str(output_dir))
    trainer.save_state()
    metrics = last_evaluation.of_final_model(trainer)
    if trainer.accelerator.is_main_process:
        write_whole(written_last, (json.dumps(metrics, indent=2) + "\n").encode())
        print(f"The model and its metrics are in {output_dir}; vgr-trl report {output_dir} makes a page of them.")
    _end(trainer)
    return trainer


def _end(trainer: DAPOTrainer) -> None:
    """Finish trackers and the process group."""
    trainer.accelerator.wait_for_everyone()
    let_gloo_finish()
    trainer.accelerator.end_training()  # what `trainer.end` does, which transformers 5.17 has not
