"""Which tokens of a completion get credit at all."""

from fractions import Fraction

import torch

from vgr_trl.config.ranges import check_number
from vgr_trl.credit.masked import check_shapes


def top_fraction_mask(scores: torch.Tensor, mask: torch.Tensor, fraction: float) -> torch.Tensor:
    """Return the mask of the ⌈fraction · length⌉ valid tokens with the largest scores of each completion.

    Among equal scores the earlier token is taken. An undefined score (NaN) comes after all others. `fraction` is read
    as the decimal number that it is printed as: 0.07 of 100 tokens are 7.

    Args:
        scores: (N, T).
        mask: (N, T) bool, valid tokens; they may lie anywhere.
        fraction: in [0, 1].

    Returns:
        (N, T) bool, never true outside `mask`.

    Raises:
        ConfigError: `fraction` is out of range.
        DataError: the shapes differ.
    """
    check_shapes("top_fraction_mask", mask, scores=scores)
    check_number("fraction", fraction, 0, 1, "in [0, 1]")
    mask = mask.bool()
    order = scores.float().nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    order = order.argsort(dim=1, descending=True, stable=True)  # (N, T), token indices, best first
    valid = mask.gather(1, order)
    kept = valid & (valid.cumsum(1) <= _kept_counts(mask, fraction).unsqueeze(1))
    return torch.zeros_like(mask).scatter(1, order, kept)


def _kept_counts(mask: torch.Tensor, fraction: float) -> torch.Tensor:
    """⌈fraction · length⌉ per row, (N,) int64, in whole numbers: floating point would make 8 of 0.07 · 100."""
    lengths = mask.sum(1)
    exact = Fraction(repr(float(fraction))).limit_denominator(10**9)
    counts = (lengths * exact.numerator + exact.denominator - 1) // exact.denominator
    return counts.clamp(min=1).minimum(lengths) if fraction > 0 else torch.zeros_like(lengths)
