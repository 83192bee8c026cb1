"""Read the boxes of a row: the parts of its image that its question is about."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy

from vgr_trl.errors import DataError

BOX_COLUMNS = {
    "bbox": "left, top, right and bottom as shares of the image, with left < right and top < bottom",
    "regions": "left, top, width and height as shares, or in pixels of its {} x {}, and within it",
}

Box = tuple[float, float, float, float]  # left, top, right, bottom, in [0, 1] of the image


def boxes_of(row: Mapping[str, Any], size: tuple[int, int], name: str = "A row") -> list[Box]:
    """Return the boxes of a row of the data, or an empty list.

    Args:
        row: with `bbox`, one or several (left, top, right, bottom) in [0, 1] of the image, or with `regions`, a list
            of (left, top, width, height), as converted sets have it, in pixels, or in [0, 1] if all values are.
        size: of its image, (width, height) in pixels.
        name: of the row, for messages.

    Raises:
        DataError: a box has not four numbers, is empty, or leaves the image.
    """
    column = "bbox"
    try:
        if row.get("bbox") is None or numpy.size(row["bbox"]) == 0:
            column = "regions"
        stated = numpy.array([] if row.get(column) is None else row[column], dtype=float)
        if stated.size and stated.shape[-1] != 4:
            raise ValueError
    except (IndexError, TypeError, ValueError) as error:
        raise DataError(f"{name} has {row[column]!r} in its column {column}: give four numbers.") from error
    boxes = stated.reshape(-1, 4)
    if column == "regions":
        boxes = numpy.hstack([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]])
        boxes = boxes / [*size, *size] if boxes.size and boxes.max() > 1.001 else boxes
    for given, (left, top, right, bottom) in zip(stated.reshape(-1, 4).tolist(), boxes.tolist(), strict=True):
        if not (-1e-3 <= left < right <= 1.001 and -1e-3 <= top < bottom <= 1.001):
            form = BOX_COLUMNS[column].format(*size)
            raise DataError(f"{name} has the box {given} in its column {column}: give {form}.")
    return [(left, top, right, bottom) for left, top, right, bottom in boxes.tolist()]


def refuse_bad_boxes(row: Mapping[str, Any], sizes: Sequence[tuple[int, int]]) -> None:
    """Raise `DataError` if a row has one image and boxes that cannot be read.

    Args:
        row: of the data.
        sizes: (width, height) of its images, as the model gets them.
    """
    if len(sizes) == 1:
        boxes_of(row, sizes[0], "it")


def to_shares(boxes: Sequence[Box]) -> list[list[float]]:
    """Return boxes as converted sets have them: left, top, width and height, in [0, 1] of the image."""
    return [[left, top, right - left, bottom - top] for left, top, right, bottom in boxes]
