"""Keep a run alive when a tracker of `report_to` fails, rename the metrics that it logs, and print a line per step."""

import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from shutil import get_terminal_size
from statistics import fmean
from typing import Any

import yaml
from tqdm.auto import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm
from transformers import PrinterCallback, ProgressCallback
from transformers.integrations import integration_utils
from transformers.utils import logging

from vgr_trl.errors import ConfigError, error_text
from vgr_trl.patching import patched_attribute
from vgr_trl.rewards.calling import LATE_REWARD

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
    named = [(name, verl_name) for name in logs for verl_name in _find_verl_names(name)]
    renamed = {verl_name: logs[name] for name, verl_name in named if verl_name == name or verl_name not in logs}
    if "loss" in logs:
        renamed.setdefault("actor/pg_loss", logs["loss"])
    if "perf/tokens_per_second" in logs:
        renamed["perf/throughput"] = logs["perf/tokens_per_second"] / processes
    if seconds := [renamed.pop(name) for name in ("timing/update", "timing/optimizer") if name in renamed]:
        renamed["timing_s/update_actor"] = sum(seconds)
    return renamed


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
        return [f"val_{verl_name}" for verl_name in VERL_METRICS[plain]]
    return (name,)


_REWARD_MEAN = re.compile(r"rewards?/([^/]+)(?:/mean)?")
_STEP_QUANTITIES = (  # heading, logged name (EasyR1 reward files: reward/…), format, order in which a line drops them
    ("reward", "reward", "{:.3f}", 8),
    ("accuracy", "rewards/accuracy_reward/mean", "{:.3f}", 8),
    ("accuracy", "reward/accuracy", "{:.3f}", 8),
    ("format", "rewards/think_format_reward/mean", "{:.2f}", 4),
    ("tokens", "completions/mean_length", "{:.0f}", 6),
    ("VGR", "attention/late/vgr", "{:.3f}", 5),
    ("varied", "sampling/nonzero_variance_fraction", "{:.0%}", 2),
    ("loss", "loss", "{:.4f}", 1),
)


def step_line(
    step: int, total: int, logs: Mapping[str, float], seconds_per_step: float | None, columns: int = 80
) -> str:
    """Return one line: step, rewards, tokens per completion, VGR, groups with variance, seconds per step, time left.

    Args:
        total: steps of the run.
        logs: logs of this step; missing quantities are omitted.
        seconds_per_step: mean over recent steps; None: not known yet.
        columns: width; quantities that do not fit are dropped, the loss first.
    """
    parts = [(9, f"step {step:>{len(str(total))}}/{total}")]
    shown = {name for _, name, _, _ in _STEP_QUANTITIES}
    rewards = [(match[1].removesuffix("_reward"), match[0]) for match in map(_REWARD_MEAN.fullmatch, logs) if match]
    extra = [(heading, name, "{:.3f}", 3) for heading, name in rewards if name not in shown]
    for heading, name, form, rank in (*_STEP_QUANTITIES[:4], *extra, *_STEP_QUANTITIES[4:]):
        if (value := logs.get(name)) is not None:
            parts.append((rank, f"{heading} {form.format(value)}"))
    if seconds_per_step is not None:
        left = (total - step) * seconds_per_step
        parts += [(3, f"{seconds_per_step:.1f} s/step")] + [(7, f"{format_duration(left)} left")] * (step < total)
    while len(line := "  ".join(text for _, text in parts)) > columns and len(parts) > 1:
        parts.remove(min(parts, key=lambda part: part[0]))
    return line


def evaluation_prefix(logs: Mapping[str, float]) -> str | None:
    """Return `eval_`, or `eval_NAME_` for one of several evaluation sets; None for logs of training."""
    return next((name.removesuffix("runtime") for name in logs if re.fullmatch("eval_(.+_)?runtime", name)), None)


def evaluation_line(step: int, logs: Mapping[str, float], prefix: str) -> str:
    """Return one line about an evaluation: set, step, reward, accuracy."""
    names = [(heading, f"{prefix}{name}") for heading, name, *_ in _STEP_QUANTITIES[:3]]
    shown = [f"{heading} {logs[name]:.3f}" for heading, name in names if name in logs]
    return f"evaluation{prefix[4:-1].replace('_', ' ', 1)} at step {step}  {'  '.join(shown)}"


def progress_lines(
    history: Sequence[Mapping[str, Any]], evaluated: str, before: Mapping[str, float], completions: int
) -> list[str]:
    """Return lines with reward and accuracy at the start and the end of training and of the evaluations.

    Args:
        history: `log_history` of a trainer's state.
        evaluated: description of the evaluation data, such as `64 rows`.
        before: metrics of the evaluation completions that were recorded before training; empty if there are none.
        completions: number of these completions.
    """
    lines = []
    changes = any(LATE_REWARD in entry for entry in history)
    for title, prefix in (("training", ""), ("evaluation", "eval_")):
        logs = [entry for entry in history if f"{prefix}reward" in entry]
        few = 1 if prefix else -(-len(logs) // 10)  # a tenth, as in the report
        parts, recorded = list[str](), list[str]()
        for heading, name, *_ in _STEP_QUANTITIES[:3]:
            if changes and name == "reward" and not prefix:
                heading, name = "reward under the late weights", LATE_REWARD
            if values := [entry[prefix + name] for entry in logs if prefix + name in entry]:
                ends = [fmean(values[:few]), fmean(values[-few:])][len(values) == 1 :]
                parts.append(f"{heading} {' → '.join(f'{end:.3f}' for end in ends)}")
            if prefix and prefix + name in before:
                recorded.append(f"{heading} {before[prefix + name]:.3f}")
        if parts:
            which = f"(means of the first and last tenth of {len(logs)} logs)"
            if prefix:
                steps = " → ".join(str(step) for step in dict.fromkeys([logs[0]["step"], logs[-1]["step"]]))
                first = f"; before training, on the first {completions} completions: {', '.join(recorded)}"
                which = f"on {evaluated} (step {steps}{first if recorded else ''})"
            lines.append(f"{title:<12}{', '.join(parts)} {which}")
    accuracy = [entry[name] for entry in history for _, name, *_ in _STEP_QUANTITIES[1:3] if name in entry]
    if accuracy and max(accuracy) < 0.01:
        cure = "look at completions in the report; try another model or --system_prompt_file"
        lines.append(f"Accuracy stayed near 0, so the accuracy reward gave no learning signal: {cure}.")
    return lines


def format_duration(seconds: float) -> str:
    """Format a duration: 45 s, 12 min, 3 h 05."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d}"


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
            line = step_line(state.global_step, state.max_steps, logs, seconds, get_terminal_size().columns)
        if line is not None and state.is_world_process_zero:
            with tqdm.external_write_mode():
                print(line, flush=True)


class Bar(ProgressCallback):
    """The progress bar of transformers, with log messages above it instead of behind it."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Show the bar, and write log messages above it until training ends."""
        super().on_train_begin(args, state, control, **kwargs)
        self._redirected = logging_redirect_tqdm()
        self._redirected.__enter__()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Close the bar, and write log messages where they were written before."""
        super().on_train_end(args, state, control, **kwargs)
        self._redirected.__exit__(None, None, None)


class BarAndLines(StepLines, Bar):
    """Prints the lines above the progress bar of transformers."""


def print_lines(callbacks: list[Any]) -> None:
    """Replace the printing callbacks of transformers by `StepLines`; a notebook keeps its table."""
    ours = {PrinterCallback: StepLines, ProgressCallback: BarAndLines}
    callbacks[:] = [ours[type(callback)]() if type(callback) in ours else callback for callback in callbacks]
