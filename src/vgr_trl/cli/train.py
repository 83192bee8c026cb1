"""`vgr-trl train`: train a vision-language model with DAPO."""

import json
import re
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any

from datasets import IterableDataset
from trl import ModelConfig, get_peft_config, get_quantization_config

from vgr_trl.cli.flags.advice import one_sentence
from vgr_trl.cli.flags.arguments import DataArguments, DefaultRewards, RewardArguments, RunArguments
from vgr_trl.cli.flags.parsing import parse
from vgr_trl.cli.loading import load_processor, load_rows, refuse_missing_folder, tested
from vgr_trl.cli.run.describe import describe_run, print_plan, total_steps
from vgr_trl.cli.run.dry_run import dry_run
from vgr_trl.cli.run.evaluated import is_stated, rows_to_evaluate
from vgr_trl.cli.run.folder import claim, identity_of, write_identity
from vgr_trl.cli.run.last_evaluation import LastEvaluation
from vgr_trl.cli.run.step_lines import print_steps_as_lines
from vgr_trl.compat.gloo_exit import let_gloo_finish
from vgr_trl.config import DAPOConfig
from vgr_trl.config.effects import changed_options
from vgr_trl.data.read.failures import readable
from vgr_trl.data.rows.columns import image_columns, images_of, undecoded
from vgr_trl.data.rows.skipped import append_skipped, report_skipped
from vgr_trl.errors import CollapseError, ConfigError, DataError
from vgr_trl.files import write_whole
from vgr_trl.rewards import load_rewards
from vgr_trl.rewards.signatures import reads_solution
from vgr_trl.trainer import DAPOTrainer
from vgr_trl.training.checkpoints.finish import load_trained, only_lacks_its_model
from vgr_trl.training.checkpoints.folders import refuse_finished, resolve_checkpoint, resume_mode
from vgr_trl.training.checkpoints.termination import EXIT_STATUS, SaveOnTermination

METRICS = "metrics.json"
FIRST_ROWS = 16  # of a stream, which say whether it has images


def main(argv: Sequence[str] | None = None) -> int:
    """Parse flags (or `--config x.yaml`, which flags override), train, and return 0."""
    groups = (RunArguments, DataArguments, RewardArguments, DAPOConfig, ModelConfig)
    how, data, rewards, config, model = parse(groups, "train", argv)
    eval_follows = not is_stated("eval_strategy", argv)
    if how.dry_run:
        _check(model)
        with one_sentence():
            dry_run(config, _source(data), partial(_build_trainer, data, rewards, config, model, eval_follows))
        return 0
    trainer = train(data, rewards, config, model, eval_follows)
    return EXIT_STATUS if was_terminated(trainer) else 0


def was_terminated(trainer: DAPOTrainer) -> bool:
    """Whether SIGTERM has ended the training."""
    return any(isinstance(each, SaveOnTermination) and each.stopped for each in trainer.callback_handler.callbacks)


def _check(model: ModelConfig) -> None:
    if not model.model_name_or_path:
        raise ConfigError("model_name_or_path is missing: give a checkpoint folder or a hub name.")
    _separate_lora_modules(model)


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
        trainer = _build_trainer(data, rewards, config, model, eval_follows)
    trainer.data_source = _source(data)
    written_last = output_dir / METRICS
    is_trained = only_lacks_its_model(trainer, checkpoint, total_steps(trainer), written_last)
    if not is_trained:
        refuse_finished(checkpoint, total_steps(trainer))
    print_steps_as_lines(trainer)
    trainer.add_callback(last_evaluation := LastEvaluation())
    trainer.add_callback(SaveOnTermination(trainer.accelerator))
    if trainer.accelerator.is_main_process:
        write_identity(output_dir, identity)
        print_plan(describe_run(trainer, _source(data), checkpoint))
    trainer.accelerator.wait_for_everyone()  # all have looked for what is written last
    if is_trained:
        load_trained(trainer, str(checkpoint))
    else:
        written_last.unlink(missing_ok=True)
        with readable(_source(data), "the data") if data.dataset_streaming else nullcontext():
            trainer.train(resume_from_checkpoint=checkpoint)
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
        print(f"The model and its metrics are in {output_dir}.")
    _end(trainer)
    return trainer


def _end(trainer: DAPOTrainer) -> None:
    """Finish trackers and the process group."""
    trainer.accelerator.wait_for_everyone()
    let_gloo_finish()
    trainer.accelerator.end_training()  # what `trainer.end` does, which transformers 5.17 has not


def _build_trainer(
    data: DataArguments, rewards: RewardArguments, config: DAPOConfig, model: ModelConfig, eval_follows: bool
) -> DAPOTrainer:
    if data.dataset_streaming and config.max_steps <= 0:
        raise ConfigError("dataset_streaming is on, so the number of steps is not known: give max_steps.")
    if isinstance(rewards.reward_funcs, DefaultRewards):
        rewards.reward_funcs = DefaultRewards.of_run(config.reward_weights or config.early_reward_weights)
    reward_funcs: list[Any] = load_rewards(
        rewards.reward_funcs,
        max_completion_length=config.max_completion_length,
        soft_punish_cache=config.soft_punish_cache,
        files=rewards.file_options(),
        options=rewards.plugin_options,
    )
    if rewards.reward_model_name_or_path:
        refuse_missing_folder(rewards.reward_model_name_or_path)
        reward_funcs.insert(0, rewards.reward_model_name_or_path)
    needs_solution = any(map(reads_solution, reward_funcs))
    skipped_file = Path(config.output_dir or "trainer_output") / "skipped.jsonl"
    on_skipped = partial(append_skipped, path=skipped_file) if config.process_index == 0 else lambda row: None
    processor = cache(
        partial(load_processor, str(model.model_name_or_path), model.model_revision, config.trust_remote_code)
    )
    train_rows, skipped = load_rows(
        data,
        data.dataset_train_split,
        needs_solution=needs_solution,
        limit=data.max_train_rows,
        on_skipped=on_skipped,
        processor=processor,
        shuffle_seed=config.seed if config.shuffle_dataset else None,
    )
    if data.dataset_streaming:
        config.shuffle_dataset = False  # TRL's buffer would hold a thousand rows with decoded images
    load_test = partial(
        load_rows,
        tested(data),
        data.dataset_test_split,
        needs_solution=needs_solution,
        limit=data.max_test_rows,
        on_skipped=on_skipped,
        processor=processor,
    )
    evaluated = rows_to_evaluate(data, config, train_rows, load_test, eval_follows)
    skipped += evaluated.skipped
    reward_funcs, left_out = without_images(rewards, config, reward_funcs, evaluated.train)
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


def without_images(
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


def _source(data: DataArguments) -> str:
    return str(data.dataset_name or data.dataset_path or data.data_files)


def _separate_lora_modules(model: ModelConfig) -> None:
    """Take commas between names, and spaces, as separators; a text with other signs is a pattern of PEFT's.

    TRL turns a list of one module into a text, which PEFT reads as a pattern for the whole name.
    """
    modules = model.lora_target_modules
    if isinstance(modules, str) and re.fullmatch(r"[\w.]+", modules.replace(",", "").replace(" ", "")):
        modules = [modules]
    if isinstance(modules, list):
        names = [name for text in modules for name in re.split(r"[,\s]+", text.strip()) if name]
        model.lora_target_modules = names
