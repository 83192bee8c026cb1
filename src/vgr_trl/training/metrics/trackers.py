"""Trackers (wandb, TensorBoard, …) that get metrics under the names of verl; all else keeps the names of TRL."""

from functools import partial
from typing import Any

from transformers.integrations import integration_utils

from vgr_trl.reporting.metric_names import in_verl
from vgr_trl.sharing import replaced
from vgr_trl.training.constructed import ConstructedTrainer


def name_for_trackers(trainer: ConstructedTrainer) -> None:
    """Let the trackers of the trainer log as `metric_names` says."""
    if trainer.args.metric_names == "trl":
        return
    for callback in trainer.callback_handler.callbacks:
        if type(callback).__module__ == integration_utils.__name__:
            callback.on_log = partial(_log, callback.on_log, trainer.accelerator.num_processes)


def _log(on_log: Any, processes: int, *args: Any, logs: Any = None, **kwargs: Any) -> Any:
    """Log without the `train/` and `eval/` that transformers puts in front."""
    if logs is None:
        return on_log(*args, logs=logs, **kwargs)
    with replaced(integration_utils, "rewrite_logs", dict):
        return on_log(*args, logs=in_verl(logs, processes), **kwargs)
