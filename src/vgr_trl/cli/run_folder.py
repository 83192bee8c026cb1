"""The folder of a run: whose it is, and where it can be continued."""

import json
from pathlib import Path
from typing import Any

from vgr_trl.errors import ConfigError

RUN_FILE = "run.json"


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


def resolve_checkpoint(resume: str | None, output_dir: Path) -> str | None:
    """Return the checkpoint to continue from, or None to start at the beginning.

    Args:
        resume: None, `latest` (also `true`), or the path of a checkpoint.
        output_dir: where `latest` looks; without any checkpoint there the run starts at the beginning.

    Raises:
        ConfigError: the named checkpoint does not exist or was not written to the end.
    """
    if resume is None or resume.lower() in ("false", "none", ""):
        return None
    if resume.lower() in ("latest", "true"):
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
        resume: the flag `resume_from_checkpoint`.

    Raises:
        ConfigError: naming what is there, or what differs.
    """
    previous = output_dir / RUN_FILE
    traces = [previous] if previous.exists() else sorted(output_dir.glob("checkpoint-*"))
    if resume is None:
        if traces:
            raise ConfigError(
                f"output_dir {output_dir} holds another run ({traces[0].name}): choose another output_dir, or continue "
                "that run with --resume_from_checkpoint latest."
            )
    elif previous.exists():
        before = json.loads(previous.read_text(encoding="utf-8"))
        for name, value in identity.items():
            if name in before and before[name] != value:
                raise ConfigError(
                    f"output_dir {output_dir} holds a run with {name} {before[name]!r}, but {value!r} was given: "
                    "continue it with the same, or choose another output_dir."
                )


def write_identity(output_dir: Path, identity: dict[str, Any]) -> None:
    """Write `run.json`, from which a later start sees whose folder it is."""
    output_dir.mkdir(parents=True, exist_ok=True)
    (output_dir / RUN_FILE).write_text(json.dumps(identity, indent=2) + "\n", encoding="utf-8")
