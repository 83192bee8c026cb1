"""How long the stages of a training step take."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from transformers import TrainerCallback

STAGES = ("generation", "reward", "old_logps", "reference", "values", "perceive", "choose", "update", "optimizer")
_OF_TWO = "perceive"  # whose passes are its own


class StageClock:
    """Seconds in each stage since the last log; in a stage within another, that one stands still."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._running: list[str] = []
        self._since = 0.0

    @contextmanager
    def stage(self, name: str, counts: bool = True) -> Iterator[None]:
        """Count the time in this block; kernels that are under way end with the stage that they were started in.

        Args:
            counts: False: it is one of an evaluation, and counts nowhere.
        """
        if not counts or (self._running and self._running[-1] == _OF_TWO):
            yield
            return
        self._turn()
        self._running.append(name)
        try:
            yield
        finally:
            self._turn()
            self._running.pop()

    def _turn(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        if self._running:
            self.seconds[self._running[-1]] += now - self._since
        self._since = now

    def metrics(self, accelerator: Accelerator, step_times: list[float]) -> dict[str, float]:
        """Return the mean seconds of a step in each stage, of the process that took longest, and start anew.

        Args:
            step_times: seconds of the steps since the last log, without the optimizer's.
        """
        seconds, self.seconds = self.seconds, defaultdict(float)
        in_step = sum(value for name, value in seconds.items() if name != "optimizer")
        seconds["update"] = max(0.0, sum(step_times) - in_step)
        own = torch.tensor([seconds[name] for name in STAGES], device=accelerator.device)
        slowest = accelerator.gather(own).view(-1, len(STAGES)).max(dim=0).values / max(1, len(step_times))
        return {f"timing/{name}": value for name, value in zip(STAGES, slowest.tolist(), strict=True) if value > 0}


class OptimizerClock(TrainerCallback):
    """Counts the time of the optimizer's steps, which TRL leaves out of those of a step."""

    def __init__(self, clock: StageClock) -> None:
        self.clock = clock
        self._started = 0.0

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Gradients are there."""
        self._started = time.perf_counter()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Parameters are changed."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.clock.seconds["optimizer"] += time.perf_counter() - self._started
