"""How much of the attention on an image falls into boxes that are drawn on it."""

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

from vgr_trl.errors import DataError

Box = Sequence[float]  # left, top, width, height in pixels


def covered_shares(grid: tuple[int, int], size: tuple[int, int], boxes: Iterable[Box]) -> list[float]:
    """Return the share of each cell that lies in at least one box, row by row from the top left, each in [0, 1].

    The cells divide the image evenly. Image processors stretch an image to a multiple of the cell, so the cells may be
    fractions of a pixel of the original image, and need not be square there.

    Args:
        grid: rows and columns of vision tokens, each at least 1.
        size: width and height of the image on which the boxes are drawn, in pixels, each above 0.
        boxes: left, top, width and height in pixels; what lies outside of the image does not count.

    Raises:
        DataError: grid, size or a box is none.
    """
    (rows, columns), (width, height) = _checked_grid(grid), _checked_size(size)
    cut = [_as_edges(box) for box in boxes]
    across = [column * width / columns for column in range(columns)] + [width]
    down = [row * height / rows for row in range(rows)] + [height]
    return [
        _union_area([_clipped(box, (across[column], down[row], across[column + 1], down[row + 1])) for box in cut])
        / ((across[column + 1] - across[column]) * (down[row + 1] - down[row]))
        for row in range(rows)
        for column in range(columns)
    ]


def attention_share(attention: Sequence[float], covered: Sequence[float]) -> float | None:
    """Return the share of the attention that falls into the boxes, in [0, 1]; None if there is no attention.

    The attention of a vision token counts as spread evenly over its cell.

    Args:
        attention: of each vision token, row by row from the top left, in any unit, each at least 0.
        covered: share of each cell in the boxes, as `covered_shares` returns it.

    Raises:
        DataError: there are not as many cells as tokens, or a value of `attention` is negative or not finite.
    """
    if len(attention) != len(covered):
        raise DataError(f"attention has {len(attention)} tokens and the grid {len(covered)} cells: give one per cell.")
    for value in attention:
        if not (math.isfinite(value) and value >= 0):
            raise DataError(f"attention has the value {value}: give finite numbers of at least 0.")
    total = math.fsum(attention)
    if total == 0:
        return None
    return math.fsum(value * share for value, share in zip(attention, covered, strict=True)) / total


def area_share(covered: Sequence[float]) -> float:
    """Return the share of the image's area that the boxes cover, in [0, 1]: `attention_share` of even attention."""
    return math.fsum(covered) / len(covered)


def _checked_grid(grid: tuple[int, int]) -> tuple[int, int]:
    if len(grid) != 2 or any(not isinstance(side, int) or side < 1 for side in grid):
        raise DataError(f"grid is {grid}: give rows and columns, two integers of at least 1.")
    return grid


def _checked_size(size: tuple[int, int]) -> tuple[int, int]:
    if len(size) != 2 or any(not (math.isfinite(side) and side > 0) for side in size):
        raise DataError(f"size is {size}: give the image's width and height in pixels, each above 0.")
    return size


def _as_edges(box: Box) -> tuple[float, float, float, float]:
    if len(box) != 4 or not all(map(math.isfinite, box)) or box[2] < 0 or box[3] < 0:
        raise DataError(f"box is {list(box)}: give left, top, width and height in pixels, the last two at least 0.")
    left, top, width, height = box
    return left, top, left + width, top + height


def _clipped(
    box: tuple[float, float, float, float], cell: tuple[float, float, float, float]
) -> tuple[float, float, float, float]:
    return max(box[0], cell[0]), max(box[1], cell[1]), min(box[2], cell[2]), min(box[3], cell[3])


def _union_area(boxes: Sequence[tuple[float, float, float, float]]) -> float:
    """Area of the union: between two neighbouring edges in x, the boxes that are there are intervals in y."""
    boxes = [box for box in boxes if box[0] < box[2] and box[1] < box[3]]
    edges = sorted({edge for box in boxes for edge in (box[0], box[2])})
    area = 0.0
    for left, right in pairwise(edges):
        reached, length = -math.inf, 0.0
        for top, bottom in sorted((box[1], box[3]) for box in boxes if box[0] <= left and box[2] >= right):
            length += max(0.0, bottom - max(top, reached))
            reached = max(reached, bottom)
        area += (right - left) * length
    return area
