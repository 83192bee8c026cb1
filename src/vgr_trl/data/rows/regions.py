"""What a question is about in its image, as a row of the data says it."""

from collections.abc import Mapping, Sequence
from typing import Any

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
    given = row.get("bbox")
    if given is not None and len(given):
        found = [_numbers("bbox", box) for box in ([given] if not isinstance(given[0], Sequence) else given)]
    else:
        wide, high = size if in_pixels_of_its_image(row) else (1, 1)
        found = [
            (left / wide, top / high, (left + width) / wide, (top + height) / high)
            for left, top, width, height in _regions(row)
        ]
    for left, top, right, bottom in found:
        if not (-1e-3 <= left < right <= 1.001 and -1e-3 <= top < bottom <= 1.001):
            raise DataError(
                f"A row has the box {(left, top, right, bottom)} in shares of its image: give bbox as left, top, right "
                "and bottom in [0, 1] with left < right and top < bottom, or regions in pixels within the image."
            )
    return found


def in_pixels_of_its_image(row: Mapping[str, Any]) -> bool:
    """Return whether the boxes of a row reach beyond 1, so that they are pixels and the image's size must be known."""
    given = row.get("bbox")
    if given is not None and len(given):
        return False
    return any(max(left + width, top + height) > 1.001 for left, top, width, height in _regions(row))


def _regions(row: Mapping[str, Any]) -> list[Box]:
    given = row.get("regions")
    return [_numbers("regions", box) for box in ([] if given is None else given)]


def _numbers(column: str, box: Any) -> Box:
    try:
        first, second, third, fourth = (float(value) for value in box)
    except (TypeError, ValueError) as error:
        raise DataError(f"A row has {box!r} in its column {column}: give four numbers.") from error
    return first, second, third, fourth


def as_shares(boxes: Sequence[Box]) -> list[list[float]]:
    """Return boxes as converted sets have them: left, top, width and height, in [0, 1] of the image."""
    return [[left, top, right - left, bottom - top] for left, top, right, bottom in boxes]
