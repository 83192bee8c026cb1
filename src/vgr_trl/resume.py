"""How an ended run is continued: what it overrides, and where it stands in its data.

TRL draws the order of each epoch from one generator, and begins a generation batch whenever a count of micro-batches
says so. Neither is in its checkpoints, so a continued run would take the order of the first epoch again, and generate
anew in the middle of a batch.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Protocol, cast

import torch
from datasets import Dataset, IterableDataset
from torch import nn
from torch.utils.data import Sampler
from transformers import TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, TrainOutput
from transformers.utils import logging
from trl.trainer.utils import RepeatSampler, unsplit_pixel_values_by_grid

from vgr_trl.checkpoints import (
    complete_checkpoint,
    global_step,
    load_shares,
    read_manifest,
    refuse_finished,
    refuse_other_number,
    remove_share,
    resolve_checkpoint,
    resume_mode,
    save_share,
    shares_of,
)
from vgr_trl.patches import load_weights, whole_model
from vgr_trl.rollout import ConstructedTrainer
from vgr_trl.sampling import Replay
from vgr_trl.utils import ConfigError, error_text, naming_silent_process

logger = logging.get_logger(__name__)


class Resumed(Protocol):
    """What a checkpoint has to hold beside what the trainer of transformers saves."""

    def save(self, folder: Path) -> None:
        """Write into a checkpoint; every process calls."""

    def load(self, folder: Path) -> None:
        """Continue from a checkpoint; every process calls."""


class ResumableTrainer(ConstructedTrainer):
    """Overrides what saves and loads.

    Attributes:
        resumed: what is saved and loaded beside weights and optimizer, in this order.
        train_sampler: TRL's, whose order a continued run takes up.
    """

    resumed: Sequence[Resumed] = ()
    train_sampler: RepeatSampler | None = None

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **options: Any) -> TrainOutput:
        """Add to TRL's: `True` and `latest` find the newest complete checkpoint; one that is not is refused.

        Raises:
            ConfigError: the checkpoint is not complete, or ZeRO has divided it between another number of processes.
            ProcessError: another process does not answer, or has ended.
        """
        checkpoint = resolve_checkpoint(resume_mode(resume_from_checkpoint), Path(str(self.args.output_dir)))
        if self._divides_optimizer():
            refuse_other_number(checkpoint, self.accelerator.num_processes)
        with naming_silent_process(self.args.ddp_timeout, lambda: self.state.global_step + 1):
            return super().train(checkpoint, *args, **options)

    def _divides_optimizer(self) -> bool:
        """Whether DeepSpeed reads a part of the optimizer in each process, and no universal checkpoint."""
        if not self.is_deepspeed_enabled:
            return False
        plugin = self.accelerator.state.deepspeed_plugin
        is_universal = plugin.deepspeed_config.get("checkpoint", {}).get("load_universal", False)
        return plugin.zero_stage > 0 and not is_universal

    def _get_train_sampler(self, dataset: Dataset | IterableDataset | None = None) -> Sampler[Any]:
        """Keep TRL's sampler."""
        sampler = super()._get_train_sampler(dataset)
        self.train_sampler = cast(RepeatSampler, sampler)
        return sampler

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Add to TRL's: the checkpoint is complete once all is written, and not before; a full disk is named."""
        folder = Path(self._get_output_dir(trial=trial), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        with complete_checkpoint(folder, self.accelerator, self.args.should_save):
            super()._save_checkpoint(model, trial)

    def _save_rng_state(self, output_dir: str) -> None:
        """Add to the parent's: what else is resumed."""
        super()._save_rng_state(output_dir)
        for part in self.resumed:
            part.save(Path(output_dir))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Add to TRL's: what else is resumed; an optimizer of other weights is refused.

        Raises:
            ConfigError: naming the checkpoint.
        """
        try:
            super()._load_optimizer_and_scheduler(checkpoint)
            if not self.is_fsdp_enabled:  # which has its parts in shapes of their own
                _refuse_other_shapes(getattr(self.optimizer, "optimizer", self.optimizer))
        except (AttributeError, KeyError, TypeError, ValueError, UnpicklingError) as error:
            raise ConfigError(
                f"The optimizer or scheduler in {checkpoint} is not of the weights that this run trains "
                f"({error_text(error)}): continue with the model, the adapter and the optim that it was saved with, or "
                "give another checkpoint."
            ) from error
        if checkpoint is not None:
            for part in self.resumed:
                part.load(Path(checkpoint))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Replace the parent's where it would keep the weights of the start."""
        if (target := whole_model(self, self.model if model is None else model)) is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            load_weights(target, resume_from_checkpoint)

    def _load_best_model(self) -> None:
        """Replace the parent's for the same models, and for the same reason."""
        if (target := whole_model(self, self.model)) is None:
            super()._load_best_model()
        else:
            load_weights(target, str(self.state.best_model_checkpoint))


def _refuse_other_shapes(optimizer: Any) -> None:
    """Raise `ValueError` for averages of other weights, which fused AdamW would take, and write past their end."""
    if isinstance(optimizer, torch.optim.Adam):
        for weight, state in optimizer.state.items():
            for name in ("exp_avg", "exp_avg_sq"):
                if name in state and state[name].shape != weight.shape:
                    raise ValueError(f"{name} of shape {tuple(state[name].shape)} for {tuple(weight.shape)}")


def only_lacks_its_model(trainer: ResumableTrainer, checkpoint: str | None, max_steps: int, written_last: Path) -> bool:
    """Whether all steps are behind a checkpoint, and what is written after them is not there.

    Args:
        trainer: constructed; with ZeRO or FSDP the answer is no, as only a training loads their checkpoints.
        written_last: the file that a run ends with.
    """
    step = global_step(Path(checkpoint)) if checkpoint else None
    sharded = trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled
    return step is not None and step >= max_steps > 0 and not sharded and not written_last.exists()


def load_trained(trainer: ResumableTrainer, checkpoint: str) -> None:
    """Give the trainer weights and state of a checkpoint that has all steps behind it, or the best weights if asked."""
    trainer.state = TrainerState.load_from_json(str(Path(checkpoint) / "trainer_state.json"))
    trainer.state.is_local_process_zero = trainer.is_local_process_zero()
    trainer.state.is_world_process_zero = trainer.is_world_process_zero()
    if trainer.args.load_best_model_at_end and trainer.state.best_model_checkpoint is not None:
        trainer._load_best_model()
    else:
        trainer._load_from_checkpoint(checkpoint)


GENERATION = "generation"
ORDER = "order.json"
COMPARED, MOST_COMPARED = ("id", "prompt", "choices", "solution"), 256  # columns and rows that tell data from others


class PromptOrder:
    """Saves and takes up where a run stands.

    Args:
        trainer: constructed.
        replay: whose groups may wait for the first training pass over the batch at hand; None: there is none.
    """

    def __init__(self, trainer: ResumableTrainer, replay: Replay | None) -> None:
        self._trainer, self._replay = trainer, replay

    def save(self, folder: Path) -> None:
        """Write what the order depends on, and within a generation batch the completions still to be trained on."""
        trainer, every = self._trainer, _generates_every(self._trainer)
        if trainer.args.should_save:
            (folder / ORDER).write_text(json.dumps(_order_of(trainer)), encoding="utf-8")
        place = trainer.accelerator.process_index, trainer.accelerator.num_processes
        if trainer._step % every == 0:
            remove_share(folder, *place, GENERATION)
            return
        state = {
            "micro_batch": trainer._step % every,
            "of": every,
            "inputs": [unsplit_pixel_values_by_grid(inputs) for inputs in trainer._buffered_inputs],
            "waiting": self._replay is not None and self._replay.waits,
        }
        save_share(state, folder, *place, GENERATION)

    def load(self, folder: Path) -> None:
        """Take up the order of the prompts and the generation batch where the checkpoint was saved.

        Raises:
            ConfigError: the run is finished, or its order cannot be taken up.
        """
        trainer = self._trainer
        args, processes = trainer.args, trainer.accelerator.num_processes
        refuse_finished(str(folder), trainer.state.max_steps)
        saved_by = (read_manifest(folder) or {"num_processes": processes})["num_processes"]
        if saved_by != processes:
            logger.warning(
                f"{folder} was saved by {saved_by} processes and is continued by {processes}: the order of the prompts "
                "stays, random numbers start anew."
            )
        if trainer.accelerator.is_main_process:
            _warn_of_another_order(trainer, folder)
        epochs, batches = _behind(trainer, folder)
        if trainer.shuffle_dataset and (sampler := trainer.train_sampler) is not None:
            for _ in range(epochs):
                torch.randperm(len(trainer.train_dataset), generator=sampler.generator)
        trainer._step = batches
        if not args.ignore_data_skip:
            _continue_generation(trainer, folder, batches % _generates_every(trainer))


def _order_of(trainer: ConstructedTrainer) -> dict[str, Any]:
    """What decides the order of the prompts: options, and of a data set its length and the texts of some rows."""
    found: dict[str, Any] = {"seed": trainer.args.seed, "shuffle_dataset": trainer.shuffle_dataset}
    if isinstance(dataset := trainer.train_dataset, Dataset):
        rows = dataset.with_format(None).select(range(0, len(dataset), -(-len(dataset) // MOST_COMPARED)))
        texts = rows.select_columns([name for name in COMPARED if name in dataset.column_names]).to_list()
        as_json = json.dumps(texts, default=lambda value: type(value).__name__)
        found |= {"prompts": len(dataset), "checksum": hashlib.sha256(as_json.encode()).hexdigest()}
    return found


def _warn_of_another_order(trainer: ConstructedTrainer, folder: Path) -> None:
    if not (folder / ORDER).exists():  # as in checkpoints of TRL
        return
    there, here = json.loads((folder / ORDER).read_text(encoding="utf-8")), _order_of(trainer)
    names = [name for name in ("seed", "shuffle_dataset", "prompts") if there.get(name) != here.get(name)]
    differs = [f"{name} ({there.get(name)} there, {here.get(name)} here)" for name in names]
    if "prompts" not in names and there.get("checksum") != here.get("checksum"):
        differs.append("prompts (others, or in another order)")
    if differs:
        logger.warning(
            f"The run that saved {folder} differs from this one in {', '.join(differs)}: in this epoch some prompts "
            "may come twice, and others not at all."
        )


def _generates_every(trainer: ConstructedTrainer) -> int:
    """Micro-batches of a process from one generation to the next."""
    return int(trainer.args.steps_per_generation or 1) * trainer.num_iterations


def _behind(trainer: ConstructedTrainer, folder: Path) -> tuple[int, int]:
    """Whole epochs that are behind the run, and micro-batches since the last generation that began an epoch."""
    args, step = trainer.args, trainer.state.global_step
    window = args.gradient_accumulation_steps
    if isinstance(trainer.train_dataset, IterableDataset):
        if (trainer.state.epoch or 0) >= 1 and not args.ignore_data_skip:
            raise ConfigError(
                f"{folder} was saved after the stream had begun anew (epoch {trainer.state.epoch:.2f}), where its "
                "order is not known: give ignore_data_skip to go on at the head of the stream, or an earlier "
                "checkpoint."
            )
        return 0, 0 if args.ignore_data_skip else step * window
    prompts = trainer.args.prompts_per_rollout
    batches = len(trainer.train_dataset) // prompts * _generates_every(trainer)  # of an epoch
    epochs, steps = divmod(step, -(-batches // window))
    return epochs, 0 if args.ignore_data_skip else steps * window


def _continue_generation(trainer: ConstructedTrainer, folder: Path, micro_batch: int) -> None:
    processes, every = trainer.accelerator.num_processes, _generates_every(trainer)
    cure = f"give a checkpoint whose step is a multiple of {every}"
    if every % trainer.args.gradient_accumulation_steps == 0:
        cure = f"give a checkpoint whose step is a multiple of {every // trainer.args.gradient_accumulation_steps}"
    saved = len(shares_of(folder, GENERATION))
    if saved == 0 and micro_batch == 0:
        return
    if saved == 0:
        raise ConfigError(
            f"{folder} was saved after {micro_batch} of the {every} micro-batches of a generation batch, but holds no "
            f"completions: {cure}."
        )
    if saved != processes:
        raise ConfigError(
            f"{folder} holds a generation batch of {saved} processes, but {processes} would continue it: "
            f"start {saved}, or {cure}."
        )
    (share,) = load_shares(folder, GENERATION, only=trainer.accelerator.process_index)
    if (share["micro_batch"], share["of"]) != (micro_batch, every):
        raise ConfigError(
            f"{folder} was saved after {share['micro_batch']} of {share['of']} micro-batches of a generation batch, "
            f"which are {micro_batch} of {every} with these options: continue with the steps_per_generation, "
            "num_iterations, batch size and gradient_accumulation_steps that it was saved with."
        )
    if share["waiting"]:
        raise ConfigError(
            f"{folder} was saved in the middle of a generation batch whose groups waited for the replay buffer: {cure}."
        )
    device = trainer.accelerator.device
    trainer._buffered_inputs = [_on(device, inputs) for inputs in share["inputs"]]


def _on(device: torch.device, inputs: dict[str, Any]) -> dict[str, Any]:
    return {name: value.to(device) if torch.is_tensor(value) else value for name, value in inputs.items()}
