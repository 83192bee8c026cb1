"""Sums, counts and extremes of local values, which one gather turns into metrics over all processes."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

Gather = Callable[[Tensor], Tensor]


class Totals:
    """Sums, counts and extremes of local values; one gather turns them into metrics."""

    def __init__(self) -> None:
        self.means: dict[str, tuple[Tensor, Tensor]] = {}  # name -> sum, count
        self.largest: dict[str, tuple[Tensor, int]] = {}  # name -> largest value times a sign, the sign
        self.known: dict[str, float] = {}
        self.about_one: dict[str, str] = {}  # name of a mean of (x - 1)² -> name of the mean of x

    def add_known(self, name: str, value: float) -> None:
        """Add a number that is the same on all processes."""
        self.known[name] = value

    def add_mean(self, name: str, values: Tensor, where: Tensor) -> None:
        """Accumulate a masked mean.

        Args:
            name: name of the metric.
            values: tensor of any shape.
            where: bool tensor of the same shape, true for values that enter the mean.
        """
        total, count = self.means.get(name, (0, 0))
        self.means[name] = (total + values.float().masked_fill(~where, 0).sum(), count + where.sum().float())

    def add_largest(self, name: str, values: Tensor, where: Tensor, sign: int = 1) -> None:
        """Accumulate a masked maximum or minimum.

        Args:
            name: name of the metric.
            values: tensor of any shape.
            where: bool tensor of the same shape, true for values that count.
            sign: 1 for the maximum, -1 for the minimum.
        """
        signed = (sign * values.float()).masked_fill(~where, -torch.inf).flatten()
        before, _ = self.largest.get(name, (signed.new_tensor(-torch.inf), sign))
        self.largest[name] = (torch.cat([signed, before.view(1)]).max(), sign)

    def metrics(self, gather: Gather | None = None) -> dict[str, float]:
        """Return all metrics over all processes; a mean or an extreme of nothing is NaN.

        Args:
            gather: concatenates a 1-D tensor over all processes; called once if anything was added. None: there is one
                process.
        """
        local = [part for pair in self.means.values() for part in pair]
        local += [value for value, _ in self.largest.values()]
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


def add_weights(totals: Totals, name: str, weights: Tensor, mask: Tensor) -> None:
    """Add mean, variance, minimum and maximum of weights to `totals`.

    Args:
        totals: receives the metrics.
        name: their prefix.
        weights: (N, T).
        mask: (N, T) bool, valid tokens.
    """
    totals.add_mean(f"{name}_mean", weights, mask)
    totals.add_mean(f"{name}_variance", (weights - 1) ** 2, mask)
    totals.about_one[f"{name}_variance"] = f"{name}_mean"
    totals.add_largest(f"{name}_min", weights, mask, sign=-1)
    totals.add_largest(f"{name}_max", weights, mask)
