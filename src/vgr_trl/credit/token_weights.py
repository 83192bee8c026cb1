"""How much of a completion's advantage each of its tokens gets."""

import math
from numbers import Real

import torch

from vgr_trl.config.ranges import check_fraction, check_number
from vgr_trl.credit.filters import top_fraction_mask
from vgr_trl.credit.masked import check_shapes, masked_mean, with_mean_one
from vgr_trl.errors import ConfigError

_LARGEST_LOG = 60.0  # e^60 times any number of tokens is finite in float32


def token_weights(
    token_vgr: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip: tuple[float, float] | None = (0.2, 3.0),
    smooth_sigma: float = 0.0,
    topk_ratio: float | None = None,
) -> torch.Tensor:
    """Return a weight for every token: the more it looked at the image (small VGR), the larger; mean 1 per completion.

    With s_t = -ln VGR_t (infinite ones replaced by the completion's finite extreme on that side), the weights are
    exp(s_t - mean s), smoothed along the tokens, clipped, and divided by their mean over the completion's valid tokens.

    Args:
        token_vgr: (N, T), VGR of single tokens, at least 0.
        mask: (N, T) bool, valid tokens.
        clip: smallest and largest weight before the division; None: no limits.
        smooth_sigma: standard deviation, in tokens, of a Gaussian cut off at ⌈3 · smooth_sigma⌉ tokens, which is
            renormalised over the valid tokens within reach; 0: none.
        topk_ratio: tokens outside the ⌈topk_ratio · length⌉ largest weights get weight 1 before the division; in
            (0, 1], None: all keep theirs.

    Returns:
        (N, T) float32. Weight 1 where VGR is undefined (NaN), for all tokens of a completion in which no VGR is finite
        and above 0, and outside `mask`. Undefined tokens take no part in means and smoothing.

    Raises:
        ConfigError: an option is out of range.
        DataError: the shapes differ.
    """
    check_shapes("token_weights", mask, token_vgr=token_vgr)
    _check_clip(clip)
    check_number("smooth_sigma", smooth_sigma, 0, 1e6, "of at least 0")
    if topk_ratio is not None:
        check_fraction("topk_ratio", topk_ratio)
    scores = -token_vgr.float().log()  # (N, T)
    defined = mask.bool() & ~scores.isnan()
    finite = defined & scores.isfinite()
    has_finite = finite.any(dim=1, keepdim=True)  # (N, 1)
    if not scores.numel():
        return torch.ones_like(scores)
    lowest = scores.masked_fill(~finite, torch.inf).amin(dim=1, keepdim=True)
    highest = scores.masked_fill(~finite, -torch.inf).amax(dim=1, keepdim=True)
    defined = defined & has_finite
    scores = scores.clamp(lowest, highest).masked_fill(~defined, 0)
    raw = (scores - masked_mean(scores, defined)).clamp(-_LARGEST_LOG, _LARGEST_LOG).exp()
    if smooth_sigma > 0:
        raw = _smooth(raw, defined, smooth_sigma)
    raw = raw if clip is None else raw.clamp(*clip)
    if topk_ratio is not None:
        kept = top_fraction_mask(raw.masked_fill(~defined, torch.nan), mask, topk_ratio)
        raw = raw.masked_fill(~kept, 1)
    return with_mean_one(raw, defined)


def dependency_weights(
    dependency: torch.Tensor, mask: torch.Tensor, *, clip: tuple[float, float] | None = (0.2, 3.0)
) -> torch.Tensor:
    """Return a weight for every token from its visual dependency: a soft form of the perception filter.

    w_t = clip(s_t / mean s) / mean clip(s / mean s), with the visual dependency s and means over the completion's
    valid tokens. Every token keeps some credit, no single one takes all of it, and the mean weight is 1.

    Args:
        dependency: (N, T), visual dependency, at least 0.
        mask: (N, T) bool, valid tokens.
        clip: smallest and largest weight before the division; None: no limits.

    Returns:
        (N, T) float32. Weight 1 where the dependency is undefined (NaN), for all tokens of a completion in which no
        token depends on the image, and outside `mask`.

    Raises:
        ConfigError: `clip` is out of range.
        DataError: the shapes differ.
    """
    check_shapes("dependency_weights", mask, dependency=dependency)
    _check_clip(clip)
    defined = mask.bool() & ~dependency.isnan()
    scores = dependency.float().masked_fill(~defined, 0)
    mean = masked_mean(scores, defined)  # (N, 1)
    defined = defined & (mean > 0)
    raw = scores / mean.masked_fill(mean <= 0, 1)
    return with_mean_one(raw if clip is None else raw.clamp(*clip), defined)


def _smooth(values: torch.Tensor, defined: torch.Tensor, sigma: float) -> torch.Tensor:
    """Gaussian average of (N, T) values along T, over the defined tokens within reach."""
    reach = min(math.ceil(3 * sigma), values.size(1) - 1)
    offsets = torch.arange(-reach, reach + 1, device=values.device, dtype=values.dtype)
    kernel = torch.exp(-0.5 * (offsets / sigma) ** 2).view(1, 1, -1)
    both = torch.stack([values * defined, defined.to(values.dtype)], dim=1).flatten(0, 1).unsqueeze(1)  # (2N, 1, T)
    sums, totals = torch.nn.functional.conv1d(both, kernel, padding=reach).view(len(values), 2, -1).unbind(dim=1)
    return torch.where(defined, sums / totals.masked_fill(~defined, 1), values)


def _check_clip(clip: tuple[float, float] | None) -> None:
    if clip is None:
        return
    numbers = isinstance(clip, (tuple, list)) and len(clip) == 2 and all(isinstance(limit, Real) for limit in clip)
    if not numbers or not 0 <= clip[0] <= clip[1] or clip[1] == 0:
        raise ConfigError(f"clip is {clip!r}: give None or two numbers with 0 <= low <= high and high above 0.")
