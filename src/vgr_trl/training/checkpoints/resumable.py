"""TRL's trainer with checkpoints that are complete, and from which a run goes on as if undisturbed."""

from collections.abc import Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Protocol, cast

import torch
from datasets import Dataset, IterableDataset
from torch import nn
from torch.utils.data import Sampler
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, TrainOutput
from trl.trainer.utils import RepeatSampler

from vgr_trl.compat.resuming_weights import load_weights, whole_model
from vgr_trl.errors import ConfigError, words_of
from vgr_trl.training.checkpoints.folders import refuse_other_number, resolve_checkpoint, resume_mode
from vgr_trl.training.checkpoints.shares import whole_checkpoint
from vgr_trl.training.constructed import ConstructedTrainer
from vgr_trl.training.processes import silence_named


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
        with silence_named(self.args.ddp_timeout, lambda: self.state.global_step + 1):
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
        with whole_checkpoint(folder, self.accelerator, self.args.should_save):
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
                f"({words_of(error)}): continue with the model, the adapter and the optim that it was saved with, or "
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
