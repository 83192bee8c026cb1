"""Image inputs of a batch, cut into those of consecutive rows."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch

from vgr_trl.errors import DataError

_PER_IMAGE = ("image_grid_thw", "image_sizes", "image_position_ids")
_PER_TILE = ("pixel_values", "pixel_attention_mask", "spatial_shapes")


def image_inputs_of_rows(
    inputs: Mapping[str, torch.Tensor],
    start: int,
    stop: int,
    num_rows: int,
    num_images: Sequence[int] | None,
    num_tiles: Sequence[int] | None,
) -> dict[str, torch.Tensor]:
    """Return the image inputs of rows [start, stop), nothing if these rows have no image.

    Args:
        inputs: image inputs of all rows, as processors return them: an entry per row, image, tile or patch.
        start, stop: rows.
        num_rows: N.
        num_images: (N,) images of each row; None is accepted if all rows are wanted.
        num_tiles: (N,) entries of `pixel_values` of each row, where images are cut into tiles.

    Raises:
        DataError: the counts are missing, or do not match the inputs.
    """
    if not inputs or (start == 0 and stop == num_rows and num_images is None):
        return dict(inputs)
    if num_images is None or len(num_images) != num_rows or not len(num_tiles or num_images) == num_rows:
        raise DataError(
            f"num_images is {num_images} and num_tiles {num_tiles} for {num_rows} rows that pass in chunks: give one "
            "number for each row."
        )
    images = _bounds(num_images, start, stop)
    if images.start == images.stop:
        return {}
    tiles = images if num_tiles is None else _bounds(num_tiles, start, stop)
    pixels = inputs.get("pixel_values")
    parts: dict[str, slice] = dict.fromkeys(_PER_IMAGE, images) | dict.fromkeys(_PER_TILE, tiles)
    if "image_grid_thw" in inputs:
        patches = inputs["image_grid_thw"].prod(-1).tolist()
        parts["pixel_values"] = _bounds(patches, images.start, images.stop)
    elif pixels is not None and pixels.ndim == 5 and "image_sizes" not in inputs:  # padded to the row with most images
        parts |= dict.fromkeys(_PER_TILE, slice(start, stop))
    if unknown := sorted(inputs.keys() - parts.keys()):
        raise DataError(f"The input {unknown[0]} cannot be cut into chunks: score all rows at once (batch_size=None).")
    return {name: value[parts[name]] for name, value in inputs.items()}


def _bounds(counts: Sequence[Any], start: int, stop: int) -> slice:
    bounds = [0, *accumulate(counts)]
    return slice(bounds[start], bounds[stop])
