"""Trackers (wandb, TensorBoard, …): under which names they get metrics, and what becomes of one that fails."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from transformers import TrainerCallback
from transformers.integrations import integration_utils
from transformers.utils import logging

from vgr_trl.errors import ConfigError
from vgr_trl.reporting.metric_names import in_verl
from vgr_trl.sharing import replaced
from vgr_trl.training.constructed import ConstructedTrainer

logger = logging.get_logger(__name__)
_LATER = ("on_step_begin", "on_step_end", "on_log", "on_evaluate", "on_save", "on_predict", "on_train_end")


def _trackers(trainer: ConstructedTrainer) -> Iterator[TrainerCallback]:
    """Those of `report_to`."""
    return (each for each in trainer.callback_handler.callbacks if type(each).__module__ == integration_utils.__name__)


def outlive_trackers(trainer: ConstructedTrainer) -> None:
    """Let a tracker that cannot be started end the run in one sentence, and one that fails later not end it.

    Raises, in the run:
        ConfigError: a tracker cannot be started.
    """
    for tracker in _trackers(trainer):
        name = type(tracker).__name__.removesuffix("Callback")
        tracker.on_train_begin = partial(_start, tracker.on_train_begin, name)  # type: ignore[method-assign]
        failed: set[str] = set()
        for event in _LATER:
            setattr(tracker, event, partial(_go_on, getattr(tracker, event), name, failed))


def _start(begin: Callable[..., Any], name: str, *args: Any, **kwargs: Any) -> Any:
    try:
        return begin(*args, **kwargs)
    except Exception as error:
        raise ConfigError(
            f"The tracker {name} of report_to cannot be started ({_words(error)}): mend that, keep its data here "
            "(WANDB_MODE=offline for wandb), or give report_to none."
        ) from error


def _go_on(call: Callable[..., Any], name: str, failed: set[str], *args: Any, **kwargs: Any) -> Any:
    try:
        return call(*args, **kwargs)
    except Exception as error:
        if not failed:
            logger.warning(
                f"The tracker {name} has failed ({_words(error)}), and training goes on: what it misses is in "
                "trainer_state.json and rollouts/logs.jsonl. This is said once."
            )
        failed.add(name)
        return None


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def name_for_trackers(trainer: ConstructedTrainer) -> None:
    """Let the trackers of the trainer log as `metric_names` says, and without what a step has no value of."""
    processes = None if trainer.args.metric_names == "trl" else trainer.accelerator.num_processes
    for tracker in _trackers(trainer):
        tracker.on_log = partial(_log, tracker.on_log, processes)  # type: ignore[method-assign]


def _log(on_log: Any, processes: int | None, *args: Any, logs: Any = None, **kwargs: Any) -> Any:
    """Log numbers; under the names of verl without the `train/` and `eval/` that transformers puts in front."""
    logs = logs and {name: value for name, value in logs.items() if value is not None}
    if logs is None or processes is None:
        return on_log(*args, logs=logs, **kwargs)
    with replaced(integration_utils, "rewrite_logs", dict):
        return on_log(*args, logs=in_verl(logs, processes), **kwargs)
