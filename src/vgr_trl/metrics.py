"""Metrics that are right however the rows are spread over processes: sums and counts are gathered, then divided."""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from transformers import TrainerCallback

from vgr_trl.options import check_number
from vgr_trl.utils import DataError

# ---------------------------------------------------------------------------------------------------------------------
# Tensors with one row per completion: checks of their shapes, and means over valid tokens.


SMALLEST_RANGE = 1e-8  # is added to ranges that something is divided by


def check_shapes(caller: str, mask: torch.Tensor, **tensors: torch.Tensor) -> None:
    """Raise DataError unless `mask` is (N, T) and every one of `tensors` has its shape."""
    if mask.ndim != 2:
        raise DataError(f"{caller} got a mask of shape {tuple(mask.shape)}: give one of shape (N, T).")
    for name, tensor in tensors.items():
        if tensor.shape != mask.shape:
            raise DataError(
                f"{caller} got {name} of shape {tuple(tensor.shape)} and a mask of shape {tuple(mask.shape)}: give "
                "both for the same N completions of T tokens."
            )


def masked_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the mean of each row of (N, T) values over `mask`, (N, 1); 0 where `mask` is empty."""
    return (values * mask).sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)


def min_max(values: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    """Return each row of (N, T) values scaled to [0, 1] over `where`, 0 elsewhere; all are 0 if they are equal."""
    low = values.masked_fill(~where, torch.inf).amin(1, keepdim=True)
    high = values.masked_fill(~where, -torch.inf).amax(1, keepdim=True)
    return ((values - low) / (high - low + SMALLEST_RANGE)).masked_fill(~where, 0)


def with_mean_one(weights: torch.Tensor, defined: torch.Tensor) -> torch.Tensor:
    """Return positive (N, T) weights divided by their mean over `defined`, and 1 for all other tokens."""
    mean = masked_mean(weights, defined)
    return torch.where(defined, weights / mean.masked_fill(mean <= 0, 1), 1.0)


# ---------------------------------------------------------------------------------------------------------------------
# How much of its advantage a completion keeps, by how much it depends on the image.


Gather = Callable[[torch.Tensor], torch.Tensor]
Statistics = tuple[float, float, float]

_SMALLEST_RANGE = 1e-6


def mean_dependency(dependency: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the mean visual dependency z of each completion over its valid tokens.

    Args:
        dependency: (N, T), visual dependency; undefined tokens (NaN) are left out.
        mask: (N, T) bool, valid tokens.

    Returns:
        (N,) float32, NaN (undefined) where no valid token has one.

    Raises:
        DataError: the shapes differ.
    """
    check_shapes("mean_dependency", mask, dependency=dependency)
    defined = mask.bool() & ~dependency.isnan()
    means = masked_mean(dependency.float().masked_fill(~defined, 0), defined).squeeze(1)
    return means.masked_fill(~defined.any(dim=1), torch.nan)


def trajectory_statistics(means: torch.Tensor, gather: Gather | None = None) -> Statistics:
    """Return minimum, maximum and mean of the defined values over all processes; NaN if there are none.

    Args:
        means: (N,), `mean_dependency` of the local completions, NaN for those that do not take part.
        gather: returns the concatenation of a 1-D tensor over all processes; None: there is one process. It is called
            once, whatever the values are.
    """
    gathered = (means if gather is None else gather(means)).detach().cpu().double()
    present = gathered[~gathered.isnan()]
    if not len(present):
        return (math.nan,) * 3
    return present.min().item(), present.max().item(), present.mean().item()


def trajectory_scale(
    dependency: torch.Tensor, mask: torch.Tensor, minimum: float = 0.8, statistics: Statistics | None = None
) -> torch.Tensor:
    """Return the scale of each completion's advantage: the more it depends on the image, the larger; mean 1.

    With z the mean visual dependency of a completion and u = (z - min) / (max - min), the scale is a + u (b - a), where
    a = `minimum` and b = a + (1 - a) / mean(u) (VPPO, https://huggingface.co/papers/2510.09285).

    Args:
        dependency: (N, T), visual dependency of the tokens.
        mask: (N, T) bool, valid tokens.
        minimum: smallest scale a, in [0, 1].
        statistics: minimum, maximum and mean of z over all completions that are compared; None: those given here.

    Returns:
        (N,) float32. 1 for a completion whose z is undefined (it has no valid token, or no defined dependency), and for
        all if max - min is at most 1e-6. A completion outside [min, max] is scaled like one at that end.

    Raises:
        ConfigError: `minimum` is out of range.
        DataError: the shapes differ, or `statistics` are not three numbers with min <= mean <= max.
    """
    means = mean_dependency(dependency, mask)
    return scale_means(means, minimum, trajectory_statistics(means) if statistics is None else statistics)


def scale_means(means: torch.Tensor, minimum: float, statistics: Statistics) -> torch.Tensor:
    """`trajectory_scale` from (N,) mean dependencies and their statistics."""
    low, high, _ = statistics
    largest = largest_scale(minimum, statistics)
    if largest is None:
        return torch.ones_like(means)
    position = ((means - low) / (high - low)).clamp(0, 1)  # (N,)
    return (minimum + position * (largest - minimum)).nan_to_num(nan=1.0)


def largest_scale(minimum: float, statistics: Statistics) -> float | None:
    """Return b, the scale of the completion that depends most on the image; None if all get scale 1.

    Raises:
        ConfigError: `minimum` is out of range.
        DataError: `statistics` are not three numbers with min <= mean <= max.
    """
    check_number("minimum", minimum, 0, 1, "in [0, 1]")
    low, high, mean = (float(value) for value in statistics)
    if any(map(math.isnan, (low, high, mean))) or high - low <= _SMALLEST_RANGE:
        return None
    if not low <= mean <= high:
        raise DataError(
            f"trajectory_scale got the statistics {statistics}: give minimum, maximum and mean of the completions' "
            "mean dependencies."
        )
    return minimum + (1 - minimum) * (high - low) / (mean - low) if mean > low else None


class Totals:
    """Sums, counts and extremes of local values; one gather turns them into metrics."""

    def __init__(self) -> None:
        self.means: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}  # name -> sum, count
        self.largest: dict[str, tuple[torch.Tensor, int]] = {}  # name -> largest value times a sign, that sign
        self.known: dict[str, float] = {}
        self.about_one: dict[
            str, str
        ] = {}  # name of a mean of (x - 1)², which becomes the variance of x -> of its mean

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

    def add_smallest(self, name: str, values: torch.Tensor, where: torch.Tensor) -> None:
        """Add the smallest of `values` where `where` is true."""
        self._add_largest(name, values, where, -1)

    def add_largest(self, name: str, values: torch.Tensor, where: torch.Tensor) -> None:
        """Add the largest of `values` where `where` is true."""
        self._add_largest(name, values, where, 1)

    def _add_largest(self, name: str, values: torch.Tensor, where: torch.Tensor, sign: int) -> None:
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
    totals.add_smallest(f"{name}_min", weights, mask)
    totals.add_largest(f"{name}_max", weights, mask)


# ---------------------------------------------------------------------------------------------------------------------
# How long the stages of a training step take.


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
