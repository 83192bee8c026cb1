"""Keep a run alive when a tracker of `report_to` fails, rename the metrics that it logs, and print a line per step."""

import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from tqdm.auto import tqdm
from transformers import PrinterCallback, ProgressCallback
from transformers.integrations import integration_utils
from transformers.utils import logging

from vgr_trl.errors import ConfigError, error_text
from vgr_trl.patching import patched_attribute
from vgr_trl.reporting.console import evaluation_line, evaluation_prefix, step_line

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
    rename = {"verl": rename_for_verl, "mtrl": rename_for_mtrl}.get(metric_names)
    for tracker in callbacks:
        if type(tracker).__module__ != integration_utils.__name__:
            continue
        name, failed = type(tracker).__name__.removesuffix("Callback"), set[str]()
        tracker.on_train_begin = partial(_start, tracker.on_train_begin, name)
        tracker.on_log = partial(_log, tracker.on_log, rename, processes)
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


def _log(on_log: Any, rename: Any, processes: int, *args: Any, logs: Any = None, **kwargs: Any) -> Any:
    """Log numbers; renamed metrics without the prefixes `train/` and `eval/` of transformers."""
    logs = logs and {name: value for name, value in logs.items() if value is not None}
    if logs is None or rename is None:
        return on_log(*args, logs=logs, **kwargs)
    with patched_attribute(integration_utils, "rewrite_logs", dict):
        return on_log(*args, logs=rename(logs, processes), **kwargs)


VERL_METRICS: dict[str, list[str]] = yaml.safe_load(
    Path(__file__).with_name("verl_metrics.yaml").read_text(encoding="utf-8")
)


def rename_for_verl(logs: Mapping[str, Any], processes: int = 1) -> dict[str, Any]:
    """Rename metrics to verl's names; metrics without a name in verl keep their names.

    `actor/pg_loss` is the whole loss if TRL logs no part of it, `perf/throughput` counts tokens per second and process,
    `timing_s/update_actor` sums passes and optimizer.

    Args:
        logs: metrics by their names in this library.
        processes: number of processes of the run.
    """
    named = [(name, other) for name in logs for other in _find_verl_names(name)]
    found = {other: logs[name] for name, other in named if other == name or other not in logs}
    if "loss" in logs:
        found.setdefault("actor/pg_loss", logs["loss"])
    if "perf/tokens_per_second" in logs:
        found["perf/throughput"] = logs["perf/tokens_per_second"] / processes
    if seconds := [found.pop(name) for name in ("timing/update", "timing/optimizer") if name in found]:
        found["timing_s/update_actor"] = sum(seconds)
    return found


_MTRL_NAMES = {"actor/kl_loss": "agent/divergence_loss", "actor/kl_coef": "agent/divergence_coef"}


def rename_for_mtrl(logs: Mapping[str, Any], processes: int = 1) -> dict[str, Any]:
    """Rename metrics to MTRL's names: verl's names with `agent/` for `actor/` and `divergence` for `kl`."""
    named = rename_for_verl(logs, processes).items()
    return {_MTRL_NAMES.get(name, re.sub("^actor/", "agent/", name)): value for name, value in named}


def _find_verl_names(name: str) -> Sequence[str]:
    if name in VERL_METRICS:
        return VERL_METRICS[name]
    plain = name.removeprefix("eval_")
    if reward := re.fullmatch("rewards/(.*)/mean|reward/(.*)", plain):
        function = reward[1] or reward[2]
        return (f"reward/{function}" if plain == name else f"val/{function}_reward",)
    if plain != name and plain.startswith("completions/") and plain in VERL_METRICS:
        return [f"val_{other}" for other in VERL_METRICS[plain]]
    return (name,)


LOGS_AVERAGED = 20  # the seconds of a step are averaged over these logs


class StepLines(PrinterCallback):
    """Prints one line per step and per evaluation, instead of a dictionary with a hundred numbers."""

    def __init__(self) -> None:
        super().__init__()
        self._times: deque[tuple[int, float]] = deque(maxlen=LOGS_AVERAGED)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock."""
        super().on_train_begin(args, state, control, **kwargs)
        self._times.append((state.global_step, time.monotonic()))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Print a line on the main process."""
        line = None
        if logs and (prefix := evaluation_prefix(logs)):
            line = evaluation_line(state.global_step, logs, prefix)
        elif logs and "loss" in logs:
            self._times.append((state.global_step, time.monotonic()))
            (first, started), (last, now) = self._times[0], self._times[-1]
            seconds = (now - started) / (last - first) if last > first else None
            line = step_line(state.global_step, state.max_steps, logs, seconds)
        if line is not None and state.is_world_process_zero:
            with tqdm.external_write_mode():
                print(line, flush=True)


class BarAndLines(StepLines, ProgressCallback):
    """Prints the lines above the progress bar of transformers."""


def print_lines(callbacks: list[Any]) -> None:
    """Replace the printing callbacks of transformers by `StepLines`; a notebook keeps its table."""
    ours = {PrinterCallback: StepLines, ProgressCallback: BarAndLines}
    callbacks[:] = [ours[type(each)]() if type(each) in ours else each for each in callbacks]
