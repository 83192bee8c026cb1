"""Rewards, folders, trackers."""

import json
import os
from importlib import util
from pathlib import Path

from vgr_trl.config.foreign.rules.values import Set, Values

_FUNCTION = "worker.reward.reward_function"
_TRACKERS = ("wandb", "tensorboard", "mlflow", "swanlab", "trackio")
_OF_MTRL = "reward_function"


def reward(values: Values, set_: Set) -> None:
    """The function of the file, and the score that groups are filtered by as a reward of weight 0."""
    given = values[_FUNCTION]
    kind = values.one_of("worker.reward.reward_type", None, "function", "batch", "sequential")
    if given is None:
        values.stop(_FUNCTION, "give FILE.py:FUNCTION, or --reward_funcs")
        return
    file, colon, name = str(given).rpartition(":")
    if not colon:
        file, name = str(given), _OF_MTRL if kind == "function" else "main"
    spec = f"{file}:{name}"
    key = values["algorithm.filter_key"]
    if values["algorithm.online_filtering"] and key != "overall":
        set_("reward_funcs", [spec, f"{spec}[{key}]"], _FUNCTION, "algorithm.filter_key")
        set_("reward_weights", [1.0, 0.0], "algorithm.filter_key")
    else:
        set_("reward_funcs", [spec], _FUNCTION)
    if kind in ("batch", "sequential"):
        set_("reward_type", kind, "worker.reward.reward_type")
    if arguments := values["worker.reward.reward_function_kwargs"]:
        set_("reward_function_kwargs", json.dumps(arguments), "worker.reward.reward_function_kwargs")


def run(values: Values, set_: Set) -> None:
    """Where the run is saved and continued, and who hears of it."""
    key, project = "trainer.save_checkpoint_path", values["trainer.project_name"]
    folder = values[key] or os.path.join("checkpoints", project, values["trainer.experiment_name"])
    set_("output_dir", folder, key)
    if values["trainer.load_checkpoint_path"] is not None:
        set_("resume_from_checkpoint", values["trainer.load_checkpoint_path"], "trainer.load_checkpoint_path")
    elif values["trainer.find_last_checkpoint"] and any(Path(folder).glob("checkpoint-*")):
        set_("resume_from_checkpoint", "latest", "trainer.find_last_checkpoint")
    set_("project", project, "trainer.project_name")
    logger = values["trainer.logger"]
    names = [logger] if isinstance(logger, str) else list(logger)
    if unknown := [name for name in names if name not in (*_TRACKERS, "console", "file")]:
        values.stop("trainer.logger", f"there is no {', '.join(unknown)} here, but {', '.join(_TRACKERS)}")
    trackers = [name for name in names if name in _TRACKERS]
    if "trainer.logger" not in values.stated:  # a folder ./wandb has a spec too, but no origin
        trackers = [name for name in trackers if getattr(util.find_spec(name), "origin", None)]
    set_("report_to", trackers or ["none"], "trainer.logger")
