"""Checkpoints: complete or not there, which one a run is continued from, and where it goes on in its data.

The manifest names every file of a checkpoint with its size and checksum. It is written last, under a temporary name,
and removed first. TRL draws the order of each epoch from one generator, and begins a generation batch whenever a count
of micro-batches says so. Neither is in its checkpoints: a continued run would take the order of the first epoch again,
and would generate again in the middle of a batch. `ResumableTrainer` saves and restores both.
"""

import hashlib
import json
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from accelerate import Accelerator, PartialState
from accelerate.utils import send_to_device
from datasets import Dataset, IterableDataset
from torch import distributed, nn
from torch.utils.data import Sampler
from transformers import PreTrainedModel, TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, TrainOutput
from transformers.utils import logging

from vgr_trl.patches.transformers import load_weights, rotate_at_end, whole_model
from vgr_trl.utils import (
    ConfigError,
    VGRError,
    error_text,
    naming_full_disk,
    naming_silent_process,
    publish,
    unfinished,
    write_atomic,
)

if TYPE_CHECKING:
    from trl import GRPOTrainer

    from vgr_trl.dapo_config import DAPOConfig
else:
    GRPOTrainer = object  # a mixin: the KL controller's state is saved where there is no TRL, too

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

logger = logging.get_logger(__name__)

MANIFEST = "manifest.json"
READ_WHOLE, READ_PART = 64 * 2**20, 2**20  # bytes of a file up to which its checksum reads all, and of each end beyond


def write_manifest(folder: str | Path, num_processes: int = 1) -> None:
    """Name every file of a checkpoint with its size and checksum, which makes the checkpoint complete.

    Call it by hand on a checkpoint of TRL that is known to be complete.

    Args:
        num_processes: how many saved it.
    """
    folder = Path(folder)
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and MANIFEST not in path.name)
    names = {path.relative_to(folder).as_posix(): path for path in paths}
    manifest = {
        "num_processes": num_processes,
        "files": {name: path.stat().st_size for name, path in names.items()},
        "checksums": {name: checksum(path) for name, path in names.items()},
    }
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
    """Return files and checksums of a checkpoint's manifest, None if it has none that can be read."""
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return {"checksums": {}, **manifest}  # older ones have no checksums


@contextmanager
def complete_checkpoint(folder: Path, accelerator: Accelerator, writes: bool) -> Iterator[None]:
    """Make a checkpoint folder that is written inside complete at the end, or leave it without a manifest.

    What a run that was killed while saving left there of its processes is removed first, older checkpoints only once
    this one is complete, so that a kill in between leaves one to continue from.

    Args:
        writes: whether this process writes what processes share.

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


SHARE = "{}_{}_of_{}.pt"  # what a process keeps beside weights and optimizer, by kind, process and number of processes


def save_share(state: dict[str, Any], folder: Path, process_index: int, num_processes: int, kind: str) -> None:
    """Write a process's share of a run's state into a checkpoint folder, all of it or nothing.

    Args:
        state: tensors, numbers, texts, lists and dictionaries.
        kind: file prefix, for example "replay".
    """
    path = folder / SHARE.format(kind, process_index, num_processes)
    torch.save(state, unfinished(path))
    publish(path)


def load_shares(folder: Path, kind: str, only: int | None = None) -> list[dict[str, Any]]:
    """Return the shares in a checkpoint folder, in the order of their processes; none if none was written.

    Args:
        only: the one process whose share is read.

    Raises:
        ConfigError: some are missing or unreadable.
    """
    paths = sorted(folder.glob(SHARE.format(kind, "*", "*")), key=lambda path: int(path.stem.split("_")[1]))
    try:
        if any(path.name != SHARE.format(kind, index, len(paths)) for index, path in enumerate(paths)):
            raise FileNotFoundError("some are missing")
        read = paths if only is None else paths[only : only + 1]
        return [torch.load(path, map_location="cpu", weights_only=True) for path in read]
    except (OSError, RuntimeError, EOFError, UnpicklingError) as error:
        files = f"The {len(paths)} files {SHARE.format(kind, '*', '*')} in {folder} cannot be read"
        cure = "copy the files of all processes there, or give an earlier checkpoint"
        raise ConfigError(f"{files} ({type(error).__name__}): {cure}.") from error


class SavedState(ABC):
    """State of a run beside weights and optimizer, which each process saves and any number of processes takes up.

    Attributes:
        kind: file prefix, for example "replay".
    """

    kind: str

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return tensors, numbers, texts, lists and dictionaries."""

    @abstractmethod
    def load_states(self, states: list[dict[str, Any]]) -> None:
        """Continue from what all processes have saved together."""

    def save(self, folder: Path) -> None:
        """Write the share of this process into a checkpoint, complete or not at all."""
        processes = PartialState()
        save_share(self.state_dict(), folder, processes.process_index, processes.num_processes, self.kind)

    def load(self, folder: Path) -> None:
        """Continue from a checkpoint; start from zero, with a warning, if it has none."""
        if states := load_shares(folder, self.kind):
            self.load_states(states)
        elif PartialState().is_main_process:
            logger.warning(f"{folder} has no state of the {self.kind}, which starts empty.")


TRACES = ("trainer_state.json", "model.safetensors", "model.safetensors.index.json", "adapter_config.json")
OPTIMIZERS = ("optimizer.pt", "latest", "optimizer_0", "optimizer.bin")  # of DeepSpeed and FSDP (sharded, whole) too


def resume_mode(value: str | bool | None) -> str | None:
    """Return None (start at the beginning), `latest`, or a path, of what a flag, a YAML file or a caller says."""
    if value is None or value is False or str(value).lower() in ("", "false", "none"):
        return None
    return "latest" if value is True or str(value).lower() in ("true", "latest") else str(value)


def resolve_checkpoint(resume: str | None, output_dir: Path) -> str | None:
    """Return the checkpoint to continue from, or None to start at the beginning; all processes call it.

    Args:
        resume: as `resume_mode` returns it.
        output_dir: where `latest` looks; with no complete checkpoint there the run starts at the beginning.

    Raises:
        ConfigError: the named checkpoint does not exist or is not complete, or `latest` would start over in the folder
            of a finished run.
    """
    if resume is None:
        return None
    shared = distributed.is_available() and distributed.is_initialized()
    answer: list[str | VGRError | None] = [None]
    if not shared or distributed.get_rank() == 0:
        try:
            answer = [_find(resume, output_dir)]
        except VGRError as error:
            answer = [error]
    if shared:  # what one process sees holds for all, so that they do not decide differently
        distributed.broadcast_object_list(answer)
    if isinstance(answer[0], VGRError):
        raise answer[0]
    return answer[0]


def _find(resume: str, output_dir: Path) -> str | None:
    if resume != "latest":
        if wrong := why_incomplete(Path(resume)):
            named = f"resume_from_checkpoint is {resume}, which is not complete ({wrong})"
            raise ConfigError(f"{named}: give another checkpoint, or latest.")
        return resume
    for checkpoint in reversed(checkpoints_of(output_dir)):
        wrong = why_incomplete(checkpoint)
        if wrong is None:
            return str(checkpoint)
        logger.warning(f"resume_from_checkpoint latest skips {checkpoint}, which is not complete: {wrong}.")
    if models := [name for name in TRACES if (output_dir / name).exists()]:
        found = f"{output_dir} has no complete checkpoint, only a finished run ({models[0]})"
        raise ConfigError(f"resume_from_checkpoint is latest, but {found}: choose another output_dir.")
    logger.warning(f"resume_from_checkpoint latest finds no complete checkpoint in {output_dir}: a new run starts.")
    return None


def checkpoints_of(output_dir: Path) -> list[Path]:
    """Return the checkpoints of `output_dir`, complete or not, oldest first."""
    found = [path for path in output_dir.glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdigit()]
    return sorted(found, key=lambda path: int(path.name.split("-")[1]))


def how_to_go_on(output_dir: Path) -> str:
    """Return in words how a run that was interrupted goes on."""
    if saved := [each for each in checkpoints_of(output_dir) if read_manifest(each) is not None]:
        return f"--resume_from_checkpoint continues from {saved[-1]}"
    return "no checkpoint was saved (see save_steps), so the same command starts over"


def why_incomplete(checkpoint: Path) -> str | None:
    """Return why a run cannot be continued from `checkpoint`, None if it can."""
    if not checkpoint.is_dir():
        return "it is not a folder"
    manifest = read_manifest(checkpoint)
    if manifest is None:
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
    if not any((checkpoint / name).exists() for name in OPTIMIZERS):  # as with save_only_model
        return "no optimizer was saved"
    return None


def is_finished(checkpoint: str | None, max_steps: int) -> bool:
    """Whether there is a checkpoint that has all `max_steps` steps behind it."""
    if checkpoint is None:
        return False
    state = json.loads((Path(checkpoint) / "trainer_state.json").read_text(encoding="utf-8"))
    return bool(state["global_step"] >= max_steps > 0)


def refuse_finished(checkpoint: str | None, max_steps: int) -> None:
    """Raise `ConfigError` for a checkpoint that has all steps behind it: training would go one too far."""
    if is_finished(checkpoint, max_steps):
        finished = f"The run is finished: {checkpoint} has the model after all {max_steps} steps"
        raise ConfigError(f"{finished}; raise max_steps or num_train_epochs to continue training.")


@contextmanager
def lock_folder(folder: Path, accelerator: Accelerator) -> Iterator[None]:
    """Lock a folder for one training. The kernel releases the lock when the process ends, also after a kill.

    Without a lock: on Windows, and on file systems that have none.

    Raises:
        ConfigError: another run holds the lock; on all processes.
    """
    lock = os.open(folder, os.O_RDONLY) if accelerator.is_main_process and fcntl is not None else None
    try:
        is_free = torch.tensor([lock is None or _is_locked(lock)], device=accelerator.device)
        if not accelerator.gather(is_free).all():
            raise ConfigError(f"Another run is training in {folder}: wait until it ends, or give another output_dir.")
        yield
    finally:
        if lock is not None:
            fcntl.flock(lock, fcntl.LOCK_UN)  # worker processes have inherited it
            os.close(lock)


def _is_locked(lock: int) -> bool:
    """Try to lock for some seconds, since the workers of a killed run take a moment to end."""
    for _ in range(_TRIES):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(0.2)
        except OSError:
            return True
    return False


_TRIES = 15


class ResumableTrainer(GRPOTrainer):
    """Methods of a TRL trainer that save and load complete checkpoints.

    Attributes:
        resumed: what is saved and loaded beside weights, optimizer and the place in the data: objects with
            `save(folder)` and `load(folder)`, which every process calls.
        termination: the callback that takes SIGTERM.
        train_sampler: TRL's `RepeatSampler`, whose order a continued run takes up.
    """

    resumed: Sequence[Any] = ()
    termination: Any
    train_sampler: Any = None
    args: "DAPOConfig"
    model: PreTrainedModel
    train_dataset: Dataset | IterableDataset
    _buffered_inputs: Any

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **options: Any) -> TrainOutput:
        """Train; `True` and `latest` resume from the newest complete checkpoint, and an incomplete one is refused.

        Args:
            resume_from_checkpoint: None: as the option of this name says; False: start at the beginning.

        Raises:
            ConfigError: the checkpoint is not complete, or another run is training in the folder.
            ProcessError: another process does not answer, or has ended.
        """
        resume = self.args.resume_from_checkpoint if resume_from_checkpoint is None else resume_from_checkpoint
        checkpoint = resolve_checkpoint(resume_mode(resume), Path(str(self.args.output_dir)))
        try:
            with (
                lock_folder(Path(str(self.args.output_dir)), self.accelerator),
                naming_silent_process(self.args.ddp_timeout, lambda: self.state.global_step + 1),
            ):
                return super().train(checkpoint, *args, **options)
        finally:
            self.termination.restore_handler()

    def _get_train_sampler(self, dataset: Dataset | IterableDataset | None = None) -> Sampler[Any]:
        """Keep TRL's sampler."""
        self.train_sampler = super()._get_train_sampler(dataset)
        return self.train_sampler  # type: ignore[no-any-return]

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save a checkpoint, mark it complete once all is written, and explain a full disk."""
        folder = Path(self._get_output_dir(trial=trial), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        with complete_checkpoint(folder, self.accelerator, self.args.should_save):
            super()._save_checkpoint(model, trial)

    def _save_rng_state(self, output_dir: str) -> None:
        """Save the random state, the further state of a run and its place in the data."""
        super()._save_rng_state(output_dir)
        for part in self.resumed:
            part.save(Path(output_dir))
        save_place(self, Path(output_dir))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load the optimizer and our own state; refuse an optimizer of other weights.

        Raises:
            ConfigError: naming the checkpoint.
        """
        try:
            super()._load_optimizer_and_scheduler(checkpoint)
            if not self.is_fsdp_enabled:  # which has its parts in shapes of their own
                _check_state(getattr(self.optimizer, "optimizer", self.optimizer))
        except (AttributeError, KeyError, TypeError, ValueError, UnpicklingError) as error:
            what = f"The optimizer or scheduler in {checkpoint} does not fit the weights that this run trains"
            cure = "continue with the model, adapter and optim that saved it, or give another checkpoint"
            raise ConfigError(f"{what} ({error_text(error)}): {cure}.") from error
        if checkpoint is not None:
            for part in self.resumed:
                part.load(Path(checkpoint))
            load_place(self, Path(checkpoint))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Load the weights of a checkpoint; the parent would keep those of the start in whole models."""
        if not self._loads_weights(resume_from_checkpoint, self.model if model is None else model):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        """Load the best weights; the parent would keep the last ones in whole models."""
        if not self._loads_weights(str(self.state.best_model_checkpoint), self.model):
            super()._load_best_model()

    def _loads_weights(self, checkpoint: str, model: nn.Module) -> bool:
        if (target := whole_model(self, model)) is not None:
            load_weights(target, checkpoint)
        return target is not None


def _check_state(optimizer: Any) -> None:
    """Raise `ValueError` for the state of another optimizer, or of other weights.

    PyTorch loads both. A step would end in a `KeyError`, and fused AdamW would write past the end of the averages.
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
    """Whether all steps are behind a checkpoint, and what is written after them is not there.

    Args:
        trainer: constructed; with ZeRO or FSDP the answer is no, as only a training loads their checkpoints.
        written_last: the file that a run ends with.
    """
    sharded = trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled
    return is_finished(checkpoint, max_steps) and not sharded and not written_last.exists()


def load_trained(trainer: ResumableTrainer, checkpoint: str) -> None:
    """Give the trainer weights and state of a checkpoint that has all steps behind it, or the best weights if asked."""
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
COMPARED, MOST_COMPARED = ("id", "prompt", "choices", "solution"), 256  # columns and rows that tell data from others


def save_place(trainer: ResumableTrainer, folder: Path) -> None:
    """Write what the order depends on, and within a generation batch the completions still to be trained on."""
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
    """Take up the order of the prompts and the generation batch where the checkpoint was saved.

    Raises:
        ConfigError: the run is finished, or its order cannot be taken up.
    """
    refuse_finished(str(folder), trainer.state.max_steps)
    if trainer.accelerator.is_main_process and (folder / ORDER).exists():  # checkpoints of TRL have none
        there, here = json.loads((folder / ORDER).read_text(encoding="utf-8")), _order_of(trainer)
        changed = [name for name in here if there.get(name) != here[name]]
        if changed:
            differs = ", ".join(f"{name} ({there.get(name)} there, {here[name]} here)" for name in changed)
            effect = "in this epoch some prompts may be repeated, and others skipped"
            logger.warning(f"The run that saved {folder} differs from this one in {differs}: {effect}.")
    epochs, batches = _behind(trainer, folder)
    if trainer.shuffle_dataset and trainer.train_sampler is not None:
        for _ in range(epochs):
            torch.randperm(len(trainer.train_dataset), generator=trainer.train_sampler.generator)
    trainer._step = batches
    if not trainer.args.ignore_data_skip:
        _continue_generation(trainer, folder, batches % _generates_every(trainer))


def _order_of(trainer: ResumableTrainer) -> dict[str, Any]:
    """Return the facts that decide the order of the prompts: options, the length of the data, texts of some rows."""
    found: dict[str, Any] = {"seed": trainer.args.seed, "shuffle_dataset": trainer.shuffle_dataset}
    if isinstance(dataset := trainer.train_dataset, Dataset):
        rows = dataset.with_format(None).select(range(0, len(dataset), -(-len(dataset) // MOST_COMPARED)))
        texts = rows.select_columns([name for name in COMPARED if name in dataset.column_names]).to_list()
        as_json = json.dumps(texts, default=lambda value: type(value).__name__)
        checksum = hashlib.sha256(as_json.encode()).hexdigest()[:12]
        found |= {"number of prompts": len(dataset), "checksum of prompts": checksum}
    return found


def _generates_every(trainer: ResumableTrainer) -> int:
    """Micro-batches of a process from one generation to the next."""
    return int(trainer.args.steps_per_generation or 1) * trainer.num_iterations


def _behind(trainer: ResumableTrainer, folder: Path) -> tuple[int, int]:
    """Whole epochs that are behind the run, and micro-batches since the last generation that began an epoch."""
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
    """Take up the generation batch of a checkpoint that was saved after so many micro-batches of it."""
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
