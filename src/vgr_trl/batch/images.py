"""The image inputs of a rollout batch: which part belongs to which row, and how parts become a batch again."""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch

from vgr_trl.batch.pixels import pack, unpack
from vgr_trl.errors import DataError

IMAGE_INPUTS = (
    "pixel_values",
    "image_grid_thw",
    "pixel_attention_mask",
    "image_sizes",
    "image_position_ids",
    "spatial_shapes",
    "perturbed_pixel_values",
)
_PADDING = {"image_position_ids": -1}  # Gemma 4's mark of a patch that is none; everything else is padded with zeros

Images = dict[str, Any]  # the image inputs of one row, tensors or, where stored, `Packed`; empty for one without images


def split_images(batch: Mapping[str, Any], count: int) -> tuple[list[Images], bool]:
    """Return the image inputs of each row, and whether every row has an entry of its own even without an image.

    The first dimension of the inputs counts patches (`image_grid_thw`), tiles (`num_tiles`), images, or, where the
    processor pads to one entry per row (Idefics, SmolVLM), rows.

    Args:
        batch: as TRL trains on it; `num_images` and `num_tiles` are lists with one number per row.
        count: rows, N.

    Raises:
        DataError: an input cannot be assigned to rows.
    """
    given = {name: batch[name] for name in IMAGE_INPUTS if batch.get(name) is not None}
    if not given:
        return [{} for _ in range(count)], False
    num_images = batch.get("num_images")
    if num_images is None or len(num_images) != count or "pixel_values" not in given:
        raise DataError(
            f"The batch has {', '.join(given)} for {count} rows and num_images {num_images}: give pixel_values, and as "
            "num_images one number per row."
        )
    parts, one_per_row = _parts_per_row(given, list(num_images), batch.get("num_tiles"), count)
    parts["perturbed_pixel_values"] = parts["pixel_values"]
    for name, value in given.items():
        if sum(parts[name]) != value.size(0):
            raise DataError(
                f"The batch has {name} of shape {tuple(value.shape)}, which cannot be assigned to {count} rows with "
                f"num_images {list(num_images)} and num_tiles {batch.get('num_tiles')}."
            )
    bounds = {name: list(pairwise([0, *accumulate(parts[name])])) for name in given}
    rows = [
        {name: value[slice(*bounds[name][row])] for name, value in given.items() if parts[name][row]}
        for row in range(count)
    ]
    return rows, one_per_row


def _parts_per_row(
    given: Images, num_images: list[int], num_tiles: list[int] | None, count: int
) -> tuple[dict[str, list[int]], bool]:
    by_image = dict.fromkeys(IMAGE_INPUTS, num_images)
    if "image_grid_thw" in given:
        patches = given["image_grid_thw"].prod(-1).tolist()
        bounds = pairwise([0, *accumulate(num_images)])
        return {**by_image, "pixel_values": [sum(patches[start:end]) for start, end in bounds]}, False
    if num_tiles is not None:
        tiles = list(num_tiles)
        return {**by_image, "pixel_values": tiles, "pixel_attention_mask": tiles, "spatial_shapes": tiles}, False
    rows = given["pixel_values"].size(0) == count
    if rows and ("pixel_attention_mask" in given or count != sum(num_images)):
        single = [1] * count
        return {**by_image, "pixel_values": single, "pixel_attention_mask": single}, True
    return by_image, False


def stack_images(rows: Sequence[Images], one_per_row: bool) -> Images:
    """Return the image inputs of a batch of these rows; the inverse of `split_images`.

    Sizes that differ between rows (padding to the largest image, the most patches or the most images) are padded.

    Args:
        rows: image inputs of each row.
        one_per_row: rows without images get an entry of zeros.
    """
    names = [name for name in IMAGE_INPUTS if any(name in row for row in rows)]
    return {name: _stack([row.get(name) for row in rows], _PADDING.get(name, 0), one_per_row) for name in names}


def _stack(parts: Sequence[torch.Tensor | None], padding: int, one_per_row: bool) -> torch.Tensor:
    present = [part for part in parts if part is not None]
    shape = [max(sizes) for sizes in zip(*(part.shape[1:] for part in present), strict=True)]
    if one_per_row:
        parts = [present[0].new_zeros((1, *shape)) if part is None else part for part in parts]
    return torch.cat([_grown(part, shape, padding).to(present[0]) for part in parts if part is not None])


def _grown(part: torch.Tensor, shape: Sequence[int], padding: int) -> torch.Tensor:
    if list(part.shape[1:]) == list(shape):
        return part
    grown = part.new_full((part.size(0), *shape), padding)
    grown[tuple(slice(size) for size in part.shape)] = part
    return grown


def share_equal(rows: Sequence[Images]) -> list[Images]:
    """Return the rows such that equal tensors are one object, which then is stored, saved and sent once."""
    distinct: dict[str, list[torch.Tensor]] = {}
    return [{name: _known(value, distinct.setdefault(name, [])) for name, value in row.items()} for row in rows]


def _known(value: torch.Tensor, distinct: list[torch.Tensor]) -> torch.Tensor:
    for other in distinct:
        if value.shape == other.shape and torch.equal(value, other):
            return other
    distinct.append(value)
    return value


def move_images(rows: Sequence[Images], device: torch.device | str) -> list[Images]:
    """Return the rows on `device`, as tensors; what was one object is one again."""
    return _once_each(rows, lambda value: unpack(value, device))


def store_images(rows: Sequence[Images]) -> list[Images]:
    """Return copies on the CPU that keep no batch in memory, equal ones once, pixels as bytes where they have been."""
    return _once_each(share_equal(rows), lambda value: pack(owned(value, "cpu")))


def _once_each(rows: Sequence[Images], change: Callable[[Any], Any]) -> list[Images]:
    changed: dict[int, Any] = {}
    for value in (value for row in rows for value in row.values()):
        if id(value) not in changed:
            changed[id(value)] = change(value)
    return [{name: changed[id(value)] for name, value in row.items()} for row in rows]


def owned(value: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Return a copy of `value` on `device` that shares no memory with it and keeps nothing but its elements."""
    return torch.empty(value.shape, dtype=value.dtype, device=device).copy_(value.detach())
