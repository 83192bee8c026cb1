"""Measure the seconds of each stage of a step."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from transformers import TrainerCallback

STAGES = ("generation", "reward", "old_logps", "reference", "values", "perturbed", "selection", "update", "optimizer")
NO_NESTED_STAGES = "perturbed"  # whose passes are its own


def moment() -> Any:
    """Return when the device comes to what it is asked for from here on, without waiting for it; on a CPU, now."""
    if not (torch.cuda.is_available() and torch.backends.cuda.is_built()):
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class StageClock:
    """Time in each stage since the last log; in a stage within another, that one stands still."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Any, Any]] = []  # stage, and the moments of its beginning and end
        self._running: list[str] = []
        self._since: Any = None

    @contextmanager
    def stage(self, name: str, counts: bool = True) -> Iterator[None]:
        """Count the time in this block; kernels that are under way end with the stage that they were started in.

        Args:
            counts: False: it is one of an evaluation, and counts nowhere.
        """
        if not counts or (self._running and self._running[-1] == NO_NESTED_STAGES):
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
        now = moment()
        if self._running:
            self.spans.append((self._running[-1], self._since, now))
        self._since = now

    def metrics(self, accelerator: Accelerator, steps: int) -> dict[str, float]:
        """Return the mean seconds of a step in each stage, of the slowest process, and begin again at 0.

        Args:
            steps: since the last log.
        """
        spans, self.spans = self.spans, []
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # once per log
        seconds: dict[str, float] = defaultdict(float)
        for name, start, end in spans:
            seconds[name] += end - start if isinstance(end, float) else start.elapsed_time(end) / 1000
        own = torch.tensor([seconds[name] for name in STAGES], device=accelerator.device)
        slowest = accelerator.gather(own).view(-1, len(STAGES)).max(dim=0).values / max(1, steps)
        return {f"timing/{name}": value for name, value in zip(STAGES, slowest.tolist(), strict=True) if value > 0}


class OptimizerClock(TrainerCallback):
    """Counts the time of the optimizer's steps, which TRL leaves out of those of a step."""

    def __init__(self, clock: StageClock) -> None:
        self.clock = clock
        self._started: Any = None

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Gradients are there."""
        self._started = moment()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Parameters are changed."""
        self.clock.spans.append(("optimizer", self._started, moment()))
