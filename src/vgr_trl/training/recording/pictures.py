"""Images of recorded rows: thumbnails, grids of vision tokens, and attention over these."""

from collections.abc import Mapping, Sequence
from hashlib import sha1
from math import isqrt, prod
from typing import Any

import torch
from PIL import Image

from vgr_trl.data.rows.columns import images_of
from vgr_trl.data.rows.images.opening import open_image
from vgr_trl.data.rows.regions import boxes_of
from vgr_trl.errors import DataError
from vgr_trl.reporting.records.record import AttentionMap, RecordedImage
from vgr_trl.reporting.records.thumbnails import shrunk
from vgr_trl.signals.region_boxes import in_pixels

Grid = tuple[int, int]
Pictures = tuple[list[RecordedImage], list[Image.Image | None], bytes]


def images_of_row(row: Mapping[str, Any], grids: Sequence[Grid | None]) -> Pictures:
    """Return the images of a row of the data, their thumbnails, and a digest of all; one that is none has no size."""
    recorded: list[RecordedImage] = []
    thumbnails: list[Image.Image | None] = []
    digest = sha1(usedforsecurity=False)
    for index, value in enumerate(images_of(row)):
        grid = grids[index] if index < len(grids) else None
        try:
            image = open_image(value)
        except DataError:  # the model has read it all the same, from an address for instance
            recorded.append(RecordedImage(None, 0, 0, grid))
            thumbnails.append(None)
            continue
        digest.update(f"{image.mode} {image.size} ".encode() + image.tobytes())
        recorded.append(RecordedImage(None, *image.size, grid))
        thumbnails.append(shrunk(image))
    if len(recorded) == 1:
        recorded[0].regions = _regions(row, (recorded[0].width, recorded[0].height))
    return recorded, thumbnails, digest.digest()


def _regions(row: Mapping[str, Any], size: tuple[int, int]) -> list[tuple[float, float, float, float]] | None:
    """Boxes as left, top, width, height in pixels; None of columns that hold something else."""
    try:
        return in_pixels(boxes_of(row, size), size) or None
    except DataError:
        return None


def grids_of_row(
    batch: Mapping[str, Any], row: int, merge_size: int | None, num_vision: int | None
) -> list[Grid | None]:
    """Return rows and columns of the vision tokens of each image of a row; None where they are not known.

    Known are the grids that processors of the Qwen family give, and square ones of equal images without tiles.

    Args:
        batch: TRL's, with `num_images`, and `image_grid_thw` (images, 3) or not.
        row: of the batch.
        merge_size: patches per vision token along a side, which belongs to `image_grid_thw`.
        num_vision: vision tokens of the row's prompt; None if they were not counted.
    """
    counts: Sequence[int] = batch.get("num_images") or [0] * (row + 1)
    count = counts[row]
    if not count:
        return []
    first = sum(counts[:row])
    grids = batch.get("image_grid_thw")
    if grids is not None:
        if merge_size is None:
            return [None] * count
        return [
            (height // merge_size, width // merge_size) if time == 1 else None
            for time, height, width in grids[first : first + count].tolist()
        ]
    cut = any(batch.get(name) is not None for name in ("num_tiles", "image_sizes", "spatial_shapes"))
    if cut or not num_vision or num_vision % count:
        return [None] * count
    side = isqrt(num_vision // count)
    return [(side, side) if side * side * count == num_vision else None] * count


def quantised(attention: torch.Tensor, grids: Sequence[Grid | None]) -> AttentionMap | None:
    """Return attention (T, V) over vision tokens with a byte per number; None unless the grids have V cells.

    An error is at most 1 / 510 of the largest attention of its token.
    """
    known = [grid for grid in grids if grid is not None]
    if len(known) != len(grids) or not known or sum(map(prod, known)) != attention.size(1) or not len(attention):
        return None
    attention = attention.float()
    scale = attention.amax(dim=1)  # (T,)
    shares = attention / scale.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(1)
    values = (shares * 255).round().to(torch.uint8)
    return AttentionMap(scale.tolist(), values.cpu().numpy().tobytes())
