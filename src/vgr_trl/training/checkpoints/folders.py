"""Which checkpoint a run is continued from."""

import json
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path

from torch import distributed
from transformers.utils import logging

from vgr_trl.errors import ConfigError, VGRError
from vgr_trl.training.checkpoints.manifest import MANIFEST, read_manifest, what_differs
from vgr_trl.training.checkpoints.shares import KINDS, missing_shares

logger = logging.get_logger(__name__)

TRACES = ("trainer_state.json", "model.safetensors", "model.safetensors.index.json", "adapter_config.json")
SHARDED = ("latest", "optimizer_0", "optimizer.bin")  # where DeepSpeed and FSDP (sharded, whole) have the optimizer


class WholeCheckpoint(str):
    """The path of a checkpoint that was found to be complete, so that its files are not read for that again."""


def resume_mode(value: str | bool | None) -> str | None:
    """Return None (start at the beginning), `latest`, or a path, of what a flag, a YAML file or a caller says."""
    if isinstance(value, WholeCheckpoint):
        return value
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
    if resume is None or isinstance(resume, WholeCheckpoint):
        return resume
    found = _answer_of_the_first_process(partial(_latest if resume == "latest" else _named, resume, output_dir))
    return None if found is None else WholeCheckpoint(found)


def _latest(_: str, output_dir: Path) -> str | None:
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


def _named(resume: str, _: Path) -> str:
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
            f"no readable {MANIFEST}, which is written last; a whole checkpoint of TRL or of an earlier vgr_trl gets "
            "one by vgr_trl.training.checkpoints.manifest.write_manifest"
        )
    if (difference := what_differs(checkpoint, manifest["files"])) is not None:
        return difference
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
    """What one process sees holds for all: they do not read every file again, nor decide differently."""
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
