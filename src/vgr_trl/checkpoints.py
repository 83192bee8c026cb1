"""Checkpoints: weights loaded all or none, and what each process keeps of its own."""

import copy
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedModel

from vgr_trl.errors import ConfigError

SHARE = "choice_{}_of_{}.pt"  # what a process keeps beside weights and optimizer: its part of the replay buffer


def load_weights(model: PreTrainedModel, checkpoint: str) -> None:
    """Set the weights of `model`, in place, to those saved in the folder `checkpoint`.

    transformers saves vision-language models under other names than their parameters have. `from_pretrained` renames
    them back; the trainer's own loading does not, and then keeps the weights of the start with a warning (seen with
    transformers 5.23 and Qwen2.5-VL).

    Raises:
        ConfigError: the checkpoint cannot be read, is of another architecture or size, or lacks weights.
    """
    loading: Any = type(model)
    try:
        if (kind := AutoConfig.from_pretrained(checkpoint).model_type) != model.config.model_type:
            raise ValueError(f"it is a {kind}, not a {model.config.model_type}")
        saved, report = loading.from_pretrained(
            checkpoint,
            config=copy.deepcopy(model.config),
            dtype=model.dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
        _refuse_incomplete(report, checkpoint)
        model.load_state_dict(saved.state_dict(), strict=True)
    except (OSError, ValueError, RuntimeError) as error:
        if isinstance(error, ConfigError):
            raise
        cause = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"The checkpoint {checkpoint} does not fit the model {type(model).__name__} ({cause}): continue with the "
            "model that it was saved from, or give an earlier checkpoint."
        ) from error


def _refuse_incomplete(report: dict[str, Any], checkpoint: str) -> None:
    for kind, names in report.items():
        if names and kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            some = ", ".join(sorted(map(str, names))[:3])
            raise ConfigError(
                f"The checkpoint {checkpoint} has {len(names)} {kind.replace('_', ' ')} ({some}, …): give one that was "
                "written to the end, of the same model."
            )


def save_share(state: dict[str, Any], folder: Path, process_index: int, num_processes: int) -> None:
    """Write a process's share of a run's state into a checkpoint folder, whole or not at all.

    Shares of another number of processes, left there by a run that was killed while saving, are removed.

    Args:
        state: tensors, numbers, texts, lists and dictionaries.
        folder: the checkpoint.
        process_index: in [0, num_processes).
        num_processes: how many write a share.
    """
    path = folder / SHARE.format(process_index, num_processes)
    for other in _shares(folder):
        if _written_by(other) != num_processes:
            other.unlink(missing_ok=True)
    unfinished = path.with_suffix(".unfinished")
    torch.save(state, unfinished)
    unfinished.replace(path)


def load_shares(folder: Path) -> list[dict[str, Any]]:
    """Return the shares in a checkpoint folder, in the order of their processes; none if none was written.

    Raises:
        ConfigError: some are missing or unreadable.
    """
    if (missing := missing_shares(folder)) is not None:
        raise ConfigError(
            f"The checkpoint {folder} has {missing}: bring those of all processes there, or give an earlier checkpoint."
        )
    try:
        return [torch.load(path, map_location="cpu", weights_only=True) for path in _shares(folder)]
    except (OSError, RuntimeError, EOFError, UnpicklingError) as error:
        raise ConfigError(
            f"A share of the replay buffer in {folder} cannot be read ({type(error).__name__}): give an earlier "
            "checkpoint."
        ) from error


def missing_shares(folder: Path) -> str | None:
    """Return what is missing of the shares in a checkpoint folder, None if they are whole or none was written."""
    paths = _shares(folder)
    counts = set(map(_written_by, paths))
    if not paths or counts == {len(paths)}:
        return None
    return f"{len(paths)} of {max(counts)} shares of the replay buffer"


def _written_by(share: Path) -> int:
    """How many processes wrote the checkpoint that `share` is of."""
    return int(share.stem.split("_")[-1])


def _shares(folder: Path) -> list[Path]:
    return sorted(folder.glob(SHARE.format("*", "*")), key=lambda path: int(path.stem.split("_")[1]))
