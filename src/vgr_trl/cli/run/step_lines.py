"""The terminal while training: one line a step, in place of a dictionary of a hundred numbers."""

import time
from collections import deque
from typing import Any

from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback

from vgr_trl.reporting.views.step_line import step_line

WINDOW = 20  # logs over which the seconds of a step are averaged


class StepLines(TrainerCallback):
    """Prints `step_line` whenever something of training is logged, and one line for an evaluation."""

    def __init__(self) -> None:
        self._times: deque[tuple[int, float]] = deque(maxlen=WINDOW)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock."""
        self._times.append((state.global_step, time.monotonic()))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Print a line on the main process."""
        if not logs or not state.is_world_process_zero:
            return
        if "eval_reward" in logs:
            numbers = {"reward": "eval_reward", "accuracy": "eval_rewards/accuracy_reward/mean"}
            shown = [f"{name} {logs[key]:.3f}" for name, key in numbers.items() if key in logs]
            print(f"evaluation at step {state.global_step}  {'  '.join(shown)}", flush=True)
        elif "loss" in logs:
            self._times.append((state.global_step, time.monotonic()))
            (first, started), (last, now) = self._times[0], self._times[-1]
            seconds = (now - started) / (last - first) if last > first else None
            print(step_line(state.global_step, state.max_steps, logs, seconds), flush=True)


def print_steps_as_lines(trainer: Trainer) -> None:
    """Let `trainer` print lines instead of its dictionaries and its bar; files and trackers get all numbers as ever."""
    for callback in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(callback)
    trainer.add_callback(StepLines())
