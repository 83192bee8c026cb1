"""Checkpoints: complete or not there, what each process keeps of its own, and which one a run is continued from.

The manifest names every file with its size. It is written last, under a temporary name, and removed first.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from accelerate import Accelerator
from torch import distributed
from transformers import trainer as trainer_module
from transformers.utils import logging

from vgr_trl.utils import ConfigError, VGRError, naming_full_disk, patched_attribute

logger = logging.get_logger(__name__)

MANIFEST = "manifest.json"


def write_manifest(folder: str | Path, num_processes: int = 1) -> None:
    """Name every file of a checkpoint with its size, which makes the checkpoint complete.

    Call it by hand on a checkpoint of TRL that is known to be complete.

    Args:
        num_processes: how many saved it.
    """
    folder = Path(folder)
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(MANIFEST))
    sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in paths}
    unfinished = folder / f"{MANIFEST}.unfinished"
    unfinished.write_text(json.dumps({"num_processes": num_processes, "files": sizes}, indent=1), encoding="utf-8")
    unfinished.replace(folder / MANIFEST)


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Return the manifest of a checkpoint, None if it has none that can be read."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        return {"num_processes": int(manifest["num_processes"]), "files": dict(manifest["files"])}
    except (OSError, ValueError, OverflowError, TypeError, KeyError):
        return None


SHARE = "{}_{}_of_{}.pt"  # what a process keeps beside weights and optimizer, by kind, process and number of processes
KINDS = {"choice": "the replay buffer", "generation": "the generation batch", "kl": "the coefficient of the KL"}


@contextmanager
def complete_checkpoint(folder: Path, accelerator: Accelerator, writes: bool) -> Iterator[None]:
    """Make a checkpoint folder that is written inside complete at the end, or leave it without a manifest.

    Older checkpoints are deleted after that, so that a kill in between leaves one to continue from.

    Args:
        writes: whether this process writes what processes share.

    Raises:
        DiskFullError: naming the file that was being written.
    """
    rotate, held = trainer_module.rotate_checkpoints, []
    with naming_full_disk(folder, "free space there, then continue with resume_from_checkpoint latest"):
        if writes:
            (folder / MANIFEST).unlink(missing_ok=True)
        accelerator.wait_for_everyone()
        with patched_attribute(trainer_module, "rotate_checkpoints", lambda **options: held.append(options)):
            yield
        accelerator.wait_for_everyone()
        if writes:
            write_manifest(folder, accelerator.num_processes)
    for options in held:
        rotate(**options)


def save_share(state: dict[str, Any], folder: Path, process_index: int, num_processes: int, kind: str) -> None:
    """Write a process's share of a run's state into a checkpoint folder, all of it or nothing.

    Shares of another number of processes, left there by a run that was killed while saving, are removed.

    Args:
        state: tensors, numbers, texts, lists and dictionaries.
        kind: one of `KINDS`.
    """
    for other in shares_of(folder, kind):
        if _written_by(other) != num_processes:
            other.unlink(missing_ok=True)
    path = folder / SHARE.format(kind, process_index, num_processes)
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
    paths = shares_of(folder, kind)
    if only is not None:
        paths = paths[only : only + 1]
    try:
        return [torch.load(path, map_location="cpu", weights_only=True) for path in paths]
    except (OSError, RuntimeError, EOFError, UnpicklingError) as error:
        raise ConfigError(
            f"A share of {KINDS[kind]} in {folder} cannot be read ({type(error).__name__}): give an earlier checkpoint."
        ) from error


def missing_shares(folder: Path, kind: str) -> str | None:
    """Return what is missing of the shares in a checkpoint folder, None if they are complete or none was written."""
    paths = shares_of(folder, kind)
    counts = set(map(_written_by, paths))
    if not paths or counts == {len(paths)}:
        return None
    return f"{len(paths)} of {max(counts)} shares of {KINDS[kind]}"


def _written_by(share: Path) -> int:
    """How many processes wrote the checkpoint that `share` is of."""
    return int(share.stem.split("_")[-1])


def shares_of(folder: Path, kind: str) -> list[Path]:
    return sorted(folder.glob(SHARE.format(kind, "*", "*")), key=lambda path: int(path.stem.split("_")[1]))


TRACES = ("trainer_state.json", "model.safetensors", "model.safetensors.index.json", "adapter_config.json")
SHARDED = ("latest", "optimizer_0", "optimizer.bin")  # where DeepSpeed and FSDP (sharded, whole) have the optimizer


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
    return _answer_of_the_first_process(partial(_latest, output_dir) if resume == "latest" else partial(_named, resume))


def _latest(output_dir: Path) -> str | None:
    for checkpoint in reversed(checkpoints_of(output_dir)):
        wrong = what_is_wrong(checkpoint)
        if wrong is None:
            return str(checkpoint)
        logger.warning(f"resume_from_checkpoint latest passes over {checkpoint}, which is not complete: {wrong}.")
    if models := [name for name in TRACES if (output_dir / name).exists()]:
        raise ConfigError(
            f"resume_from_checkpoint is latest, but output_dir {output_dir} has no complete checkpoint, only a "
            f"finished run ({models[0]}): choose another output_dir."
        )
    logger.warning(f"resume_from_checkpoint latest finds no complete checkpoint in {output_dir}: the run starts anew.")
    return None


def _named(resume: str) -> str:
    if not Path(resume).is_dir():
        raise ConfigError(f"resume_from_checkpoint is {resume}, which is no folder: give a checkpoint, or latest.")
    if wrong := what_is_wrong(Path(resume)):
        raise ConfigError(
            f"resume_from_checkpoint is {resume}, which is not complete ({wrong}): give an earlier checkpoint, or "
            "latest."
        )
    return resume


def checkpoints_of(output_dir: Path) -> list[Path]:
    """Return the checkpoints of `output_dir`, complete or not, oldest first."""
    found = [path for path in output_dir.glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdigit()]
    return sorted(found, key=lambda path: int(path.name.split("-")[1]))


def how_to_go_on(output_dir: Path) -> str:
    """Return in words how a run that was interrupted goes on."""
    if saved := [each for each in checkpoints_of(output_dir) if read_manifest(each) is not None]:
        return f"--resume_from_checkpoint continues from {saved[-1]}"
    return "no checkpoint had been saved, so the same command starts again (save_steps says how often they are)"


def what_is_wrong(checkpoint: Path) -> str | None:
    """Return why a run cannot be continued from `checkpoint`, None if it can."""
    manifest = read_manifest(checkpoint)
    if manifest is None:
        return (
            f"no readable {MANIFEST}, which is written last; a complete checkpoint of TRL gets one by "
            "vgr_trl.checkpoints.write_manifest"
        )
    for name, size in manifest["files"].items():
        if not (checkpoint / name).is_file():
            return f"{name} is missing"
        if (checkpoint / name).stat().st_size != size:
            return f"{name} has {(checkpoint / name).stat().st_size} bytes instead of {size}"
    processes = manifest["num_processes"]
    needed = ["trainer_state.json"]
    if not any((checkpoint / name).exists() for name in SHARDED):
        needed += ["optimizer.pt", "scheduler.pt"]
    states = (f"rng_state_{i}.pth" for i in range(processes)) if processes > 1 else ["rng_state.pth"]
    for name in chain(needed, states):  # one by one: a damaged manifest may name any number of processes
        if name not in manifest["files"]:
            return f"no {name} was saved"
    if global_step(checkpoint) is None:
        return "no step in trainer_state.json"
    missing = (missing_shares(checkpoint, kind) for kind in KINDS)
    return next((f"only {what}" for what in missing if what is not None), None)


def global_step(checkpoint: Path) -> int | None:
    """Return the step that `checkpoint` was saved at, None if its state cannot be read."""
    try:
        step = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8")).get("global_step")
    except (OSError, ValueError, AttributeError):
        return None
    return step if isinstance(step, int) else None


def refuse_finished(checkpoint: str | None, max_steps: int) -> None:
    """Refuse to continue from a checkpoint that has all `max_steps` steps behind it: training would go one too far.

    Raises:
        ConfigError: naming both steps.
    """
    step = global_step(Path(checkpoint)) if checkpoint else None
    if step is not None and step >= max_steps > 0:
        raise ConfigError(
            f"The run is finished: {checkpoint}, which has its model, was saved at step {step} of {max_steps}; raise "
            "max_steps or num_train_epochs to train on."
        )


def refuse_other_number(checkpoint: str | None, processes: int) -> None:
    """Refuse to continue a checkpoint of ZeRO with another number of processes than saved it, as DeepSpeed does later.

    Raises:
        ConfigError: naming both numbers.
    """
    manifest = read_manifest(Path(checkpoint)) if checkpoint else None
    if manifest is not None and manifest["num_processes"] != processes:
        raise ConfigError(
            f"{checkpoint} was saved by {manifest['num_processes']} processes, between which ZeRO has divided the "
            f"optimizer, and {processes} would continue it: start {manifest['num_processes']}, or convert it with "
            "DeepSpeed's ds_to_universal and set load_universal in its configuration."
        )


def _answer_of_the_first_process(ask: Callable[[], str | None]) -> str | None:
    """What one process sees holds for all, so that they do not decide differently."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return ask()
    answer: list[str | VGRError | None] = [None]
    if distributed.get_rank() == 0:
        try:
            answer = [ask()]
        except VGRError as error:
            answer = [error]
    distributed.broadcast_object_list(answer)
    if isinstance(answer[0], VGRError):
        raise answer[0]
    return answer[0]
