"""Mosaics of scikit-learn's handwritten digits, with the exact box of every cell."""

import random
from collections.abc import Sequence
from functools import cache
from typing import Any, Literal

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

Split = Literal["train", "test"]
Row = dict[str, Any]
Box = tuple[float, float, float, float]  # left, top, right, bottom, 0 to 1

SIDE = 144  # pixels of a mosaic in the resolution of the data; the tool's smallest part is 28
SHOWN = 8  # pixels of every image as the model sees it: mosaics and parts of them alike
GRIDS = (3,)  # cells of a row
ORDINALS = ("first", "second", "third", "fourth")
SINGLE = "which digit is shown"


@cache
def digits(split: Split) -> tuple[np.ndarray, np.ndarray]:
    """Return ink (N, 8, 8) from 0 to 1 and labels (N,) of the digits of a split; each digit is in one split only."""
    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    chosen = order[400:] if split == "train" else order[:400]
    return data.images[chosen] / 16, data.target[chosen]


def draw_rows(count: int, *, seed: int, split: Split, singles: float = 0.25) -> list[Row]:
    """Return questions as rows: prompt, image, solution, box, grid (cells of a row), place (row and column that are
    asked for, from 0), and the digits of all cells.

    Args:
        count: number of rows.
        seed: of the digits, grids and places.
        split: whose digits are drawn.
        singles: share of images with one digit only, which can be read without the tool; their box is the whole image.
    """
    rng = random.Random(f"{split} {seed}")
    rows = []
    for _ in range(count):
        grid = 1 if rng.random() < singles else rng.choice(GRIDS)
        image, shown = draw_mosaic(rng, grid, split)
        line, column = rng.randrange(grid), rng.randrange(grid)
        place = f"which digit is {ORDINALS[column]} in the {ORDINALS[line]} row"
        rows.append(
            {
                "prompt": [{"role": "user", "content": SINGLE if grid == 1 else place}],
                "image": image,
                "solution": str(shown[line * grid + column]),
                "box": block_box(grid, line, column),
                "grid": grid,
                "place": (line, column),
                "digits": shown,
            }
        )
    return rows


def draw_mosaic(rng: random.Random, grid: int, split: Split) -> tuple[Image.Image, list[int]]:
    """Return a mosaic of `grid` x `grid` digits, and its digits in reading order.

    A digit takes three quarters of the side of its cell, at a place that varies. Cells are black and grey by turns.
    """
    inks, labels = digits(split)
    cell, size = SIDE // grid, SIDE // grid * 3 // 4
    canvas, shown = np.zeros((SIDE, SIDE)), []
    for line in range(grid):
        for column in range(grid):
            number = rng.randrange(len(labels))
            ink = Image.fromarray((255 * inks[number]).astype(np.uint8)).resize((size, size), Image.Resampling.NEAREST)
            top, left = (side * cell + cell // 8 + rng.randint(-(cell // 8), cell // 8) for side in (line, column))
            paper = 0.25 * ((line + column) % 2)
            canvas[line * cell : (line + 1) * cell, column * cell : (column + 1) * cell] = paper
            canvas[top : top + size, left : left + size] += (1 - paper) * np.asarray(ink) / 255
            shown.append(int(labels[number]))
    return Image.fromarray((255 * canvas).round().astype(np.uint8)).convert("RGB"), shown


def block_box(grid: int, top: int, left: int, height: int = 1, width: int = 1) -> Box:
    """Return the box of a block of cells, as the model writes numbers: with two decimals."""
    return tuple(round(side / grid, 2) for side in (left, top, left + width, top + height))  # type: ignore[return-value]


def blocks(grid: int) -> list[tuple[int, int, int, int]]:
    """Return all blocks of up to 2 x 2 cells: top, left, height, width in cells."""
    return [
        (top, left, height, width)
        for height in (1, 2)
        for width in (1, 2)
        for top in range(grid - height + 1)
        for left in range(grid - width + 1)
    ]


def is_box(numbers: Any) -> bool:
    """Return whether something that a model has written is four numbers."""
    return isinstance(numbers, list) and len(numbers) == 4 and all(isinstance(each, int | float) for each in numbers)


def overlap(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the intersection of two boxes over their union, 0 to 1."""
    width, height = (min(one[i + 2], other[i + 2]) - max(one[i], other[i]) for i in (0, 1))
    shared = max(width, 0) * max(height, 0)
    areas = [max(box[2] - box[0], 0) * max(box[3] - box[1], 0) for box in (one, other)]
    return shared / max(sum(areas) - shared, 1e-9)
