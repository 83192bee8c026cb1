"""`vgr-trl train`: train a vision-language model with DAPO."""

import json
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path

from trl import ModelConfig

from vgr_trl.cli.flags.advice import one_sentence
from vgr_trl.cli.flags.arguments import DataArguments, RewardArguments, RunArguments
from vgr_trl.cli.flags.parsing import parse
from vgr_trl.cli.run.building import build_trainer, separate_lora_modules, source_of
from vgr_trl.cli.run.describe import describe_run, print_plan, total_steps
from vgr_trl.cli.run.dry_run import dry_run
from vgr_trl.cli.run.evaluated import is_stated
from vgr_trl.cli.run.folder import claim, identity_of, write_identity
from vgr_trl.cli.run.last_evaluation import LastEvaluation
from vgr_trl.cli.run.step_lines import print_steps_as_lines
from vgr_trl.compat.gloo_exit import close_group_at_exit, let_gloo_finish
from vgr_trl.config import DAPOConfig
from vgr_trl.data.read.failures import readable
from vgr_trl.errors import CollapseError, ConfigError, DataError
from vgr_trl.files import write_whole
from vgr_trl.trainer import DAPOTrainer
from vgr_trl.training.checkpoints.finish import load_trained, only_lacks_its_model
from vgr_trl.training.checkpoints.folders import how_to_go_on, refuse_finished, resolve_checkpoint, resume_mode
from vgr_trl.training.checkpoints.termination import EXIT_STATUS, SaveOnTermination
from vgr_trl.training.recording.before import RecordBefore

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
    trainer.add_callback(RecordBefore(trainer, trainer.stages.recorder.evaluated))
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
