"""Keep a run alive when a tracker of `report_to` fails, and rename the metrics that trackers get."""

from collections.abc import Callable
from functools import partial
from typing import Any

from transformers.integrations import integration_utils
from transformers.utils import logging

from vgr_trl.callbacks.metric_names import rename_for_mtrl, rename_for_verl
from vgr_trl.errors import ConfigError, error_text
from vgr_trl.patching import patched_attribute
from vgr_trl.rollout import ConstructedTrainer

logger = logging.get_logger(__name__)

_GUARDED_EVENTS = ("on_step_begin", "on_step_end", "on_log", "on_evaluate", "on_save", "on_predict", "on_train_end")


def guard_trackers(trainer: ConstructedTrainer) -> None:
    """Rename the metrics of the trackers of `report_to` by `metric_names`; a tracker that fails does not end the run.

    Raises, at the start of training:
        ConfigError: a tracker cannot be started.
    """
    rename: Any = {"trl": None, "verl": rename_for_verl, "mtrl": rename_for_mtrl}[trainer.args.metric_names]
    if rename is not None:
        rename = partial(rename, processes=trainer.accelerator.num_processes)
    for tracker in trainer.callback_handler.callbacks:
        if type(tracker).__module__ != integration_utils.__name__:
            continue
        name, failed = type(tracker).__name__.removesuffix("Callback"), set[str]()
        tracker.on_train_begin = partial(_start, tracker.on_train_begin, name)
        tracker.on_log = partial(_log, tracker.on_log, rename)
        for event in _GUARDED_EVENTS:
            setattr(tracker, event, partial(_call_or_warn, getattr(tracker, event), name, failed))


def _start(begin: Callable[..., Any], name: str, *args: Any, **kwargs: Any) -> Any:
    try:
        return begin(*args, **kwargs)
    except Exception as error:
        cause = f"{type(error).__name__}: {error_text(error)}"
        raise ConfigError(f"Tracker {name} of report_to cannot be started ({cause}): give report_to none.") from error


def _call_or_warn(call: Callable[..., Any], name: str, failed: set[str], *args: Any, **kwargs: Any) -> Any:
    try:
        return call(*args, **kwargs)
    except Exception as error:
        if not failed:
            cause = f"{type(error).__name__}: {error_text(error)}"
            logger.warning(f"Tracker {name} failed ({cause}); training continues. trainer_state.json has all metrics.")
        failed.add(name)
        return None


def _log(on_log: Any, renamed: Any, *args: Any, logs: Any = None, **kwargs: Any) -> Any:
    """Log numbers; under the names of others without the `train/` and `eval/` that transformers puts in front."""
    logs = logs and {name: value for name, value in logs.items() if value is not None}
    if logs is None or renamed is None:
        return on_log(*args, logs=logs, **kwargs)
    with patched_attribute(integration_utils, "rewrite_logs", dict):
        return on_log(*args, logs=renamed(logs), **kwargs)
