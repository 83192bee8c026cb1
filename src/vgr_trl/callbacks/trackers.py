"""Keep a run alive when a tracker of `report_to` fails, and rename the metrics that it logs."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from transformers.integrations import integration_utils
from transformers.utils import logging

from vgr_trl.callbacks.metric_names import rename_for_mtrl, rename_for_verl
from vgr_trl.errors import ConfigError, error_text
from vgr_trl.patching import patched_attribute

logger = logging.get_logger(__name__)

_GUARDED_EVENTS = ("on_step_begin", "on_step_end", "on_log", "on_evaluate", "on_save", "on_predict", "on_train_end")


def guard_trackers(callbacks: Iterable[Any], metric_names: str, processes: int) -> None:
    """Rename the metrics that the trackers of `report_to` log; warn if a tracker fails, and continue.

    A tracker that cannot be started raises `ConfigError` at the start of training.

    Args:
        callbacks: the trainer's callbacks, trackers among them.
        metric_names: `trl`, `verl` or `mtrl`.
        processes: number of processes of the run.
    """
    rename: Any = {"trl": None, "verl": rename_for_verl, "mtrl": rename_for_mtrl}[metric_names]
    if rename is not None:
        rename = partial(rename, processes=processes)
    for tracker in callbacks:
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


def _log(on_log: Any, rename: Any, *args: Any, logs: Any = None, **kwargs: Any) -> Any:
    """Log numbers; renamed metrics without the prefixes `train/` and `eval/` of transformers."""
    logs = logs and {name: value for name, value in logs.items() if value is not None}
    if logs is None or rename is None:
        return on_log(*args, logs=logs, **kwargs)
    with patched_attribute(integration_utils, "rewrite_logs", dict):
        return on_log(*args, logs=rename(logs), **kwargs)
