"""Checkpoints: complete or not, and what each process keeps of its own."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from accelerate import Accelerator
from transformers import trainer as trainer_module

from vgr_trl.disk_full import disk_full_named
from vgr_trl.errors import ConfigError
from vgr_trl.replacing import replaced
from vgr_trl.training.checkpoints.manifest import remove_manifest, write_manifest

SHARE = "{}_{}_of_{}.pt"  # what a process keeps beside weights and optimizer, by kind, process and number of processes
KINDS = {"choice": "the replay buffer", "generation": "the generation batch", "kl": "the coefficient of the KL"}


@contextmanager
def whole_checkpoint(folder: Path, accelerator: Accelerator, writes: bool) -> Iterator[None]:
    """Make a checkpoint folder that is written inside complete at the end, or leave it without a manifest.

    Older checkpoints are deleted after that, so that a kill in between leaves one to continue from.

    Args:
        writes: whether this process writes what processes share.

    Raises:
        DiskFullError: naming the file that was being written.
    """
    rotate, held = trainer_module.rotate_checkpoints, []
    with disk_full_named(folder, "free space there, then continue with resume_from_checkpoint latest"):
        if writes:
            remove_manifest(folder)
        accelerator.wait_for_everyone()
        with replaced(trainer_module, "rotate_checkpoints", lambda **options: held.append(options)):
            yield
        accelerator.wait_for_everyone()
        if writes:
            write_manifest(folder, accelerator.num_processes)
    for options in held:
        rotate(**options)


def save_share(state: dict[str, Any], folder: Path, process_index: int, num_processes: int, kind: str) -> None:
    """Write a process's share of a run's state into a checkpoint folder, whole or not at all.

    Shares of another number of processes, left there by a run that was killed while saving, are removed.

    Args:
        state: tensors, numbers, texts, lists and dictionaries.
        kind: one of `KINDS`.
    """
    path = folder / SHARE.format(kind, process_index, num_processes)
    for other in _shares(folder, kind):
        if _written_by(other) != num_processes:
            other.unlink(missing_ok=True)
    unfinished = path.with_suffix(".unfinished")
    torch.save(state, unfinished)
    unfinished.replace(path)


def remove_share(folder: Path, process_index: int, num_processes: int, kind: str) -> None:
    """Remove what an earlier save left of this process in a checkpoint folder that is written anew."""
    (folder / SHARE.format(kind, process_index, num_processes)).unlink(missing_ok=True)


def load_shares(folder: Path, kind: str, only: int | None = None) -> list[dict[str, Any]]:
    """Return the shares in a checkpoint folder, in the order of their processes; none if none was written.

    Args:
        only: the one process whose share is read.

    Raises:
        ConfigError: some are missing or unreadable.
    """
    if (missing := missing_shares(folder, kind)) is not None:
        raise ConfigError(
            f"The checkpoint {folder} has {missing}: bring those of all processes there, or give an earlier checkpoint."
        )
    paths = _shares(folder, kind)
    try:
        return [
            torch.load(path, map_location="cpu", weights_only=True)
            for path in (paths if only is None else paths[only : only + 1])
        ]
    except (OSError, RuntimeError, EOFError, UnpicklingError) as error:
        raise ConfigError(
            f"A share of {KINDS[kind]} in {folder} cannot be read ({type(error).__name__}): give an earlier checkpoint."
        ) from error


def num_shares(folder: Path, kind: str) -> int:
    """Return how many shares of a kind a checkpoint folder holds."""
    return len(_shares(folder, kind))


def missing_shares(folder: Path, kind: str) -> str | None:
    """Return what is missing of the shares in a checkpoint folder, None if they are whole or none was written."""
    paths = _shares(folder, kind)
    counts = set(map(_written_by, paths))
    if not paths or counts == {len(paths)}:
        return None
    return f"{len(paths)} of {max(counts)} shares of {KINDS[kind]}"


def _written_by(share: Path) -> int:
    """How many processes wrote the checkpoint that `share` is of."""
    return int(share.stem.split("_")[-1])


def _shares(folder: Path, kind: str) -> list[Path]:
    return sorted(folder.glob(SHARE.format(kind, "*", "*")), key=lambda path: int(path.stem.split("_")[1]))
