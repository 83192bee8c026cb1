"""Save complete checkpoints, choose a complete checkpoint, and resume at the same place in data and generation batch.

The manifest names every file of a checkpoint with its size and checksum. It is written last, under a temporary name,
and removed first. TRL's checkpoints hold neither the data order, which comes from one generator for all epochs, nor the
completions of an unfinished generation batch. `ResumableTrainer` saves and restores both.
"""

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence, Set
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from pickle import UnpicklingError
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import xxhash
from accelerate import Accelerator, PartialState
from accelerate.utils import broadcast_object_list, gather_object, send_to_device
from datasets import Dataset, IterableDataset
from filelock import FileLock, Timeout
from torch import nn
from torch.utils.data import Sampler
from transformers import PreTrainedModel, TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, TrainOutput
from transformers.utils import logging

from vgr_trl.atomic_files import naming_full_disk, publish, unfinished, write_atomic
from vgr_trl.errors import ConfigError, EvaluationStopped, VGRError, error_text
from vgr_trl.patches.transformers import load_weights, rotate_at_end
from vgr_trl.processes import naming_silent_process
from vgr_trl.sharing.model_support import has_sharded_parameters
from vgr_trl.trl_bridge import split_anew

logger = logging.get_logger(__name__)

MANIFEST = "manifest.json"
LOCK, LOCK_SECONDS = "_training.lock", 3.0  # the workers of a killed run take a moment to end; `_`: not for the hub
READ_WHOLE, READ_PART = 64 * 2**20, 2**20  # bytes of a file up to which its checksum reads all, and of each end beyond


def write_manifest(folder: str | Path, num_processes: int = 1) -> None:
    """Mark a checkpoint as complete: write the size and checksum of each of its files.

    Call it by hand on a checkpoint of TRL that is known to be complete.

    Args:
        folder: the checkpoint.
        num_processes: number of processes that saved it.
    """
    folder = Path(folder)
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and MANIFEST not in path.name)
    sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in paths}
    checksums = {name: checksum(folder / name) for name in sizes}
    manifest = {"num_processes": num_processes, "files": sizes, "checksums": checksums}
    write_atomic(folder / MANIFEST, json.dumps(manifest, indent=1).encode())


def checksum(path: Path) -> str:
    """Return the checksum of a file, or of its first and last megabyte if it is larger than 64 MB."""
    size = path.stat().st_size
    with path.open("rb") as file:
        digest = xxhash.xxh3_64(file.read(size if size <= READ_WHOLE else READ_PART))
        if size > READ_WHOLE:
            file.seek(-READ_PART, os.SEEK_END)
            digest.update(file.read())
    return digest.hexdigest()


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Return the files and checksums of a checkpoint's manifest, or None if the manifest is missing or unreadable."""
    try:
        read = {"checksums": {}, **json.loads((folder / MANIFEST).read_text(encoding="utf-8"))}  # older ones have none
        return read | {"files": dict(read["files"]), "checksums": dict(read["checksums"])}
    except (OSError, ValueError, TypeError, KeyError):
        return None


@contextmanager
def complete_checkpoint(folder: Path, accelerator: Accelerator, writes: bool) -> Iterator[None]:
    """Write the manifest of a checkpoint once the block has saved it, and delete older checkpoints only then.

    A kill in the block leaves the folder without a manifest, and an older checkpoint to resume from. Files that
    processes of a killed run left in the folder are removed first.

    Args:
        folder: the checkpoint.
        accelerator: accelerator of the run; all its processes call this.
        writes: whether this process writes the files that processes share.

    Raises:
        DiskFullError: naming the file that was being written.
    """
    with naming_full_disk(folder, "free space there, then continue with resume_from_checkpoint latest"):
        if writes:
            for path in (folder / MANIFEST, *folder.glob(SHARE.format("*", "*", "*"))):
                path.unlink(missing_ok=True)
        accelerator.wait_for_everyone()
        with rotate_at_end():
            yield
            accelerator.wait_for_everyone()
            if writes:
                write_manifest(folder, accelerator.num_processes)


SHARE = "{}_{}_of_{}.pt"  # a process's state beside weights and optimizer, by kind, process and number of processes


def save_share(state: dict[str, Any], folder: Path, process_index: int, num_processes: int, kind: str) -> None:
    """Write a process's share of a run's state into a checkpoint folder, all of it or nothing.

    Args:
        state: tensors, numbers, texts, lists and dictionaries.
        folder: the checkpoint.
        process_index: rank of this process.
        num_processes: number of processes.
        kind: file prefix, for example "replay".
    """
    path = folder / SHARE.format(kind, process_index, num_processes)
    torch.save(state, unfinished(path))
    publish(unfinished(path), path)


def load_shares(folder: Path, kind: str, only: int | None = None) -> list[dict[str, Any]]:
    """Return the shares in a checkpoint folder in the order of their processes, or an empty list.

    Args:
        folder: the checkpoint.
        kind: file prefix, for example "replay".
        only: index of the only process whose share is read; None: read all.

    Raises:
        ConfigError: some are missing or unreadable.
    """
    count = len([*folder.glob(SHARE.format(kind, "*", "*"))])
    paths = [folder / SHARE.format(kind, index, count) for index in (range(count) if only is None else [only])]
    try:
        return [torch.load(path, map_location="cpu", weights_only=True) for path in paths]
    except (OSError, RuntimeError, EOFError, UnpicklingError) as error:
        files = f"The {count} files {SHARE.format(kind, '*', '*')} in {folder} cannot be read"
        cure = "copy the files of all processes there, or give an earlier checkpoint"
        raise ConfigError(f"{files} ({type(error).__name__}): {cure}.") from error


class SavedState(ABC):
    """State beside weights and optimizer that each process saves and any number of processes restores.

    Attributes:
        kind: file prefix, for example "replay".
    """

    kind: str

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return tensors, numbers, texts, lists and dictionaries."""

    @abstractmethod
    def load_states(self, states: list[dict[str, Any]]) -> None:
        """Restore the state from the dictionaries that all processes saved."""

    def save(self, folder: Path) -> None:
        """Write the share of this process into a checkpoint, complete or not at all."""
        processes = PartialState()
        save_share(self.state_dict(), folder, processes.process_index, processes.num_processes, self.kind)

    def load(self, folder: Path) -> None:
        """Restore the state from a checkpoint, or warn that the checkpoint has no such state."""
        if states := load_shares(folder, self.kind):
            self.load_states(states)
        elif PartialState().is_main_process:
            logger.warning(f"{folder} has no state of the {self.kind}, which starts empty.")


class MovingReference(NamedTuple):
    """Saves the reference model of `sync_ref_model`, which TRL does not save; sharded weights are left out."""

    model: nn.Module

    def save(self, folder: Path) -> None:
        """Write the weights into a checkpoint, by the main process."""
        if PartialState().is_main_process and not has_sharded_parameters(self.model):
            save_share(self.model.state_dict(), folder, 0, 1, "reference")

    def load(self, folder: Path) -> None:
        """Load the weights of a checkpoint.

        Raises:
            ConfigError: the checkpoint does not have them.
        """
        if not (states := load_shares(folder, "reference")):
            raise ConfigError(f"{folder} has no reference (ZeRO-3, FSDP and TRL save none): switch sync_ref_model off.")
        self.model.load_state_dict(states[0])


TRACES = ("trainer_state.json", "model.safetensors", "model.safetensors.index.json", "adapter_config.json")
OPTIMIZERS = ("optimizer.pt", "latest", "optimizer_0", "optimizer.bin")  # PyTorch, DeepSpeed, FSDP sharded and whole


def resume_mode(value: str | bool | None) -> str | None:
    """Normalise `resume_from_checkpoint` to None (start anew), `latest` or a path."""
    if value is None or value is False or str(value).lower() in ("", "false", "none"):
        return None
    return "latest" if value is True or str(value).lower() in ("true", "latest") else str(value)


def resolve_checkpoint(resume: str | None, output_dir: Path) -> str | None:
    """Return the checkpoint to resume from, or None to start at the beginning; all processes call this.

    Args:
        resume: mode that `resume_mode` returned.
        output_dir: folder in which `latest` looks; without a complete checkpoint the run starts at the beginning.

    Raises:
        ConfigError: the named checkpoint does not exist or is not complete, or `latest` would start over in the folder
            of a finished run.
    """
    if resume is None:
        return None
    answer: list[str | VGRError | None] = [None]
    try:
        if PartialState().is_main_process:
            answer = [_find_checkpoint(resume, output_dir)]
    except VGRError as error:
        answer = [error]
    broadcast_object_list(answer)  # one process decides for all, as they may see different files
    if isinstance(answer[0], VGRError):
        raise answer[0]
    return answer[0]


def _find_checkpoint(resume: str, output_dir: Path) -> str | None:
    if resume != "latest":
        if wrong := why_incomplete(Path(resume)):
            named = f"resume_from_checkpoint is {resume}, which is not complete ({wrong})"
            raise ConfigError(f"{named}: give another checkpoint, or latest.")
        return resume
    for checkpoint in reversed(checkpoints_of(output_dir)):
        if not (wrong := why_incomplete(checkpoint)):
            return str(checkpoint)
        logger.warning(f"resume_from_checkpoint latest skips {checkpoint}, which is not complete: {wrong}.")
    if models := [name for name in TRACES if (output_dir / name).exists()]:
        outcome = f"{output_dir} has no complete checkpoint, only a finished run ({models[0]})"
        raise ConfigError(f"resume_from_checkpoint is latest, but {outcome}: choose another output_dir.")
    logger.warning(f"resume_from_checkpoint latest finds no complete checkpoint in {output_dir}: a new run starts.")
    return None


def checkpoints_of(output_dir: Path) -> list[Path]:
    """Return the checkpoints in a folder, complete or not, oldest first."""
    checkpoints = [path for path in output_dir.glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdigit()]
    return sorted(checkpoints, key=lambda path: int(path.name.split("-")[1]))


def how_to_go_on(output_dir: Path) -> str:
    """Return a sentence that says how to resume an interrupted run."""
    if saved := [checkpoint for checkpoint in checkpoints_of(output_dir) if read_manifest(checkpoint) is not None]:
        return f"--resume_from_checkpoint continues from {saved[-1]}"
    return "no checkpoint was saved (see save_steps), so the same command starts over"


def why_incomplete(checkpoint: Path) -> str | None:
    """Return why a run cannot be resumed from a checkpoint, or None if it can."""
    if not checkpoint.is_dir():
        return "it is not a folder"
    if (manifest := read_manifest(checkpoint)) is None:
        cure = "vgr_trl.checkpoints.write_manifest adds one to a complete checkpoint of TRL"
        return f"{MANIFEST}, which is written last, is missing or unreadable; {cure}"
    for name, size in manifest["files"].items():
        path = checkpoint / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
        if (written := manifest["checksums"].get(name)) is not None and checksum(path) != written:
            return f"{name} is damaged: its checksum has changed"
    if not any((checkpoint / name).exists() for name in OPTIMIZERS):  # save_only_model leaves it out
        return "no optimizer was saved"
    return None


def is_finished(checkpoint: str | None, max_steps: int) -> bool:
    """Return whether a checkpoint was saved after all `max_steps` steps; False for None."""
    if checkpoint is None:
        return False
    state = json.loads((Path(checkpoint) / "trainer_state.json").read_text(encoding="utf-8"))
    return bool(state["global_step"] >= max_steps > 0)


def refuse_finished(checkpoint: str | None, max_steps: int) -> None:
    """Raise `ConfigError` for a finished run's checkpoint, because training would add a step."""
    if is_finished(checkpoint, max_steps):
        finished = f"The run is finished: {checkpoint} has the model after all {max_steps} steps"
        raise ConfigError(f"{finished}; raise max_steps or num_train_epochs to continue training.")


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Lock an output folder for one training, and create it; all processes call this, and the main process holds it.

    The kernel releases the lock when the process ends, also after a kill. A thread may lock a folder again within the
    block. A file system without locks is used without one.

    Raises:
        ConfigError: another run holds the lock; on all processes.
    """
    # Without `fallback_to_soft`: a file as the mark of a lock would outlive a killed run.
    lock, is_free = FileLock(folder / LOCK, timeout=LOCK_SECONDS, fallback_to_soft=False, is_singleton=True), True
    try:
        if PartialState().is_main_process:
            lock.acquire()
    except OSError as error:  # `Timeout`, or the file system has no locks
        is_free = not isinstance(error, Timeout)
    with ExitStack() as stack:
        stack.callback(lock.release)
        if not all(gather_object([is_free])):
            raise ConfigError(f"Another run is training in {folder}: wait until it ends, or give another output_dir.")
        yield


if TYPE_CHECKING:
    from trl import GRPOTrainer

    from vgr_trl.dapo_config import DAPOConfig
else:
    GRPOTrainer = object  # a mixin


GENERATION = "generation"
ORDER = "order.json"
COMPARED, MOST_COMPARED = ("id", "prompt", "choices", "solution"), 256  # columns and rows in the data's checksum


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
            with lock_folder(Path(str(self.args.output_dir))), names_process:
                return super().train(checkpoint, *args, **options)
        finally:
            self.termination.restore_handler()

    def _get_train_sampler(self, dataset: Dataset | IterableDataset | None = None) -> Sampler[Any]:
        """Return TRL's sampler, and keep it for the data order of a resumed run."""
        self.train_sampler = super()._get_train_sampler(dataset)
        return self.train_sampler  # type: ignore[no-any-return]

    def _evaluate(self, *args: Any, **options: Any) -> dict[str, float]:
        """Evaluate; after SIGTERM return no metrics, because the resumed run evaluates from the same random state."""
        with TemporaryDirectory() as before:
            super()._save_rng_state(before)
            with suppress(EvaluationStopped):
                if not self.termination.stopped:
                    return super()._evaluate(*args, **options)
            super()._load_rng_state(before)
        self._metrics["eval"].clear()
        # The end of an epoch is also reported to a run that stops within it.
        due = self.args.eval_strategy != "epoch" or float(self.state.epoch or 0).is_integer()
        self.control.should_save = self.control.should_evaluate = due
        return {}

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Load the random state, then repeat an evaluation that SIGTERM interrupted."""
        super()._load_rng_state(checkpoint)
        is_due = vars(self.state)["stateful_callbacks"]["TrainerControl"]["args"]["should_evaluate"]
        if is_due and self._determine_best_metric(self._evaluate(None, None), None):
            self.state.best_model_checkpoint = checkpoint

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        """Return whether to save the best checkpoint; True after an interrupted evaluation."""
        return super()._determine_best_metric(metrics, trial) if metrics else True

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
        self._save_place(Path(output_dir))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load the optimizer, the state of `resumed` and the place in the data.

        Raises:
            ConfigError: the optimizer belongs to other weights.
        """
        optimizer: Any = getattr(self.optimizer, "optimizer", self.optimizer)  # accelerate wraps it
        needed = [{*group} for group in optimizer.param_groups] if isinstance(optimizer, torch.optim.Optimizer) else []
        try:
            super()._load_optimizer_and_scheduler(checkpoint)
            if not self.is_fsdp_enabled:  # FSDP's sharded moments have other shapes than the weights
                _check_optimizer(optimizer, needed)
        except (AttributeError, KeyError, TypeError, ValueError, UnpicklingError) as error:
            unfit = f"The optimizer or scheduler in {checkpoint} does not fit the weights that this run trains"
            cure = "continue with the model, adapter and optim that saved it, or give another checkpoint"
            raise ConfigError(f"{unfit} ({error_text(error)}): {cure}.") from error
        if checkpoint is not None:
            for part in self.resumed:
                part.load(Path(checkpoint))
            self._load_place(Path(checkpoint))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Load the weights of a checkpoint; the parent would leave a whole model unchanged."""
        if not self._load_whole_model(resume_from_checkpoint, self.model if model is None else model):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        """Load the best weights; the parent would leave a whole model at its last weights."""
        if not self._load_whole_model(str(self.state.best_model_checkpoint), self.model):
            super()._load_best_model()

    def _load_whole_model(self, checkpoint: str, model: nn.Module) -> bool:
        """Load the weights if `model` is a whole model, and return whether it is."""
        target = self.accelerator.unwrap_model(model)
        is_whole = isinstance(target, PreTrainedModel) and not (self.is_fsdp_enabled or self.is_deepspeed_enabled)
        if is_whole:
            load_weights(target, checkpoint)
        return is_whole

    def lacks_final_model_only(self, checkpoint: str | None, max_steps: int, written_last: Path) -> bool:
        """Return whether a run has finished all its steps but was ended before it wrote its last file.

        Args:
            checkpoint: the newest checkpoint, or None.
            max_steps: all steps of the run.
            written_last: the file that a run writes last.
        """
        sharded = self.is_deepspeed_enabled or self.is_fsdp_enabled
        return is_finished(checkpoint, max_steps) and not sharded and not written_last.exists()

    def load_trained(self, checkpoint: str) -> None:
        """Load weights and state of a finished run's checkpoint; the best weights with `load_best_model_at_end`."""
        self.state = TrainerState.load_from_json(str(Path(checkpoint) / "trainer_state.json"))
        self.state.is_local_process_zero = self.is_local_process_zero()
        self.state.is_world_process_zero = self.is_world_process_zero()
        if self.args.load_best_model_at_end and self.state.best_model_checkpoint is not None:
            self._load_best_model()
        else:
            self._load_from_checkpoint(checkpoint)

    def _save_place(self, folder: Path) -> None:
        """Save the data order, and within a generation batch the rollout buffer."""
        from trl.trainer.utils import unsplit_pixel_values_by_grid

        every, accelerator = self._micro_batches_per_generation(), self.accelerator
        if self.args.should_save:
            (folder / ORDER).write_text(json.dumps(self._data_order()), encoding="utf-8")
        if self._step % every:
            inputs = [unsplit_pixel_values_by_grid(inputs) for inputs in self._buffered_inputs]
            state = {"micro_batch": self._step % every, "of": every, "inputs": inputs}
            save_share(state, folder, accelerator.process_index, accelerator.num_processes, GENERATION)

    def _load_place(self, folder: Path) -> None:
        """Restore the data order and the rollout buffer of a checkpoint.

        Raises:
            ConfigError: the run is finished, or its order or buffer cannot be restored.
        """
        refuse_finished(str(folder), self.state.max_steps)
        if self.accelerator.is_main_process and (folder / ORDER).exists():  # checkpoints of TRL have none
            saved, current = json.loads((folder / ORDER).read_text(encoding="utf-8")), self._data_order()
            if changed := [name for name in current if saved.get(name) != current[name]]:
                differs = ", ".join(f"{name} ({saved.get(name)} there, {current[name]} here)" for name in changed)
                effect = "in this epoch some prompts may be repeated, and others skipped"
                logger.warning(f"The run that saved {folder} differs from this one in {differs}: {effect}.")
        epochs, batches = self._position_in_data(folder)
        if self.shuffle_dataset and self.train_sampler is not None:
            for _ in range(epochs):
                torch.randperm(len(self.train_dataset), generator=self.train_sampler.generator)
        self._step = batches
        if not self.args.ignore_data_skip:
            self._continue_generation(folder, batches % self._micro_batches_per_generation())

    def _data_order(self) -> dict[str, Any]:
        """Return the seed, shuffling, number of rows and a checksum of some rows, which decide the data order."""
        order: dict[str, Any] = {"seed": self.args.seed, "shuffle_dataset": self.shuffle_dataset}
        if isinstance(dataset := self.train_dataset, Dataset):
            rows = dataset.with_format(None).select(range(0, len(dataset), -(-len(dataset) // MOST_COMPARED)))
            texts = rows.select_columns([name for name in COMPARED if name in dataset.column_names]).to_list()
            as_json = json.dumps(texts, default=lambda value: type(value).__name__).encode()
            order |= {"number of prompts": len(dataset), "checksum of prompts": xxhash.xxh3_64_hexdigest(as_json)}
        return order

    def _micro_batches_per_generation(self) -> int:
        """Return the number of micro-batches of a process between two generations."""
        return int(self.args.steps_per_generation or 1) * self.num_iterations

    def _position_in_data(self, folder: Path) -> tuple[int, int]:
        """Return the number of finished epochs, and of finished micro-batches in the current epoch."""
        args, step = self.args, self.state.global_step
        window = args.gradient_accumulation_steps
        if isinstance(self.train_dataset, IterableDataset):
            if (self.state.epoch or 0) >= 1 and not args.ignore_data_skip:
                saved = f"{folder} was saved in a later epoch of the stream ({self.state.epoch:.2f})"
                cure = "give ignore_data_skip to restart at the beginning of the stream, or an earlier checkpoint"
                raise ConfigError(f"{saved}, whose order is not known: {cure}.")
            return 0, 0 if args.ignore_data_skip else step * window
        rollouts = len(self.train_dataset) // args.prompts_per_rollout  # rollouts of an epoch
        batches = rollouts * self._micro_batches_per_generation()
        epochs, steps = divmod(step, -(-batches // window))
        return epochs, 0 if args.ignore_data_skip else steps * window

    def _continue_generation(self, folder: Path, micro_batch: int) -> None:
        """Restore the rollout buffer of a checkpoint that was saved within a generation batch.

        Args:
            folder: the checkpoint.
            micro_batch: number of finished micro-batches of the generation batch; 0: there is no buffer to restore.
        """
        processes, every = self.accelerator.num_processes, self._micro_batches_per_generation()
        saved = len([*folder.glob(SHARE.format(GENERATION, "*", "*"))])
        if saved == micro_batch == 0:
            return
        share = load_shares(folder, GENERATION, only=self.accelerator.process_index)[0] if saved == processes else {}
        place = share.get("micro_batch", micro_batch), share.get("of", every)
        if not share or place[0] * every != micro_batch * place[1]:
            window = self.args.gradient_accumulation_steps
            was = f"was saved after {place[0]} of {place[1]} micro-batches of a rollout by {saved} processes"
            options = "processes and options of batches that it was saved with"
            whole = f"a checkpoint whose step is a multiple of {every // window if every % window == 0 else every}"
            now = f"now {micro_batch} of {every} by {processes}"
            raise ConfigError(f"{folder} {was}, {now}: give {options}, or {whole}.")
        inputs = share["inputs"]
        if place[1] != every:
            inputs = split_anew(inputs, self.args.steps_per_generation or 1)
        self._buffered_inputs = send_to_device(inputs, self.accelerator.device)


def _check_optimizer(optimizer: Any, needed: Sequence[Set[str]]) -> None:
    """Raise `ValueError` if the loaded state has missing options or Adam moments of the wrong shape.

    PyTorch loads both. A step would end in a `KeyError`, and fused AdamW would write past the end of the moments.

    Args:
        optimizer: optimizer with the loaded state.
        needed: options of each parameter group before loading. `defaults` has options that no group needs.
    """
    for names, group in zip(needed, optimizer.param_groups if needed else (), strict=True):
        if missing := sorted(names - group.keys()):
            raise ValueError(f"{type(optimizer).__name__} needs {', '.join(missing)}, which was not saved")
    for weight, state in optimizer.state.items() if isinstance(optimizer, torch.optim.Adam) else ():
        for name in ("exp_avg", "exp_avg_sq"):
            if name in state and state[name].shape != weight.shape:
                raise ValueError(f"{name} of shape {tuple(state[name].shape)} for {tuple(weight.shape)}")
