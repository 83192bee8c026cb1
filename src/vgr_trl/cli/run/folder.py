"""The folder of a run: whose it is."""

import json
from pathlib import Path
from typing import Any

from trl import ModelConfig

from vgr_trl.cli.flags.arguments import DataArguments, RewardArguments
from vgr_trl.config import DAPOConfig
from vgr_trl.data.read.data_files import parse_data_files
from vgr_trl.data.rows.naming import FLAGS
from vgr_trl.errors import ConfigError
from vgr_trl.files import write_whole
from vgr_trl.reporting.records.record_files import refuse_unwritable
from vgr_trl.rewards.registry import hardened
from vgr_trl.training.checkpoints.folders import TRACES

RUN_FILE = "run.json"


def identity_of(
    data: DataArguments, rewards: RewardArguments, config: DAPOConfig, model: ModelConfig
) -> dict[str, Any]:
    """Return what must be the same for a run to be continued."""
    return {
        "model": model.model_name_or_path,
        "data": _resolved(data),
        "dataset_config": data.dataset_config,
        "dataset_train_split": data.dataset_train_split,
        "reward_funcs": hardened(rewards.reward_funcs) if config.vgr_hard_negative else rewards.reward_funcs,
        "reward_model": rewards.reward_model_name_or_path,
        "lora": [model.lora_r, model.lora_target_modules, model.use_dora] if model.use_peft else None,
    }


def _resolved(data: DataArguments) -> str:
    """The source of the data, however its path is spelled, and which of its columns are read."""
    named = "".join(f" {flag}={getattr(data, flag)}" for flag in FLAGS.values() if getattr(data, flag) is not None)
    if data.data_files:
        files = parse_data_files(data.data_files)
        resolved = {split: "+".join(str(path.resolve()) for path in files[split]) for split in sorted(files)}
        return ",".join(f"{split}={paths}" for split, paths in resolved.items()) + named
    return str(data.dataset_name or Path(str(data.dataset_path)).resolve()) + named


def claim(output_dir: Path, identity: dict[str, Any], resume: str | None) -> None:
    """Refuse a folder that holds a run, unless that is continued with the same model, data set and rewards.

    Args:
        identity: what makes the run the same one: model, data, reward functions.
        resume: as `resume_mode` returns it.

    Raises:
        ConfigError: naming what is there, or what differs.
    """
    refuse_unwritable(output_dir, "output_dir", is_folder=True)
    previous = output_dir / RUN_FILE
    if resume is None:
        if traces := _traces(output_dir):
            raise ConfigError(
                f"output_dir {output_dir} holds a run ({traces[0].name}): choose another output_dir, or continue that "
                "run with --resume_from_checkpoint latest."
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
    refuse_unwritable(output_dir, "output_dir", is_folder=True)
    run_file = output_dir / RUN_FILE
    if (traces := _traces(output_dir)) and not (run_file.exists() and _read(run_file) == identity):
        raise ConfigError(
            f"output_dir {output_dir} holds another run ({traces[0].name}): choose another output_dir, or empty it."
        )


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
    write_whole(output_dir / RUN_FILE, (json.dumps(identity, indent=2) + "\n").encode())
