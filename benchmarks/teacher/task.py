"""One of scikit-learn's handwritten digits somewhere in a noisy picture, with its exact box."""

import random
from typing import Any

import numpy as np
from mosaics.task import SINGLE, Row, Split, digits
from PIL import Image

SIDE = 32  # pixels of a picture
DIGIT = 8  # pixels of a digit, in the resolution of the data
STEP = 2  # pixels between places where a digit can stand
NOISE = 0.55  # brightest grey of the ground, where ink is 1
ANSWER = "<answer>{}</answer>"


def draw_rows(count: int, *, seed: int, split: Split, side: int = SIDE, noise: float = NOISE) -> list[Row]:
    """Draw pictures as rows: prompt, image, solution, `bbox`, and columns for other teachers.

    `elsewhere` is the box of another part, `same` the digit of another picture with the same solution.

    Args:
        count: number of rows.
        seed: of digits, places and noise.
        split: whose digits are drawn.
        side: of a picture, in pixels.
        noise: brightest grey of the ground, 0 to 1.
    """
    rng = random.Random(f"{split} {seed}")
    inks, labels = digits(split)
    rows = []
    for _ in range(count):
        number = rng.randrange(len(labels))
        place, elsewhere = (draw_place(rng, side) for _ in range(2))
        ground = np.random.default_rng(rng.randrange(10**9)).random((side, side)) * noise
        left, top = place
        part = ground[top : top + DIGIT, left : left + DIGIT]
        np.maximum(part, inks[number], out=part)
        alike = rng.choice(np.flatnonzero(labels == labels[number]).tolist())
        rows.append(
            {
                "prompt": [{"role": "user", "content": SINGLE}],
                "image": to_image(ground),
                "solution": str(labels[number]),
                "bbox": to_box(*place, side),
                "elsewhere": to_box(*elsewhere, side),
                "alike": to_image(inks[alike]),
            }
        )
    return rows


def draw_place(rng: random.Random, side: int) -> tuple[int, int]:
    """Draw the left and upper edge of a digit."""
    places = range(0, side - DIGIT + 1, STEP)
    return rng.choice(places), rng.choice(places)


def to_image(grey: np.ndarray) -> Image.Image:
    """Build an RGB image of greys from 0 to 1."""
    return Image.fromarray((255 * grey).astype(np.uint8)).convert("RGB")


def to_box(left: int, top: int, side: int) -> list[float]:
    """Return left, top, right and bottom as shares of the picture."""
    return [edge / side for edge in (left, top, left + DIGIT, top + DIGIT)]


def crop(row: Row) -> Image.Image:
    """Return the digit's part of the picture."""
    return row["image"].crop([round(edge * row["image"].width) for edge in row["bbox"]])


def as_crops(rows: list[Row]) -> list[Row]:
    """Return the rows with the digit's part as image."""
    return [row | {"image": crop(row)} for row in rows]


Example = tuple[list[dict[str, Any]], list[Any]]  # a conversation and its images


def example(row: Row, image: Image.Image, digit: str) -> Example:
    """Return the question about an image, and an answer."""
    return [*row["prompt"], {"role": "assistant", "content": ANSWER.format(digit)}], [image]


def draw_reading(row: Row, rng: random.Random) -> Example:
    """Return a crop with its digit or, once in 16, the whole picture with a digit that is right half of the time.

    From whole pictures the start learns the form of an answer, and hardly to find the digit.
    """
    if rng.random() < 1 / 16:
        return example(row, row["image"], rng.choice([row["solution"], str(rng.randrange(10))]))
    return example(row, crop(row), row["solution"])


def draw_labelled(row: Row, rng: random.Random) -> Example:
    """Return the whole picture with its digit."""
    return example(row, row["image"], row["solution"])
