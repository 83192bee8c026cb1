"""Callbacks of a run: the line of a step, SIGTERM, updates that are not finite, signs of collapse, failing trackers."""

import re
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import yaml
from accelerate import Accelerator
from torch import nn
from torch.distributed.tensor import DTensor
from tqdm.auto import tqdm
from transformers import PrinterCallback, ProgressCallback, TrainerCallback, TrainerControl, TrainerState
from transformers.integrations import integration_utils
from transformers.utils import logging

from vgr_trl.metrics import StepMetrics
from vgr_trl.reporting.console import evaluation_line, step_line
from vgr_trl.rollout import ConstructedTrainer
from vgr_trl.utils import ConfigError, NotFiniteError, error_text, patched_attribute

logger = logging.get_logger(__name__)
EXIT_STATUS = 128 + signal.SIGTERM  # what a shell says of a process that the signal has ended
SECONDS_OF_ONE_REQUEST = 10
WINDOW = 20  # logs over which the seconds of a step are averaged


class StepLines(PrinterCallback):
    """Prints one line a step, in place of a dictionary of a hundred numbers, and one for an evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self._times: deque[tuple[int, float]] = deque(maxlen=WINDOW)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock."""
        super().on_train_begin(args, state, control, **kwargs)
        self._times.append((state.global_step, time.monotonic()))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Print a line on the main process."""
        line = None
        if logs and "eval_reward" in logs:
            line = evaluation_line(state.global_step, logs)
        elif logs and "loss" in logs:
            self._times.append((state.global_step, time.monotonic()))
            (first, started), (last, now) = self._times[0], self._times[-1]
            seconds = (now - started) / (last - first) if last > first else None
            line = step_line(state.global_step, state.max_steps, logs, seconds)
        if line is not None and state.is_world_process_zero:
            with tqdm.external_write_mode():
                print(line, flush=True)


class BarAndLines(StepLines, ProgressCallback):
    """The progress bar of transformers, above it the lines."""


def print_lines(trainer: ConstructedTrainer) -> None:
    """Print one line a step instead of the dictionaries of transformers; in a notebook its table stays."""
    callbacks = trainer.callback_handler.callbacks
    ours = {PrinterCallback: StepLines, ProgressCallback: BarAndLines}
    callbacks[:] = [ours[type(each)]() if type(each) in ours else each for each in callbacks]


class SaveOnTermination(TrainerCallback):
    """Saves a checkpoint at the end of the step in which any process got SIGTERM, and stops the training there.

    A second signal ends the process at once, unless it comes within seconds: a scheduler signals all processes, and a
    launcher among them signals its own once more. Only in the main thread, where Python takes signals. A handler that
    the user has installed is called at each signal, after this one.

    Attributes:
        stopped: whether SIGTERM ended the training.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.stopped = False
        self._accelerator, self._before = accelerator, signal.getsignal(signal.SIGTERM)
        self._asked_at: float | None = None

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self._asked_at is None:
            self._asked_at = time.monotonic()
            logger.warning("SIGTERM: the run saves a checkpoint at the end of this step and stops.")
        elif time.monotonic() - self._asked_at > SECONDS_OF_ONE_REQUEST:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.raise_signal(signal.SIGTERM)
        if callable(self._before):
            self._before(number, frame)

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Listen for SIGTERM."""
        self.restore_handler()  # still ours where transformers begins again with a smaller batch
        self.stopped, self._asked_at = False, None
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._ask) or signal.SIG_DFL

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Save and stop if any process was asked to."""
        asked = torch.tensor([self._asked_at is not None], device=self._accelerator.device)
        if self._accelerator.gather(asked).any():
            self.stopped = control.should_save = control.should_training_stop = True

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Restore the handler."""
        self.restore_handler()

    def restore_handler(self) -> None:
        """Restore the handler of SIGTERM that was installed before the training."""
        if signal.getsignal(signal.SIGTERM) == self._ask:
            signal.signal(signal.SIGTERM, self._before)


LONGEST = 5  # steps in a row whose gradient is not finite, after which the run ends


class FiniteUpdates(TrainerCallback):
    """Leaves out updates whose gradient is NaN or infinite: weights and moments stay as they are.

    DeepSpeed leaves them out itself, and is asked whether it has. Not to be used with fp16, whose loss scaler finds its
    scale by such steps.
    """

    def __init__(self, accelerator: Accelerator, step_metrics: StepMetrics) -> None:
        self._accelerator, self._step_metrics = accelerator, step_metrics
        self._left_out, self._streak = False, 0

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Zero the gradients if any is non-finite; optimizers skip parameters without one."""
        finite = are_finite(value.grad for value in kwargs["model"].parameters())
        self._left_out = not self._accelerator.gather(finite.to(self._accelerator.device).view(1)).all()
        if self._left_out:
            kwargs["optimizer"].zero_grad()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count updates that were left out, and warn of the first of several in a row.

        Raises:
            NotFiniteError: there were `LONGEST` in a row.
        """
        if not (self._left_out or self._accelerator.optimizer_step_was_skipped):
            self._streak = 0
            return
        self._streak += 1
        self._step_metrics.updates_left_out += 1
        step = state.global_step + 1
        if self._streak == LONGEST:
            raise NotFiniteError(
                f"The gradient was NaN or infinite in {LONGEST} steps in a row, up to step {step}: continue from the "
                "newest checkpoint with a lower learning_rate or max_grad_norm, or use torch.autograd.detect_anomaly."
            )
        if self._streak == 1 and state.is_world_process_zero:
            logger.warning(
                f"The gradient of step {step} is NaN or infinite: the update is skipped (metric skipped/updates). "
                f"{LONGEST} such steps in a row end the run."
            )


def are_finite(gradients: Iterable[torch.Tensor | None]) -> torch.Tensor:
    """Return whether all gradients, of which this process may have a part, are finite; () bool."""
    here = [each.to_local() if isinstance(each, DTensor) else each for each in gradients if each is not None]
    if not here:
        return torch.tensor(True)
    return nn.utils.get_total_norm(here).isfinite()


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


VERL_NAMES: dict[str, list[str]] = yaml.safe_load(
    Path(__file__).with_name("reporting").joinpath("verl_names.yaml").read_text(encoding="utf-8")
)


def rename_for_verl(logs: Mapping[str, Any], processes: int = 1) -> dict[str, Any]:
    """Return what is logged under verl's names; metrics that it has no name for keep theirs.

    `actor/pg_loss` is the whole loss where TRL logs no part of it; `perf/throughput` tokens per second and process;
    `timing_s/update_actor` passes and optimizer together.

    Args:
        processes: of the run.
    """
    named = [(name, other) for name in logs for other in _verl_names(name)]
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
    """Return what is logged under MTRL's names: verl's, but `agent/` for `actor/` and `divergence` for `kl`."""
    named = rename_for_verl(logs, processes).items()
    return {_MTRL_NAMES.get(name, re.sub("^actor/", "agent/", name)): value for name, value in named}


def _verl_names(name: str) -> Sequence[str]:
    if name in VERL_NAMES:
        return VERL_NAMES[name]
    plain = name.removeprefix("eval_")
    if reward := re.fullmatch("rewards/(.*)/mean", plain):
        return (f"reward/{reward[1]}" if plain == name else f"val/{reward[1]}_reward",)
    if plain != name and plain.startswith("reward/"):
        return (f"val/{plain.removeprefix('reward/')}_reward",)
    if plain != name and plain.startswith("completions/") and plain in VERL_NAMES:
        return [f"val_{other}" for other in VERL_NAMES[plain]]
    return (name,)
