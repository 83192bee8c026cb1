"""Tensors with one row per completion: checks of their shapes, and means over valid tokens."""

import torch

from vgr_trl.errors import DataError

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
