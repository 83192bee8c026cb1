"""The image inputs of a rollout batch: which part belongs to which row, and how parts become a batch again."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from vgr_trl.batch.image_parts import IMAGE_INPUTS, UnknownParts, find_layout, image_inputs_of, parts_by_counts
from vgr_trl.batch.pixels import pack, unpack
from vgr_trl.errors import DataError

PERTURBED = "perturbed_pixel_values"  # lie as `pixel_values` do
ROW_INPUTS = (*IMAGE_INPUTS, PERTURBED)
_PADDING = {"image_position_ids": -1}  # Gemma 4's mark of a patch that is none; everything else is padded with zeros

Images = dict[str, Any]  # the image inputs of one row, tensors or, where stored, `Packed`; empty for one without images


def split_images(batch: Mapping[str, Any], count: int) -> tuple[list[Images], bool]:
    """Return the image inputs of each row, and whether every row has an entry of its own even without an image.

    Args:
        batch: as TRL trains on it; `num_images` and `num_tiles` are lists with one number per row.

    Raises:
        DataError: an input cannot be assigned to rows.
    """
    given = {name: batch[name] for name in ROW_INPUTS if batch.get(name) is not None}
    if not given:
        return [{} for _ in range(count)], False
    num_images, num_tiles = batch.get("num_images"), batch.get("num_tiles")
    if num_images is None or len(num_images) != count or "pixel_values" not in given:
        raise DataError(
            f"The batch has {', '.join(given)} for {count} rows and num_images {num_images}: give pixel_values, and as "
            "num_images one number per row."
        )
    known, perturbed = image_inputs_of(batch), given.get(PERTURBED)
    try:
        parts = parts_by_counts(known, num_images, num_tiles)
        if perturbed is not None and len(perturbed) != len(given["pixel_values"]):
            raise UnknownParts(f"{PERTURBED} of shape {tuple(perturbed.shape)}")
    except UnknownParts as error:
        raise DataError(
            f"The batch has {error.reason}, which cannot be assigned to {count} rows with num_images "
            f"{list(num_images)} and num_tiles {num_tiles}."
        ) from error
    parts[PERTURBED] = parts["pixel_values"]
    rows = [{name: value[parts[name][row]] for name, value in given.items()} for row in range(count)]
    one_per_row = find_layout(known, sum(num_images)).units["pixel_values"] == "row"
    return [{name: value for name, value in row.items() if len(value)} for row in rows], one_per_row


def stack_images(rows: Sequence[Images], one_per_row: bool) -> Images:
    """Return the image inputs of a batch of these rows; the inverse of `split_images`.

    Sizes that differ between rows (padding to the largest image, the most patches or the most images) are padded.

    Args:
        one_per_row: rows without images get an entry of zeros.
    """
    names = [name for name in ROW_INPUTS if any(name in row for row in rows)]
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
