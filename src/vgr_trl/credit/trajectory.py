"""How much of its advantage a completion keeps, by how much it depends on the image."""

import math
from collections.abc import Callable

import torch

from vgr_trl.config.ranges import check_number
from vgr_trl.credit.masked import check_shapes, masked_mean
from vgr_trl.errors import DataError

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
