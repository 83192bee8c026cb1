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
NO_NESTED_STAGES = "perturbed"  # a stage that keeps the time of the stages within it


def record_moment() -> Any:
    """Return an event that completes when the device has finished its queue; on a CPU, the time."""
    if not (torch.cuda.is_available() and torch.backends.cuda.is_built()):
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class StageClock:
    """Time in each stage since the last log; a nested stage pauses the outer one."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Any, Any]] = []  # stage, begin, end
        self._running: list[str] = []
        self._since: Any = None

    @contextmanager
    def stage(self, name: str, counts: bool = True) -> Iterator[None]:
        """Count the time of this block; a kernel counts in the stage that launched it.

        Args:
            name: one of `STAGES`.
            counts: False for a stage of an evaluation, which is not counted.
        """
        if not counts or (self._running and self._running[-1] == NO_NESTED_STAGES):
            yield
            return
        self._switch()
        self._running.append(name)
        try:
            yield
        finally:
            self._switch()
            self._running.pop()

    def _switch(self) -> None:
        now = record_moment()
        if self._running:
            self.spans.append((self._running[-1], self._since, now))
        self._since = now

    def metrics(self, accelerator: Accelerator, steps: int) -> dict[str, float]:
        """Return the mean seconds per step in each stage on the slowest process, and restart at 0.

        Args:
            accelerator: gathers over processes.
            steps: steps since the last log.
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
    """Counts the time of the optimizer, which TRL's step time excludes."""

    def __init__(self, clock: StageClock) -> None:
        self.clock = clock
        self._started: Any = None

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock: gradients are complete."""
        self._started = record_moment()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop the clock: parameters are updated."""
        self.clock.spans.append(("optimizer", self._started, record_moment()))
