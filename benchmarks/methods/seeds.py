"""What runs of several seeds say together: means, intervals, tokens to an accuracy."""

import random
import statistics
from collections.abc import Callable, Sequence
from typing import Any

Course = Sequence[Sequence[float]]  # of (step, generated tokens, accuracy)


def resampled(count: int, statistic: Callable[[Sequence[int]], float], draws: int = 10_000) -> tuple[float, float]:
    """Return the 95 % interval of a statistic of indices 0 to `count` - 1 by bootstrap (percentiles over resamples)."""
    rng = random.Random(0)
    values = sorted(statistic(rng.choices(range(count), k=count)) for _ in range(draws))
    return values[int(0.025 * draws)], values[int(0.975 * draws) - 1]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the mean by bootstrap over seeds."""
    return resampled(len(values), lambda chosen: statistics.mean(values[index] for index in chosen))


def mean_course(courses: Sequence[Course]) -> Course:
    """Return the mean of courses that were measured at the same steps."""
    return [[statistics.mean(column) for column in zip(*points, strict=True)] for points in zip(*courses, strict=True)]


def tokens_to(course: Course, accuracy: float) -> float | None:
    """Return after how many generated tokens a course reaches an accuracy, between points on a line; None: never."""
    before: Sequence[float] | None = None
    for point in course:
        if point[2] >= accuracy:
            if before is None or point[2] == before[2]:
                return point[1]
            share = (accuracy - before[2]) / (point[2] - before[2])
            return before[1] + share * (point[1] - before[1])
        before = point
    return None


def token_share(courses: Sequence[Course], baseline: Sequence[Course]) -> float:
    """Return the tokens to the baseline's last accuracy, as a share of the baseline's, of mean courses; inf: never."""
    last: Any = mean_course(baseline)[-1]
    needed = tokens_to(mean_course(courses), last[2])
    return float("inf") if needed is None else needed / last[1]
