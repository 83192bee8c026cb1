"""`vgr-trl train`: train a vision-language model with DAPO."""

import json
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any

from datasets import IterableDataset
from transformers import PrinterCallback, ProgressCallback, TrainerCallback
from transformers.trainer_utils import IntervalStrategy
from trl import ModelConfig, get_peft_config, get_quantization_config

from vgr_trl.callbacks import EXIT_STATUS, SaveOnTermination
from vgr_trl.checkpoints import (
    TRACES,
    how_to_go_on,
    load_trained,
    only_lacks_its_model,
    refuse_finished,
    resolve_checkpoint,
    resume_mode,
)
from vgr_trl.cli.arguments import DataArguments, DefaultRewards, RewardArguments, RunArguments, one_sentence, parse
from vgr_trl.cli.loading import image_root, load_processor, load_rows, refuse_missing_folder, tested
from vgr_trl.cli.plan import describe_run, dry_run, print_plan, total_steps
from vgr_trl.dapo_config import DAPOConfig
from vgr_trl.data.columns import FLAGS, image_columns, images_of, undecoded
from vgr_trl.data.load import train_test_split
from vgr_trl.data.read import parse_data_files, readable
from vgr_trl.data.rows import SkippedRow, append_skipped, report_skipped
from vgr_trl.options import changed_options
from vgr_trl.patches import close_group_at_exit, let_gloo_finish
from vgr_trl.reporting.markdown import step_line
from vgr_trl.reporting.recorder import RecordBefore
from vgr_trl.reporting.records import refuse_unwritable
from vgr_trl.rewards.loading import hardened, reads_solution
from vgr_trl.trainer import DAPOTrainer
from vgr_trl.utils import CollapseError, ConfigError, DataError, MissingSplitError, write_atomic
from vgr_trl.validate import reads_boxes

RUN_FILE = "run.json"
METRICS = "metrics.json"
FIRST_ROWS = 16  # of a stream, which say whether it has images
WINDOW = 20  # logs over which the seconds of a step are averaged


def main(argv: Sequence[str] | None = None) -> int:
    """Parse flags (or `--config x.yaml`, which flags override), train, and return 0."""
    how, data, rewards, config, model = parse(
        (RunArguments, DataArguments, RewardArguments, DAPOConfig, ModelConfig), "train", argv
    )
    close_group_at_exit()
    if not model.model_name_or_path:
        raise ConfigError("model_name_or_path is missing: give a checkpoint folder or a hub name.")
    separate_lora_modules(model)
    build = partial(build_trainer, data, rewards, config, model, "eval_strategy" not in how.stated)
    if how.dry_run:
        with one_sentence():
            dry_run(config, source_of(data), build)
        return 0
    trainer = train(data, config, identity_of(data, rewards, config, model), build)
    return EXIT_STATUS if was_terminated(trainer) else 0


def train(
    data: DataArguments, config: DAPOConfig, identity: dict[str, Any], build: Callable[[], DAPOTrainer]
) -> DAPOTrainer:
    """Train, save model, state and metrics to `output_dir`, return the trainer.

    Args:
        identity: what must be the same for the run to be continued.
        build: makes the trainer from `config`.

    Raises:
        ConfigError, DataError, RewardError: an option, the data or a reward cannot be used; nothing was trained.
        CollapseError: `stop_on_collapse` ended the training.
    """
    output_dir = Path(config.output_dir or "trainer_output")
    resume = resume_mode(config.resume_from_checkpoint)
    check_output_dir(output_dir, identity, resume)
    checkpoint = resolve_checkpoint(resume, output_dir)
    with one_sentence():
        trainer = build()
    trainer.data_source = source_of(data)
    metrics_file = output_dir / METRICS  # written last
    is_trained = only_lacks_its_model(trainer, checkpoint, total_steps(trainer), metrics_file)
    if not is_trained:
        refuse_finished(checkpoint, total_steps(trainer))
    for callback in (PrinterCallback, ProgressCallback):  # files and trackers get their numbers all the same
        trainer.remove_callback(callback)
    trainer.add_callback(StepLines())
    trainer.add_callback(evaluation := LastEvaluation())
    trainer.add_callback(RecordBefore(trainer))
    trainer.add_callback(SaveOnTermination(trainer.accelerator))
    is_main = trainer.accelerator.is_main_process
    if is_main:
        write_identity(output_dir, identity)
        print_plan(describe_run(trainer, source_of(data), checkpoint))
    trainer.accelerator.wait_for_everyone()  # all have looked for the metrics
    if is_trained:
        load_trained(trainer, str(checkpoint))
    else:
        metrics_file.unlink(missing_ok=True)
        try:
            with readable(source_of(data), "the data") if data.dataset_streaming else nullcontext():
                trainer.train(resume_from_checkpoint=checkpoint)
        except KeyboardInterrupt as interrupted:
            raise KeyboardInterrupt(how_to_go_on(output_dir)) from interrupted
    if trainer.state.global_step == 0:
        raise DataError("Nothing was trained: the data gave no whole rollout; see the rows left out above.")
    collapsed = None
    if was_terminated(trainer):
        if is_main:
            print(f"Stopped by SIGTERM at step {trainer.state.global_step}: --resume_from_checkpoint continues.")
    elif config.stop_on_collapse and (collapsed := trainer.collapse_watch.found) is not None:
        trainer.save_state()
    else:
        trainer.save_model(str(output_dir))
        trainer.save_state()
        metrics = evaluation.of_final_model(trainer)
        if is_main:
            write_atomic(metrics_file, (json.dumps(metrics, indent=2) + "\n").encode())
            print(f"The model and its metrics are in {output_dir}; vgr-trl report {output_dir} makes a page of them.")
    trainer.accelerator.wait_for_everyone()
    let_gloo_finish()
    trainer.accelerator.end_training()  # what `trainer.end` does, which transformers 5.17 has not
    if collapsed is not None:
        raise CollapseError(f"{collapsed} Training was stopped there, and no model was saved.")
    return trainer


def was_terminated(trainer: DAPOTrainer) -> bool:
    """Whether SIGTERM has ended the training."""
    return any(isinstance(each, SaveOnTermination) and each.stopped for each in trainer.callback_handler.callbacks)


def build_trainer(
    data: DataArguments, rewards: RewardArguments, config: DAPOConfig, model: ModelConfig, eval_follows: bool
) -> DAPOTrainer:
    """Return the trainer of a run, its data loaded; say on the main process which rows and options are left out.

    Args:
        eval_follows: a data set of the hub or a folder is evaluated on where it can be, though `eval_strategy` is no.

    Raises:
        ConfigError, DataError, RewardError: an option, the data or a reward cannot be used.
    """
    if data.dataset_streaming and config.max_steps <= 0:
        raise ConfigError("dataset_streaming is on, so the number of steps is not known: give max_steps.")
    if isinstance(config.model_init_kwargs, str):
        raise ConfigError(f"model_init_kwargs is {config.model_init_kwargs!r}: give a JSON object.")
    if isinstance(rewards.reward_funcs, DefaultRewards):
        rewards.reward_funcs = DefaultRewards.of_run(config.reward_weights or config.early_reward_weights)
    reward_funcs = rewards.load(rewards.reward_funcs, config.max_completion_length, config.soft_punish_cache)
    if rewards.reward_model_name_or_path:
        refuse_missing_folder(rewards.reward_model_name_or_path)
        reward_funcs.insert(0, rewards.reward_model_name_or_path)
    skipped_file = Path(config.output_dir or "trainer_output") / "skipped.jsonl"
    processor = cache(
        partial(load_processor, str(model.model_name_or_path), model.model_revision, config.trust_remote_code)
    )
    load = partial(
        load_rows,
        needs_solution=any(map(reads_solution, reward_funcs)),
        on_skipped=partial(append_skipped, path=skipped_file) if config.process_index == 0 else lambda row: None,
        processor=processor,
        boxes=reads_boxes(config, reward_funcs),
    )
    order = config.seed if config.shuffle_dataset else None
    rows, skipped = load(data, data.dataset_train_split, limit=data.max_train_rows, shuffle_seed=order)
    if data.dataset_streaming:
        config.shuffle_dataset = False  # TRL's buffer would hold a thousand rows with decoded images
    load_test = partial(load, tested(data), data.dataset_test_split, limit=data.max_test_rows)
    rows, test_rows, skipped_tests, note = rows_to_evaluate(data, config, rows, load_test, eval_follows)
    reward_funcs, left_out = _without_vgr(rewards, config, reward_funcs, rows)
    if config.process_index == 0:
        for sentence in filter(None, (note, left_out, _unused_adapter_options(model))):
            print(sentence, file=sys.stderr)
        report_skipped([*skipped, *skipped_tests], skipped_file)
    loading = {"revision": model.model_revision, "attn_implementation": model.attn_implementation, "dtype": model.dtype}
    config.model_init_kwargs = loading | (config.model_init_kwargs or {})
    return DAPOTrainer(
        model=model.model_name_or_path,
        reward_funcs=reward_funcs,
        args=config,
        train_dataset=rows,
        eval_dataset=test_rows,
        processing_class=processor(),
        quantization_config=get_quantization_config(model),
        peft_config=get_peft_config(model),
    )


def rows_to_evaluate(
    data: DataArguments,
    config: DAPOConfig,
    train_rows: Any,
    load: Callable[[], tuple[Any, list[SkippedRow]]],
    follows: bool,
) -> tuple[Any, Any, list[SkippedRow], str | None]:
    """Return rows to train and to evaluate on, those left out of the latter, and what the start says about it.

    Args:
        config: the options of the run; `eval_strategy` is set where the user has left it open and there are rows.
        load: gives the rows of the split to evaluate on.
        follows: whether `eval_strategy` was not stated, so that it is on where a hub data set or a folder has rows for
            it.

    Raises:
        DataError: evaluation is asked for, and there are no rows for it.
    """
    asked, split, has_own = config.eval_strategy != "no", data.dataset_test_split, data.test_dataset is not None
    size = config.per_device_eval_batch_size * config.world_size
    generations = config.num_generations_eval or config.num_generations or 1
    note, without = None, (train_rows, None, list[SkippedRow]())
    if not asked:
        if data.data_files and not has_own:
            hint = "is given, but nothing is evaluated, because eval_strategy is no: add --eval_strategy steps."
            return *without, f"{split}= {hint}" if split in parse_data_files(data.data_files) else None
        if not follows or data.dataset_streaming:
            return *without, None
        if size % generations:  # which TRL refuses where evaluation is asked for
            return *without, (
                f"Nothing is evaluated, because a batch of {size} completions (per_device_eval_batch_size) is no "
                f"multiple of {generations} completions per prompt (eval_num_generations): change one of the two."
            )
    try:
        try:
            test_rows, skipped = load()
        except MissingSplitError as error:
            if has_own:
                raise
            if data.dataset_streaming:
                raise DataError(f"{error} A stream cannot be split: name one, or drop --eval_strategy.") from error
            count, skipped = len(train_rows), []
            root = image_root(data, data.dataset_train_split)
            train_rows, test_rows = train_test_split(train_rows, config.seed, root)
            note = (
                f"The data have no split {split}: {len(test_rows)} of {count} rows are held out of training for it, by "
                f"image and seed {config.seed}."
            )
            test_rows = test_rows.select(range(min(len(test_rows), data.max_test_rows or len(test_rows))))
    except DataError as error:
        if asked:
            raise
        return *without, f"Nothing is evaluated: {error}"
    if not asked:
        config.eval_strategy, config.do_eval = IntervalStrategy.EPOCH, True
        note = (
            f"{note or f'The data have the split {split}.'} It is evaluated every epoch (not with --eval_strategy no)."
        )
    return train_rows, test_rows, skipped, note


def _without_vgr(
    rewards: RewardArguments, config: DAPOConfig, functions: list[Any], rows: Any
) -> tuple[list[Any], str | None]:
    """Return the reward functions, the default ones without `vgr` where no row has an image, and a sentence on that."""
    names = rewards.reward_funcs
    wanted = config.vgr_hard_negative or config.attention_reward_scale != "none"
    if not isinstance(names, DefaultRewards) or wanted or _has_images(rows):
        return functions, None
    place = names.index("vgr") + len(functions) - len(names)
    for option in ("reward_weights", "early_reward_weights"):
        weights = getattr(config, option)
        if weights is not None and len(weights) == len(functions):
            setattr(config, option, [*weights[:place], *weights[place + 1 :]])
    kept = [*functions[:place], *functions[place + 1 :]]
    return kept, "The data have no images: the reward vgr, which needs them, is left out, and its weight with it."


def _has_images(rows: Any) -> bool:
    if isinstance(rows, IterableDataset):
        return any(map(images_of, rows.take(FIRST_ROWS)))
    return bool(image_columns(rows)) and any(map(images_of, undecoded(rows.with_format(None))))


def _unused_adapter_options(model: ModelConfig) -> str | None:
    unused = [name for name in changed_options(model) if name.startswith(("lora_", "use_rslora", "use_dora"))]
    if model.use_peft or not unused:
        return None
    names = f"{' and '.join(unused)} {'is' if len(unused) == 1 else 'are'}"
    return f"{names} without effect because use_peft is False, so all weights train: add --use_peft."


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


def source_of(data: DataArguments) -> str:
    """Return what names the data: a name on the hub, a folder or files."""
    return str(data.dataset_name or data.dataset_path or data.data_files)


def identity_of(
    data: DataArguments, rewards: RewardArguments, config: DAPOConfig, model: ModelConfig
) -> dict[str, Any]:
    """Return what must be the same for a run to be continued."""
    if data.data_files:  # however its paths are spelled
        files = parse_data_files(data.data_files)
        parts = [f"{split}={'+'.join(str(path.resolve()) for path in files[split])}" for split in sorted(files)]
        source = ",".join(parts)
    else:
        source = str(data.dataset_name or Path(str(data.dataset_path)).resolve())
    columns = [f" {flag}={getattr(data, flag)}" for flag in FLAGS.values() if getattr(data, flag) is not None]
    return {
        "model": model.model_name_or_path,
        "data": "".join([source, *columns]),
        "dataset_config": data.dataset_config,
        "dataset_train_split": data.dataset_train_split,
        "reward_funcs": hardened(rewards.reward_funcs) if config.vgr_hard_negative else rewards.reward_funcs,
        "reward_model": rewards.reward_model_name_or_path,
        "lora": [model.lora_r, model.lora_target_modules, model.use_dora] if model.use_peft else None,
    }


def check_output_dir(output_dir: Path, identity: dict[str, Any], resume: str | None, may_repeat: bool = False) -> None:
    """Refuse a folder that holds a run, unless that is continued with the same model, data set and rewards.

    Args:
        identity: what makes the run the same one: model, data, reward functions.
        resume: as `resume_mode` returns it.
        may_repeat: the same run may overwrite itself.

    Raises:
        ConfigError: naming what is there, or what differs.
    """
    refuse_unwritable(output_dir, "output_dir", is_folder=True)
    file, before = output_dir / RUN_FILE, {}
    if file.exists() and (resume is not None or may_repeat):
        try:
            before = dict(json.loads(file.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(f"{file} cannot be read ({error}): remove it to continue the run unchecked.") from error
    if resume is None and before != identity:
        # A run that failed before its first checkpoint leaves nothing to lose.
        found = [name for name in TRACES if (output_dir / name).exists()]
        found += sorted(path.name for path in output_dir.glob("checkpoint-*"))
        if found:
            cure = "" if may_repeat else ", or continue that run with --resume_from_checkpoint latest"
            raise ConfigError(f"output_dir {output_dir} holds a run ({found[0]}): choose another output_dir{cure}.")
    for name, value in before.items():
        if resume is not None and name in identity and value != identity[name]:
            raise ConfigError(
                f"output_dir {output_dir} holds a run with {name} {value!r}, but {identity[name]!r} was given: "
                "continue it with the same, or choose another output_dir."
            )


def write_identity(output_dir: Path, identity: dict[str, Any]) -> None:
    """Write `run.json`, from which a later start sees whose folder it is."""
    output_dir.mkdir(parents=True, exist_ok=True)
    write_atomic(output_dir / RUN_FILE, (json.dumps(identity, indent=2) + "\n").encode())


class LastEvaluation(TrainerCallback):
    """Keeps the metrics of the newest step that was evaluated, of all parts of the data."""

    def __init__(self) -> None:
        self.step, self.metrics = -1, dict[str, float]()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add the metrics of a part of the data, or start over with those of another step."""
        if state.global_step != self.step:
            self.step, self.metrics = state.global_step, {}
        self.metrics |= kwargs["metrics"]

    def of_final_model(self, trainer: DAPOTrainer) -> dict[str, float]:
        """Return the metrics of the model as it is once trained; nothing where there are no data to evaluate on."""
        if trainer.eval_dataset is None:
            return {}
        if self.step != trainer.state.global_step or trainer.args.load_best_model_at_end:
            trainer.evaluate()
        return self.metrics


class StepLines(TrainerCallback):
    """Prints one line a step, in place of a dictionary of a hundred numbers, and one for an evaluation."""

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
