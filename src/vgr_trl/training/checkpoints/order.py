"""Where a continued run stands: in the order of the prompts, and within a generation batch.

TRL draws the order of each epoch from one generator, and begins a generation batch whenever a count of micro-batches
says so. Neither is in its checkpoints, so a continued run would take the order of the first epoch again, and generate
anew in the middle of a batch.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from transformers.utils import logging
from trl.trainer.utils import unsplit_pixel_values_by_grid

from vgr_trl.errors import ConfigError
from vgr_trl.training.checkpoints.folders import refuse_finished
from vgr_trl.training.checkpoints.manifest import read_manifest
from vgr_trl.training.checkpoints.resumable import ResumableTrainer
from vgr_trl.training.checkpoints.shares import load_shares, num_shares, remove_share, save_share
from vgr_trl.training.choice.replay import Replay
from vgr_trl.training.constructed import ConstructedTrainer

logger = logging.get_logger(__name__)

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
    saved = num_shares(folder, GENERATION)
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
