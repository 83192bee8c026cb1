"""What a question is about in its image, as a row of the data says it."""

from collections.abc import Mapping, Sequence
from typing import Any

from vgr_trl.data.rows.columns import images_of
from vgr_trl.data.rows.images.opening import open_image
from vgr_trl.data.rows.images.sizes import ANY_SIZE, ImageRule
from vgr_trl.errors import DataError

Box = tuple[float, float, float, float]  # left, top, right, bottom, in [0, 1] of the image
COLUMNS = ("bbox", "regions")


def boxes_of(row: Mapping[str, Any], size: tuple[int, int], name: str = "A row") -> list[Box]:
    """Return the boxes of a row of the data, none if it names none.

    Args:
        row: with `bbox`, (left, top, right, bottom) in [0, 1] of the image, or a list of such; or with `regions`, a
            list of (left, top, width, height) in pixels, or in [0, 1] if none reaches further, as converted sets have
            it.
        size: of its image, (width, height) in pixels.
        name: of the row, for messages.

    Raises:
        DataError: a box is none, empty, or beyond the image.
    """
    if _has_bbox(row):
        boxes = _bbox(row, name)
        for box in boxes:
            if not _is_within(box):
                raise DataError(
                    f"{name} has the box {box} in its column bbox: give left, top, right and bottom as shares of the "
                    "image, in [0, 1], with left < right and top < bottom."
                )
        return boxes
    wide, high = size if in_pixels_of_its_image(row, name) else (1, 1)
    found = []
    for left, top, width, height in _regions(row, name):
        found.append((left / wide, top / high, (left + width) / wide, (top + height) / high))
        if not _is_within(found[-1]):
            raise DataError(
                f"{name} has the box {(left, top, width, height)} in its column regions: give left, top, width and "
                f"height as shares of the image, in [0, 1], or in pixels of its {size[0]} x {size[1]}, and within it."
            )
    return found


def box_problem(row: Mapping[str, Any], fitted: ImageRule = ANY_SIZE) -> str | None:
    """Return why the boxes of a row with one image cannot be read, None if they can.

    Args:
        row: whose image may be undecoded; boxes in pixels are not checked where it cannot be opened.
        fitted: what brings the image to the size that the model gets.
    """
    images, size = images_of(row), (1, 1)
    if len(images) != 1:
        return None
    try:
        if in_pixels_of_its_image(row, "it"):
            try:
                size = fitted.limits.size_of(*open_image(images[0]).size)
            except DataError:
                return None
        boxes_of(row, size, "it")
    except DataError as error:
        return str(error).rstrip(".")
    return None


def in_pixels_of_its_image(row: Mapping[str, Any], name: str = "A row") -> bool:
    """Return whether the boxes of a row reach beyond 1, so that they are pixels and the image's size must be known."""
    if _has_bbox(row):
        return False
    return any(max(left + width, top + height) > 1.001 for left, top, width, height in _regions(row, name))


def _is_within(box: Box) -> bool:
    left, top, right, bottom = box
    return -1e-3 <= left < right <= 1.001 and -1e-3 <= top < bottom <= 1.001


def _has_bbox(row: Mapping[str, Any]) -> bool:
    return _listed(row.get("bbox")) not in (None, [], ())


def _bbox(row: Mapping[str, Any], name: str) -> list[Box]:
    given = _listed(row["bbox"])
    several = isinstance(given, list | tuple) and isinstance(given[0], list | tuple)
    return [_numbers("bbox", box, name) for box in (given if several else [given])]


def _regions(row: Mapping[str, Any], name: str) -> list[Box]:
    given = _listed(row.get("regions"))
    if not isinstance(given, list | tuple | None):
        raise DataError(f"{name} has {given!r} in its column regions: give a list of boxes of four numbers.")
    return [_numbers("regions", box, name) for box in given or []]


def _listed(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def _numbers(column: str, box: Any, name: str) -> Box:
    try:
        first, second, third, fourth = (float(value) for value in box)
    except (TypeError, ValueError) as error:
        raise DataError(f"{name} has {box!r} in its column {column}: give four numbers.") from error
    return first, second, third, fourth


def as_shares(boxes: Sequence[Box]) -> list[list[float]]:
    """Return boxes as converted sets have them: left, top, width and height, in [0, 1] of the image."""
    return [[left, top, right - left, bottom - top] for left, top, right, bottom in boxes]
