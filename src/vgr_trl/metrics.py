"""Means over processes, whatever the spread of the rows, and seconds of each stage."""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from transformers import TrainerCallback

Gather = Callable[[torch.Tensor], torch.Tensor]


class Totals:
    """Sums, counts and extremes of local values; one gather turns them into metrics."""

    def __init__(self) -> None:
        self.means: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}  # name -> sum, count
        self.largest: dict[str, tuple[torch.Tensor, int]] = {}  # name -> largest value times a sign, that sign
        self.known: dict[str, float] = {}
        self.about_one: dict[str, str] = {}  # name of a mean of (x - 1)², to become the variance of x -> of its mean

    def add(self, other: "Totals") -> None:
        """Add everything that another one has."""
        for mine, theirs in zip(vars(self).values(), vars(other).values(), strict=True):
            mine |= theirs

    def add_known(self, name: str, value: float) -> None:
        """Add a number that is the same on all processes."""
        self.known[name] = value

    def add_mean(self, name: str, values: torch.Tensor, where: torch.Tensor) -> None:
        """Add the mean of `values` where the bool tensor `where`, of the same shape, is true, to that so far."""
        total, count = self.means.get(name, (0, 0))
        self.means[name] = (total + values.float().masked_fill(~where, 0).sum(), count + where.sum().float())

    def add_largest(self, name: str, values: torch.Tensor, where: torch.Tensor, sign: int = 1) -> None:
        """Add the largest of `values` where `where` is true; with a sign of -1 the smallest."""
        signed = (sign * values.float()).masked_fill(~where, -torch.inf).flatten()
        self.largest[name] = (torch.cat([signed, signed.new_full((1,), -torch.inf)]).max(), sign)

    def metrics(self, gather: Gather | None = None) -> dict[str, float]:
        """Return all metrics over all processes, NaN for a mean or an extreme of nothing.

        Args:
            gather: returns the concatenation of a 1-D tensor over all processes; called once if anything was added.
        """
        local = [
            *(part for pair in self.means.values() for part in pair),
            *(value for value, _ in self.largest.values()),
        ]
        if not local:
            return dict(self.known)
        row = torch.stack(local)
        rows = (row if gather is None else gather(row)).detach().cpu().double().view(-1, len(local))  # (processes, ·)
        split = 2 * len(self.means)
        sums, counts = rows[:, :split].sum(dim=0).view(-1, 2).unbind(dim=1)
        results = dict(zip(self.means, (sums / counts).tolist(), strict=True))
        extremes = rows[:, split:].amax(dim=0).tolist()
        for (name, (_, sign)), value in zip(self.largest.items(), extremes, strict=True):
            results[name] = math.nan if value == -math.inf else sign * value
        for name, mean in self.about_one.items():
            results[name] = max(results[name] - (results[mean] - 1) ** 2, 0.0)
        return results | self.known


def add_filter(
    totals: Totals,
    filter_name: str,
    score_name: str,
    scores: torch.Tensor,
    kept: torch.Tensor,
    mask: torch.Tensor,
    defined: torch.Tensor,
) -> None:
    """Add what a filter keeps: a fraction of the tokens, mean scores of these and the others, the mean threshold.

    The threshold of a completion is the smallest score that it keeps.

    Args:
        score_name: of the scores, for the other names.
        scores: (N, T).
        kept: (N, T) bool, within `mask`.
        mask: (N, T) bool, valid tokens.
        defined: (N, T) bool, valid tokens whose score is defined.
    """
    chosen = kept & defined
    totals.add_mean(f"{filter_name}_token_fraction", kept, mask)
    totals.add_mean(f"{score_name}_mean_selected", scores, chosen)
    totals.add_mean(f"{score_name}_mean_rejected", scores, ~kept & defined)
    ceiling = scores.new_full((len(scores), 1), torch.inf)  # so that a completion of 0 tokens has a minimum too
    smallest = torch.cat([scores.masked_fill(~chosen, torch.inf), ceiling], dim=1).amin(dim=1)  # (N,)
    totals.add_mean(f"{score_name}_threshold", smallest, chosen.any(dim=1))


def add_weights(totals: Totals, name: str, weights: torch.Tensor, mask: torch.Tensor) -> None:
    """Add mean, variance, smallest and largest of (N, T) weights over the valid tokens `mask`."""
    totals.add_mean(f"{name}_mean", weights, mask)
    totals.add_mean(f"{name}_variance", (weights - 1) ** 2, mask)
    totals.about_one[f"{name}_variance"] = f"{name}_mean"
    totals.add_largest(f"{name}_min", weights, mask, sign=-1)
    totals.add_largest(f"{name}_max", weights, mask)


STAGES = ("generation", "reward", "old_logps", "reference", "values", "perturbed", "selection", "update", "optimizer")
NO_NESTED_STAGES = "perturbed"  # whose passes are its own


def moment() -> Any:
    """Return when the device comes to what it is asked for from here on, without waiting for it; on a CPU, now."""
    if not (torch.cuda.is_available() and torch.backends.cuda.is_built()):
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(start: Any, end: Any) -> float:
    """Return the seconds between two moments; the device must have come to both."""
    return float(end - start if isinstance(end, float) else start.elapsed_time(end) / 1000)


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
            seconds[name] += seconds_between(start, end)
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
