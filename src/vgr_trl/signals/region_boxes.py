"""Images that show nothing but what a question is about."""

from collections.abc import Sequence

from PIL import Image

from vgr_trl.data.rows.regions import Box


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
