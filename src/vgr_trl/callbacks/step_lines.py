"""Print one line per step and per evaluation."""

import time
from collections import deque
from typing import Any

from tqdm.auto import tqdm
from transformers import PrinterCallback, ProgressCallback

from vgr_trl.reporting.console import evaluation_line, step_line

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
    """Prints the lines above the progress bar of transformers."""


def print_lines(callbacks: list[Any]) -> None:
    """Replace the printing callbacks of transformers by `StepLines`; a notebook keeps its table."""
    ours = {PrinterCallback: StepLines, ProgressCallback: BarAndLines}
    callbacks[:] = [ours[type(each)]() if type(each) in ours else each for each in callbacks]
