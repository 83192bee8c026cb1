"""The folder of a run: whose it is, and where it can be continued."""

import json
from pathlib import Path
from typing import Any

from vgr_trl.errors import ConfigError

RUN_FILE = "run.json"
TRACES = (RUN_FILE, "trainer_state.json", "model.safetensors", "model.safetensors.index.json", "adapter_config.json")


def complete_checkpoints(output_dir: Path) -> list[Path]:
    """Return the checkpoints of `output_dir` that were written to the end, oldest first.

    The trainer writes `trainer_state.json` last, so a run killed while saving leaves a folder without a readable one.
    """
    found = [path for path in output_dir.glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdigit()]
    return [path for path in sorted(found, key=lambda path: int(path.name.split("-")[1])) if is_complete(path)]


def is_complete(checkpoint: Path) -> bool:
    """Return whether the state file of `checkpoint` is there and whole."""
    try:
        json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return True


def resume_mode(value: str | bool | None) -> str | None:
    """Return None (start at the beginning), `latest`, or a path, of what a flag or a YAML file says."""
    if value is None or value is False or str(value).lower() in ("", "false", "none"):
        return None
    return "latest" if value is True or str(value).lower() in ("true", "latest") else str(value)


def resolve_checkpoint(resume: str | None, output_dir: Path) -> str | None:
    """Return the checkpoint to continue from, or None to start at the beginning.

    Args:
        resume: as `resume_mode` returns it.
        output_dir: where `latest` looks; without any checkpoint there the run starts at the beginning.

    Raises:
        ConfigError: the named checkpoint does not exist or was not written to the end.
    """
    if resume is None:
        return None
    if resume == "latest":
        checkpoints = complete_checkpoints(output_dir)
        return str(checkpoints[-1]) if checkpoints else None
    if not Path(resume).is_dir():
        raise ConfigError(f"resume_from_checkpoint is {resume}, which is no folder: give a checkpoint, or latest.")
    if not is_complete(Path(resume)):
        raise ConfigError(
            f"resume_from_checkpoint is {resume}, which was not written to the end (no readable trainer_state.json): "
            "give an earlier checkpoint, or latest."
        )
    return resume


def claim(output_dir: Path, identity: dict[str, Any], resume: str | None) -> None:
    """Refuse a folder that holds another run, and refuse to continue a run with another model, data set or rewards.

    Args:
        output_dir: of this run.
        identity: what makes the run the same one: model, data, reward functions.
        resume: as `resume_mode` returns it.

    Raises:
        ConfigError: naming what is there, or what differs.
    """
    if output_dir.exists() and not output_dir.is_dir():
        raise ConfigError(f"output_dir {output_dir} is a file: choose a folder.")
    previous = output_dir / RUN_FILE
    if resume is None:
        traces = [output_dir / name for name in TRACES if (output_dir / name).exists()]
        traces += sorted(output_dir.glob("checkpoint-*"))
        if traces:
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
