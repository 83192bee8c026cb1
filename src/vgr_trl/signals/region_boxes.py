"""What a question is about in its image: boxes of the data, and images that show nothing else."""

from collections.abc import Mapping, Sequence
from typing import Any

from PIL import Image

from vgr_trl.errors import DataError

Box = tuple[float, float, float, float]  # left, top, right, bottom, in [0, 1] of the image
COLUMNS = ("bbox", "regions")


def boxes_of(row: Mapping[str, Any], size: tuple[int, int]) -> list[Box]:
    """Return the boxes of a row of the data, none if it names none.

    Args:
        row: with `bbox`, (left, top, right, bottom) in [0, 1] of the image, or a list of such; or with `regions`, a
            list of (left, top, width, height) in pixels, or in [0, 1] if none reaches further, as converted sets have
            it.
        size: of its image, (width, height) in pixels.

    Raises:
        DataError: a box is none, or empty.
    """
    given, pixels = row.get("bbox"), row.get("regions")
    wide, high = size
    if given is not None and len(given):
        found = [_numbers("bbox", box) for box in ([given] if not isinstance(given[0], Sequence) else given)]
    elif pixels is not None:
        sides = [_numbers("regions", box) for box in pixels]
        if all(max(left + width, top + height) <= 1.001 for left, top, width, height in sides):
            wide = high = 1
        found = [
            (left / wide, top / high, (left + width) / wide, (top + height) / high)
            for left, top, width, height in sides
        ]
    else:
        return []
    for left, top, right, bottom in found:
        if not (-1e-3 <= left < right <= 1.001 and -1e-3 <= top < bottom <= 1.001):
            raise DataError(
                f"A row has the box {(left, top, right, bottom)} in shares of its image: give bbox as left, top, right "
                "and bottom in [0, 1] with left < right and top < bottom, or regions in pixels within the image."
            )
    return found


def _numbers(column: str, box: Any) -> Box:
    try:
        first, second, third, fourth = (float(value) for value in box)
    except (TypeError, ValueError) as error:
        raise DataError(f"A row has {box!r} in its column {column}: give four numbers.") from error
    return first, second, third, fourth


def in_pixels(boxes: Sequence[Box], size: tuple[int, int]) -> list[tuple[float, float, float, float]]:
    """Return boxes as (left, top, width, height) in pixels of an image of this size, to a millionth."""
    wide, high = size
    return [
        (
            round(left * wide, 6),
            round(top * high, 6),
            round((right - left) * wide, 6),
            round((bottom - top) * high, 6),
        )
        for left, top, right, bottom in boxes
    ]


def drawn(boxes: Sequence[Box], size: tuple[int, int]) -> Image.Image:
    """Return a black image of that size that is white within the boxes, each of at least one pixel."""
    image = Image.new("RGB", size)
    for left, top, right, bottom in boxes:
        x, y = (min(round(start * side), side - 1) for start, side in ((left, size[0]), (top, size[1])))
        far = max(round(right * size[0]), x + 1), max(round(bottom * size[1]), y + 1)
        image.paste((255, 255, 255), (max(x, 0), max(y, 0), *far))
    return image
