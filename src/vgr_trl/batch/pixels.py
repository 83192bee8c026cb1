"""Pixels as the images had them: processors make floating-point numbers of 256 levels per channel, a byte each here."""

from collections.abc import Callable
from typing import TypedDict

import torch

LEVELS = 256
SMALLEST = 2**14  # elements below which packing is not worth its time

# How a tensor lies by channels: name -> the tensor with a first dimension of channels, or None if it cannot lie so.
_LAYOUTS: dict[str, Callable[[tuple[int, ...]], tuple[tuple[int, ...], int] | None]] = {
    "image": lambda shape: (shape, len(shape) - 3) if len(shape) >= 4 and shape[-3] == 3 else None,
    "frames": lambda shape: ((*shape[:-1], 3, 2, shape[-1] // 6), len(shape) - 1) if shape[-1] % 6 == 0 else None,
    "patch": lambda shape: ((*shape[:-1], 3, shape[-1] // 3), len(shape) - 1) if shape[-1] % 3 == 0 else None,
    "patch, channels last": lambda shape: (
        ((*shape[:-1], shape[-1] // 3, 3), len(shape)) if shape[-1] % 3 == 0 else None
    ),
    "one channel": lambda shape: ((*shape, 1), len(shape)),
}


class Packed(TypedDict):
    """A tensor as bytes.

    Attributes:
        index: (channels, …) uint8, which of the levels.
        levels: (channels, at most 256), the values.
        layout: one of `_LAYOUTS`.
        shape: of the tensor.
    """

    index: torch.Tensor
    levels: torch.Tensor
    layout: str
    shape: list[int]


def pack(value: torch.Tensor) -> "torch.Tensor | Packed":
    """Return `value` with a byte per element, from which `unpack` restores it exactly, or itself where it has no such.

    Two equal frames that follow each other, as Qwen's processors make of an image, are kept once.
    """
    if not value.is_floating_point() or value.numel() < SMALLEST:
        return value
    for layout, lies in _LAYOUTS.items():
        found = lies(tuple(value.shape))
        if found is None:
            continue
        shape, axis = found
        by_channel = value.reshape(shape).movedim(axis, 0)
        if layout == "frames":
            first, second = by_channel.unbind(-2)
            if not torch.equal(first, second):
                continue
            by_channel = first
        parts = [part for channel in by_channel if (part := _indexed(channel.flatten())) is not None]
        if len(parts) == len(by_channel):
            index = torch.stack([index for index, _ in parts]).view(by_channel.shape)
            most = max(len(levels) for _, levels in parts)
            padded = [torch.nn.functional.pad(levels, (0, most - len(levels))) for _, levels in parts]
            return Packed(index=index, levels=torch.stack(padded), layout=layout, shape=list(value.shape))
    return value


def unpack(value: "torch.Tensor | Packed", device: torch.device | str) -> torch.Tensor:
    """Return the tensor that `pack` was given, on `device`."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    index, levels = value["index"].to(device), value["levels"].to(device)
    by_channel = torch.stack([of[where.int()] for of, where in zip(levels, index, strict=True)])
    found = _LAYOUTS[value["layout"]](tuple(value["shape"]))
    if found is None:
        raise ValueError(value["layout"])
    if value["layout"] == "frames":
        by_channel = by_channel.unsqueeze(-2).expand(*by_channel.shape[:-1], 2, by_channel.size(-1))
    return by_channel.movedim(0, found[1]).reshape(value["shape"])


def nbytes(value: "torch.Tensor | Packed") -> int:
    """Return the bytes of a tensor, packed or not."""
    return value.nbytes if isinstance(value, torch.Tensor) else value["index"].nbytes + value["levels"].nbytes


def _indexed(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Which of at most 256 levels each of `values` has, uint8, and the levels; None if there are more."""
    some = values[:: max(1, len(values) // 4096)].unique()  # most of the levels, sorted
    if len(some) > LEVELS:
        return None
    if len(some) > 1:  # levels are evenly spaced: this is quicker than sorting all
        places = ((values.double() - values.min().double()) / some.double().diff().min()).round()
        if places.max() < LEVELS:
            index = places.to(torch.uint8)
            levels = values.new_zeros(int(places.max()) + 1)
            levels[index.int()] = values
            if torch.equal(levels[index.int()], values):
                return index, levels
    levels, index = values.unique(return_inverse=True)
    return (index.to(torch.uint8), levels) if len(levels) <= LEVELS else None
