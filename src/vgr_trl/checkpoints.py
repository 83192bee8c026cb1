"""Save complete checkpoints, and choose a complete checkpoint to resume from.

The manifest names every file of a checkpoint with its size and checksum. It is written last, under a temporary name,
and removed first.
"""

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import xxhash
from accelerate import Accelerator, PartialState
from accelerate.utils import broadcast_object_list
from filelock import FileLock, Timeout
from transformers.utils import logging

from vgr_trl.atomic_files import naming_full_disk, publish, unfinished, write_atomic
from vgr_trl.errors import ConfigError, VGRError
from vgr_trl.patches.transformers import rotate_at_end

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
    names = {path.relative_to(folder).as_posix(): path for path in paths}
    sizes = {name: path.stat().st_size for name, path in names.items()}
    checksums = {name: checksum(path) for name, path in names.items()}
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
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return {"checksums": {}, **manifest}  # older ones have no checksums


@contextmanager
def complete_checkpoint(folder: Path, accelerator: Accelerator, writes: bool) -> Iterator[None]:
    """Write the manifest of a checkpoint once the block has saved it, and delete older checkpoints only then.

    A kill in the block leaves the folder without a manifest, and an older checkpoint to resume from. Files that
    processes of a killed run left in the folder are removed first.

    Args:
        folder: the checkpoint.
        accelerator: of the run; all its processes call this.
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
        process_index: of this process.
        num_processes: of the run.
        kind: file prefix, for example "replay".
    """
    path = folder / SHARE.format(kind, process_index, num_processes)
    torch.save(state, unfinished(path))
    publish(path)


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
    """State of a run beside weights and optimizer, which each process saves and any number of processes restores.

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


TRACES = ("trainer_state.json", "model.safetensors", "model.safetensors.index.json", "adapter_config.json")
OPTIMIZERS = ("optimizer.pt", "latest", "optimizer_0", "optimizer.bin")  # PyTorch, DeepSpeed, FSDP sharded and whole


def resume_mode(value: str | bool | None) -> str | None:
    """Return None (start at the beginning), `latest` or a path for the value of a flag, a YAML file or a caller."""
    if value is None or value is False or str(value).lower() in ("", "false", "none"):
        return None
    return "latest" if value is True or str(value).lower() in ("true", "latest") else str(value)


def resolve_checkpoint(resume: str | None, output_dir: Path) -> str | None:
    """Return the checkpoint to resume from, or None to start at the beginning; all processes call this.

    Args:
        resume: as `resume_mode` returns it.
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
        found = f"{output_dir} has no complete checkpoint, only a finished run ({models[0]})"
        raise ConfigError(f"resume_from_checkpoint is latest, but {found}: choose another output_dir.")
    logger.warning(f"resume_from_checkpoint latest finds no complete checkpoint in {output_dir}: a new run starts.")
    return None


def checkpoints_of(output_dir: Path) -> list[Path]:
    """Return the checkpoints in a folder, complete or not, oldest first."""
    found = [path for path in output_dir.glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdigit()]
    return sorted(found, key=lambda path: int(path.name.split("-")[1]))


def how_to_go_on(output_dir: Path) -> str:
    """Return a sentence that says how to resume an interrupted run."""
    if saved := [each for each in checkpoints_of(output_dir) if read_manifest(each) is not None]:
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
    if not any((checkpoint / name).exists() for name in OPTIMIZERS):  # as with save_only_model
        return "no optimizer was saved"
    return None


def is_finished(checkpoint: str | None, max_steps: int) -> bool:
    """Return whether a checkpoint was saved after all `max_steps` steps; False for None."""
    if checkpoint is None:
        return False
    state = json.loads((Path(checkpoint) / "trainer_state.json").read_text(encoding="utf-8"))
    return bool(state["global_step"] >= max_steps > 0)


def refuse_finished(checkpoint: str | None, max_steps: int) -> None:
    """Raise `ConfigError` for the checkpoint of a finished run, as training would add a step."""
    if is_finished(checkpoint, max_steps):
        finished = f"The run is finished: {checkpoint} has the model after all {max_steps} steps"
        raise ConfigError(f"{finished}; raise max_steps or num_train_epochs to continue training.")


@contextmanager
def lock_folder(folder: Path, accelerator: Accelerator) -> Iterator[None]:
    """Lock a folder for one training. The kernel releases the lock when the process ends, also after a kill.

    A file system without locks is used without one.

    Args:
        folder: an existing output folder.
        accelerator: of the run, whose main process holds the lock.

    Raises:
        ConfigError: another run holds the lock; on all processes.
    """
    # Without `fallback_to_soft`: a file as the mark of a lock would outlive a killed run.
    lock, is_free = FileLock(folder / LOCK, timeout=LOCK_SECONDS, fallback_to_soft=False), True
    try:
        if accelerator.is_main_process:
            lock.acquire()
    except Timeout:
        is_free = False
    except OSError:  # the file system has no locks
        pass
    with ExitStack() as stack:
        stack.callback(lock.release)
        if not accelerator.gather(torch.tensor([is_free], device=accelerator.device)).all():
            raise ConfigError(f"Another run is training in {folder}: wait until it ends, or give another output_dir.")
        yield
