"""Metrics that are right however the rows are spread over processes: sums and counts are gathered, then divided."""

import math

import torch

from vgr_trl.credit.trajectory import Gather


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
