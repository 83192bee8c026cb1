"""Resume a run from a checkpoint, at the same place in the data and in the generation batch.

TRL's checkpoints hold neither the data order, which comes from one generator for all epochs, nor the completions of an
unfinished generation batch. A resumed run would repeat the order of the first epoch, and generate again in the middle
of a batch. `ResumableTrainer` saves and restores both.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import send_to_device
from datasets import Dataset, IterableDataset
from torch import nn
from torch.utils.data import Sampler
from transformers import PreTrainedModel, TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, TrainOutput
from transformers.utils import logging

from vgr_trl.checkpoints import (
    SHARE,
    complete_checkpoint,
    is_finished,
    load_shares,
    lock_folder,
    refuse_finished,
    resolve_checkpoint,
    resume_mode,
    save_share,
)
from vgr_trl.errors import ConfigError, error_text
from vgr_trl.patches.transformers import load_weights, whole_model
from vgr_trl.processes import naming_silent_process

if TYPE_CHECKING:
    from trl import GRPOTrainer

    from vgr_trl.dapo_config import DAPOConfig
else:
    GRPOTrainer = object  # a mixin

logger = logging.get_logger(__name__)


class ResumableTrainer(GRPOTrainer):
    """Methods of a TRL trainer that save and load complete checkpoints.

    Attributes:
        resumed: objects with `save(folder)` and `load(folder)`, which every process calls: state beside weights,
            optimizer and the place in the data.
        termination: the callback that handles SIGTERM.
        train_sampler: TRL's `RepeatSampler`, whose order a resumed run restores.
    """

    resumed: Sequence[Any] = ()
    termination: Any
    train_sampler: Any = None
    args: "DAPOConfig"
    model: PreTrainedModel
    train_dataset: Dataset | IterableDataset
    _buffered_inputs: Any

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **options: Any) -> TrainOutput:
        """Train, after resuming from a complete checkpoint if asked to.

        Args:
            resume_from_checkpoint: a path; True or `latest`: the newest complete checkpoint; False: start at the
                beginning; None: the option of this name.
            args: passed to TRL.
            options: passed to TRL.

        Raises:
            ConfigError: the checkpoint is not complete, or another run is training in the folder.
            ProcessError: another process does not answer, or has ended.
        """
        resume = self.args.resume_from_checkpoint if resume_from_checkpoint is None else resume_from_checkpoint
        checkpoint = resolve_checkpoint(resume_mode(resume), Path(str(self.args.output_dir)))
        try:
            names_process = naming_silent_process(self.args.ddp_timeout, lambda: self.state.global_step + 1)
            with lock_folder(Path(str(self.args.output_dir)), self.accelerator), names_process:
                return super().train(checkpoint, *args, **options)
        finally:
            self.termination.restore_handler()

    def _get_train_sampler(self, dataset: Dataset | IterableDataset | None = None) -> Sampler[Any]:
        """Return TRL's sampler, and keep it for the data order of a resumed run."""
        self.train_sampler = super()._get_train_sampler(dataset)
        return self.train_sampler  # type: ignore[no-any-return]

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save a checkpoint, mark it complete once all is written, and explain a full disk."""
        folder = Path(self._get_output_dir(trial=trial), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        with complete_checkpoint(folder, self.accelerator, self.args.should_save):
            super()._save_checkpoint(model, trial)

    def _save_rng_state(self, output_dir: str) -> None:
        """Save the random state, the state of `resumed`, and the place in the data."""
        super()._save_rng_state(output_dir)
        for part in self.resumed:
            part.save(Path(output_dir))
        save_place(self, Path(output_dir))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load the optimizer, the state of `resumed` and the place in the data; refuse an optimizer of other weights.

        Raises:
            ConfigError: naming the checkpoint.
        """
        try:
            super()._load_optimizer_and_scheduler(checkpoint)
            if not self.is_fsdp_enabled:  # whose sharded moments have other shapes than the weights
                optimizer: Any = self.optimizer
                _check_optimizer(optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer)
        except (AttributeError, KeyError, TypeError, ValueError, UnpicklingError) as error:
            unfit = f"The optimizer or scheduler in {checkpoint} does not fit the weights that this run trains"
            cure = "continue with the model, adapter and optim that saved it, or give another checkpoint"
            raise ConfigError(f"{unfit} ({error_text(error)}): {cure}.") from error
        if checkpoint is not None:
            for part in self.resumed:
                part.load(Path(checkpoint))
            load_place(self, Path(checkpoint))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Load the weights of a checkpoint, also into a whole model, whose weights the parent would leave unchanged."""
        if not self._load_whole_model(resume_from_checkpoint, self.model if model is None else model):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        """Load the best weights, also into a whole model, whose last weights the parent would keep."""
        if not self._load_whole_model(str(self.state.best_model_checkpoint), self.model):
            super()._load_best_model()

    def _load_whole_model(self, checkpoint: str, model: nn.Module) -> bool:
        """Load the weights if `model` is a whole model, and return whether it is."""
        if (target := whole_model(self, model)) is not None:
            load_weights(target, checkpoint)
        return target is not None


def _check_optimizer(optimizer: Any) -> None:
    """Raise `ValueError` if the loaded state has missing options or Adam moments of the wrong shape.

    PyTorch loads both. A step would end in a `KeyError`, and fused AdamW would write past the end of the moments.
    """
    for group in optimizer.param_groups if isinstance(optimizer, torch.optim.Optimizer) else ():
        if missing := sorted(optimizer.defaults.keys() - group.keys()):
            raise ValueError(f"{type(optimizer).__name__} needs {', '.join(missing)}, which was not saved")
    for weight, state in optimizer.state.items() if isinstance(optimizer, torch.optim.Adam) else ():
        for name in ("exp_avg", "exp_avg_sq"):
            if name in state and state[name].shape != weight.shape:
                raise ValueError(f"{name} of shape {tuple(state[name].shape)} for {tuple(weight.shape)}")


def lacks_final_model_only(
    trainer: ResumableTrainer, checkpoint: str | None, max_steps: int, written_last: Path
) -> bool:
    """Return whether a run has finished all its steps but was ended before it wrote its last file.

    Args:
        trainer: with ZeRO or FSDP the answer is no, as only training loads their checkpoints.
        checkpoint: the newest checkpoint, or None.
        max_steps: all steps of the run.
        written_last: the file that a run writes last.
    """
    sharded = trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled
    return is_finished(checkpoint, max_steps) and not sharded and not written_last.exists()


def load_trained(trainer: ResumableTrainer, checkpoint: str) -> None:
    """Load the weights and state of a finished run's checkpoint, or its best weights with `load_best_model_at_end`."""
    trainer.state = TrainerState.load_from_json(str(Path(checkpoint) / "trainer_state.json"))
    trainer.state.is_local_process_zero = trainer.is_local_process_zero()
    trainer.state.is_world_process_zero = trainer.is_world_process_zero()
    if trainer.args.load_best_model_at_end and trainer.state.best_model_checkpoint is not None:
        trainer._load_best_model()
    else:
        trainer._load_from_checkpoint(checkpoint)


# Data position: sampler order and rollout buffer

GENERATION = "generation"
ORDER = "order.json"
COMPARED, MOST_COMPARED = ("id", "prompt", "choices", "solution"), 256  # columns and rows in the data's checksum


def save_place(trainer: ResumableTrainer, folder: Path) -> None:
    """Save the data order, and within a generation batch the rollout buffer."""
    from trl.trainer.utils import unsplit_pixel_values_by_grid

    every, accelerator = _generates_every(trainer), trainer.accelerator
    if trainer.args.should_save:
        (folder / ORDER).write_text(json.dumps(_order_of(trainer)), encoding="utf-8")
    if trainer._step % every:
        state = {
            "micro_batch": trainer._step % every,
            "of": every,
            "inputs": [unsplit_pixel_values_by_grid(inputs) for inputs in trainer._buffered_inputs],
        }
        save_share(state, folder, accelerator.process_index, accelerator.num_processes, GENERATION)


def load_place(trainer: ResumableTrainer, folder: Path) -> None:
    """Restore the data order and the rollout buffer of a checkpoint.

    Raises:
        ConfigError: the run is finished, or its order or buffer cannot be restored.
    """
    refuse_finished(str(folder), trainer.state.max_steps)
    if trainer.accelerator.is_main_process and (folder / ORDER).exists():  # checkpoints of TRL have none
        there, here = json.loads((folder / ORDER).read_text(encoding="utf-8")), _order_of(trainer)
        changed = [name for name in here if there.get(name) != here[name]]
        if changed:
            differs = ", ".join(f"{name} ({there.get(name)} there, {here[name]} here)" for name in changed)
            effect = "in this epoch some prompts may be repeated, and others skipped"
            logger.warning(f"The run that saved {folder} differs from this one in {differs}: {effect}.")
    epochs, batches = _position_in_data(trainer, folder)
    if trainer.shuffle_dataset and trainer.train_sampler is not None:
        for _ in range(epochs):
            torch.randperm(len(trainer.train_dataset), generator=trainer.train_sampler.generator)
    trainer._step = batches
    if not trainer.args.ignore_data_skip:
        _continue_generation(trainer, folder, batches % _generates_every(trainer))


def _order_of(trainer: ResumableTrainer) -> dict[str, Any]:
    """Return the facts that decide the data order: seed, shuffling, number of rows, and a checksum of some rows."""
    found: dict[str, Any] = {"seed": trainer.args.seed, "shuffle_dataset": trainer.shuffle_dataset}
    if isinstance(dataset := trainer.train_dataset, Dataset):
        rows = dataset.with_format(None).select(range(0, len(dataset), -(-len(dataset) // MOST_COMPARED)))
        texts = rows.select_columns([name for name in COMPARED if name in dataset.column_names]).to_list()
        as_json = json.dumps(texts, default=lambda value: type(value).__name__).encode()
        found |= {"number of prompts": len(dataset), "checksum of prompts": xxhash.xxh3_64_hexdigest(as_json)}
    return found


def _generates_every(trainer: ResumableTrainer) -> int:
    """Return the number of micro-batches of a process from one generation to the next."""
    return int(trainer.args.steps_per_generation or 1) * trainer.num_iterations


def _position_in_data(trainer: ResumableTrainer, folder: Path) -> tuple[int, int]:
    """Return the number of finished epochs, and of finished micro-batches in the current epoch."""
    args, step = trainer.args, trainer.state.global_step
    window = args.gradient_accumulation_steps
    if isinstance(trainer.train_dataset, IterableDataset):
        if (trainer.state.epoch or 0) >= 1 and not args.ignore_data_skip:
            saved = f"{folder} was saved in a later epoch of the stream ({trainer.state.epoch:.2f})"
            cure = "give ignore_data_skip to restart at the beginning of the stream, or an earlier checkpoint"
            raise ConfigError(f"{saved}, whose order is not known: {cure}.")
        return 0, 0 if args.ignore_data_skip else step * window
    batches = len(trainer.train_dataset) // args.prompts_per_rollout * _generates_every(trainer)  # of an epoch
    epochs, steps = divmod(step, -(-batches // window))
    return epochs, 0 if args.ignore_data_skip else steps * window


def _continue_generation(trainer: ResumableTrainer, folder: Path, micro_batch: int) -> None:
    """Restore the rollout buffer of a checkpoint that was saved within a generation batch.

    Args:
        trainer: whose buffer is set.
        folder: the checkpoint.
        micro_batch: number of finished micro-batches of the generation batch; 0: there is no buffer to restore.
    """
    processes, every = trainer.accelerator.num_processes, _generates_every(trainer)
    saved = len([*folder.glob(SHARE.format(GENERATION, "*", "*"))])
    if saved == micro_batch == 0:
        return
    share = load_shares(folder, GENERATION, only=trainer.accelerator.process_index)[0] if saved == processes else {}
    place = share.get("micro_batch", micro_batch), share.get("of", every)
    if not share or place[0] * every != micro_batch * place[1]:
        window = trainer.args.gradient_accumulation_steps
        raise ConfigError(
            f"{folder} was saved after {place[0]} of {place[1]} micro-batches of a generation batch and has the "
            f"completions of {saved} processes; with these options they are {micro_batch} of {every}, in {processes} "
            "processes. Continue with the number of processes, steps_per_generation, num_iterations, batch size and "
            "gradient_accumulation_steps that it was saved with, or from a checkpoint whose step is a multiple of "
            f"{every // window if every % window == 0 else every}."
        )
    inputs = share["inputs"]
    if place[1] != every:
        from vgr_trl.patches.trl import split_anew

        inputs = split_anew(inputs, trainer.args.steps_per_generation or 1)
    trainer._buffered_inputs = send_to_device(inputs, trainer.accelerator.device)
