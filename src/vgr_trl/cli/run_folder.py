"""The folder of a run: whose it is, and where it can be continued."""

import json
import os
import zipfile
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from vgr_trl.checkpoints import missing_shares
from vgr_trl.errors import ConfigError

RUN_FILE = "run.json"
TRACES = ("trainer_state.json", "model.safetensors", "model.safetensors.index.json", "adapter_config.json")


def complete_checkpoints(output_dir: Path) -> list[Path]:
    """Return the checkpoints of `output_dir` that a run can be continued from, oldest first."""
    found = [path for path in output_dir.glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdigit()]
    return [path for path in sorted(found, key=lambda path: int(path.name.split("-")[1])) if not what_is_wrong(path)]


def what_is_wrong(checkpoint: Path) -> str | None:
    """Return why a run cannot be continued from `checkpoint`, None if it can.

    A run killed while saving leaves files out or unfinished; the trainer writes `trainer_state.json` last.
    """
    if global_step(checkpoint) is None:
        return "no readable trainer_state.json"
    if (missing := missing_shares(checkpoint)) is not None:
        return f"only {missing}"
    sharded = any((checkpoint / name).exists() for name in ("latest", "pytorch_model_fsdp_0", "optimizer_0"))
    if sharded:  # DeepSpeed and FSDP keep weights and optimizer in folders of their own
        return None
    for name in ("optimizer.pt", "scheduler.pt"):
        if not _is_zip(checkpoint / name):
            return f"no whole {name}"
    weights = [checkpoint / name for name in ("model.safetensors", "adapter_model.safetensors", "pytorch_model.bin")]
    index = checkpoint / "model.safetensors.index.json"
    if index.exists():
        weights = [checkpoint / name for name in sorted(set(_read(index).get("weight_map", {}).values()))]
        if not weights or not all(map(_is_whole_safetensors, weights)):
            return "missing or unfinished weights"
    elif not any(_is_whole_safetensors(path) or _is_zip(path) for path in weights):
        return "no whole weights"
    return None


def global_step(checkpoint: Path) -> int | None:
    """Return the step that `checkpoint` was saved at, None if its state cannot be read."""
    try:
        step = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8")).get("global_step")
    except (OSError, ValueError, AttributeError):
        return None
    return step if isinstance(step, int) else None


def _is_zip(path: Path) -> bool:
    return path.is_file() and zipfile.is_zipfile(path)


def _is_whole_safetensors(path: Path) -> bool:
    if path.suffix != ".safetensors" or not path.is_file():
        return False
    try:
        with safe_open(path, framework="pt") as file:
            return len(list(file.keys())) > 0
    except (SafetensorError, OSError):
        return False


def resume_mode(value: str | bool | None) -> str | None:
    """Return None (start at the beginning), `latest`, or a path, of what a flag or a YAML file says."""
    if value is None or value is False or str(value).lower() in ("", "false", "none"):
        return None
    return "latest" if value is True or str(value).lower() in ("true", "latest") else str(value)


def resolve_checkpoint(resume: str | None, output_dir: Path) -> str | None:
    """Return the checkpoint to continue from, or None to start at the beginning.

    Args:
        resume: as `resume_mode` returns it.
        output_dir: where `latest` looks; with no complete checkpoint there the run starts at the beginning.

    Raises:
        ConfigError: the named checkpoint does not exist or was not written to the end, or `latest` would start over
            in the folder of a finished run.
    """
    if resume is None:
        return None
    if resume == "latest":
        checkpoints = complete_checkpoints(output_dir)
        if not checkpoints and (models := [name for name in TRACES if (output_dir / name).exists()]):
            raise ConfigError(
                f"resume_from_checkpoint is latest, but output_dir {output_dir} has no checkpoint that was written to "
                f"the end, only a finished run ({models[0]}): choose another output_dir."
            )
        return str(checkpoints[-1]) if checkpoints else None
    if not Path(resume).is_dir():
        raise ConfigError(f"resume_from_checkpoint is {resume}, which is no folder: give a checkpoint, or latest.")
    if wrong := what_is_wrong(Path(resume)):
        raise ConfigError(
            f"resume_from_checkpoint is {resume}, which was not written to the end ({wrong}): give an earlier "
            "checkpoint, or latest."
        )
    return resume


def refuse_finished(checkpoint: str | None, max_steps: int) -> None:
    """Refuse to continue from a checkpoint that has all `max_steps` steps behind it: training would go one too far.

    Raises:
        ConfigError: naming both steps.
    """
    step = global_step(Path(checkpoint)) if checkpoint else None
    if step is not None and step >= max_steps > 0:
        raise ConfigError(
            f"The run is finished: {checkpoint} was saved at step {step} of {max_steps}; raise max_steps or "
            "num_train_epochs to train on."
        )


def claim(output_dir: Path, identity: dict[str, Any], resume: str | None) -> None:
    """Refuse a folder that holds another run, and refuse to continue a run with another model, data set or rewards.

    Args:
        output_dir: of this run.
        identity: what makes the run the same one: model, data, reward functions.
        resume: as `resume_mode` returns it.

    Raises:
        ConfigError: naming what is there, or what differs.
    """
    _refuse_unwritable(output_dir)
    previous = output_dir / RUN_FILE
    if resume is None:
        if traces := _traces(output_dir):
            raise ConfigError(
                f"output_dir {output_dir} holds another run ({traces[0].name}): choose another output_dir, or continue "
                "that run with --resume_from_checkpoint latest."
            )
    elif previous.exists():
        for name, before in _read(previous).items():
            if name in identity and before != identity[name]:
                raise ConfigError(
                    f"output_dir {output_dir} holds a run with {name} {before!r}, but {identity[name]!r} was given: "
                    "continue it with the same, or choose another output_dir."
                )


def claim_again(output_dir: Path, identity: dict[str, Any]) -> None:
    """Refuse a folder that cannot be written to or holds another run than one of `identity`, which may be repeated.

    Raises:
        ConfigError: naming what is there.
    """
    _refuse_unwritable(output_dir)
    run_file = output_dir / RUN_FILE
    if (traces := _traces(output_dir)) and not (run_file.exists() and _read(run_file) == identity):
        raise ConfigError(
            f"output_dir {output_dir} holds another run ({traces[0].name}): choose another output_dir, or empty it."
        )


def _refuse_unwritable(output_dir: Path) -> None:
    for folder in (output_dir, *output_dir.parents):
        if folder.exists():
            if not folder.is_dir() or not os.access(folder, os.W_OK):
                raise ConfigError(f"output_dir {output_dir} cannot be written to: choose a folder.")
            return


def _traces(output_dir: Path) -> list[Path]:
    """What a run leaves behind that must not be overwritten; one that failed before its first checkpoint left none."""
    return [output_dir / name for name in TRACES if (output_dir / name).exists()] + sorted(
        output_dir.glob("checkpoint-*")
    )


def _read(file: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{file} cannot be read ({error}): remove it to continue the run unchecked.") from error


def write_identity(output_dir: Path, identity: dict[str, Any]) -> None:
    """Write `run.json`, from which a later start sees whose folder it is."""
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"output_dir {output_dir} cannot be made ({error}): choose another.") from error
    (output_dir / RUN_FILE).write_text(json.dumps(identity, indent=2) + "\n", encoding="utf-8")
