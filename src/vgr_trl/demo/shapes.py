"""Drawn questions: what colour, which shape, which corner?

An image shows one shape in one of four 28-pixel cells of different paper. Three words describe it, and all three have
to be read off the image; the question asks for one of them, with or without the four words of its family as options.
"""

import math
import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from PIL import Image, ImageDraw

from vgr_trl.data.rows.text.prompts import LETTERS

Split = Literal["train", "validation", "test"]

CELL = 28  # pixels: one token of a vision tower with patches of 14 pixels merged 2 x 2
COLOURS = {"red": (214, 40, 40), "green": (40, 160, 60), "blue": (40, 80, 214), "yellow": (236, 200, 40)}
SHAPES = ("circle", "square", "triangle", "cross")
# Each corner has a paper of its own: a place that shows only as a position takes a tiny model thousands of steps.
PAPERS = {
    "northwest": (255, 255, 255),
    "northeast": (200, 200, 210),
    "southwest": (250, 215, 180),
    "southeast": (190, 235, 200),
}
FAMILIES = {
    "colour": ("which colour is it?", tuple(COLOURS)),
    "shape": ("which shape is it?", SHAPES),
    "corner": ("which corner is it in?", tuple(PAPERS)),
}


@dataclass(frozen=True)
class Scene:
    """One shape; `size`, `x` and `y` (of its top left pixel, in its cell) in pixels; `shade` and `paper` 0 to 255."""

    colour: str
    shape: str
    corner: str
    size: int
    x: int
    y: int
    shade: int
    paper: int

    @property
    def words(self) -> dict[str, str]:
        """The word that is right for each family."""
        return {"colour": self.colour, "shape": self.shape, "corner": self.corner}


def draw_questions(count: int, *, seed: int, split: Split, multiple_choice: bool = True) -> list[dict[str, Any]]:
    """Return `count` questions as rows with image, problem, choices, solution, thought, family, id and source.

    A scene belongs to one split whatever the seed, so no image of one split occurs in another. The options are
    the family's four words in random order, so the letter says nothing about the word.

    Args:
        count: at least 0.
        seed: of scenes, families and order of options.
        split: which of the three disjoint sets of scenes to draw from.
        multiple_choice: the solution is a letter; otherwise there are no choices and the solution is the word.
    """
    rng = random.Random(f"{split} {seed}")  # a text seed, because seeds of numbers that are close give similar streams
    scenes = _scenes(rng, split)
    rows = [_question(next(scenes), rng, f"{split}-{seed}-{index}") for index in range(count)]
    return rows if multiple_choice else [as_open_question(row) for row in rows]


def as_open_question(row: dict[str, Any]) -> dict[str, Any]:
    """Return a multiple-choice row without its choices; the solution becomes the word behind the letter."""
    solution = row["choices"][LETTERS.index(row["solution"])]
    return {**{name: value for name, value in row.items() if name != "choices"}, "solution": solution}


def split_of(scene: Scene) -> Split:
    """Return the split that `scene` belongs to: eight in ten train, one validation, one test."""
    bucket = zlib.crc32(repr(scene).encode()) % 10
    return "test" if bucket == 0 else "validation" if bucket == 1 else "train"


def draw_scene(scene: Scene) -> Image.Image:
    """Return the scene as an RGB image of 56 x 56 pixels."""
    image = Image.new("RGB", (2 * CELL, 2 * CELL))
    for corner, paper in PAPERS.items():
        x, y = _origin(corner)
        image.paste(_shaded(paper, scene.paper - 255), (x, y, x + CELL, y + CELL))
    left, top = (start + shift for start, shift in zip(_origin(scene.corner), (scene.x, scene.y), strict=True))
    right, bottom = left + scene.size - 1, top + scene.size - 1
    fill = _shaded(COLOURS[scene.colour], scene.shade - 128)
    pen = ImageDraw.Draw(image)
    if scene.shape == "circle":
        pen.ellipse((left, top, right, bottom), fill=fill)
    elif scene.shape == "square":
        pen.rectangle((left, top, right, bottom), fill=fill)
    elif scene.shape == "triangle":
        pen.polygon([(left, bottom), (right, bottom), ((left + right) / 2, top)], fill=fill)
    else:
        arm = math.ceil(scene.size / 3)
        pen.rectangle((left + arm, top, right - arm, bottom), fill=fill)
        pen.rectangle((left, top + arm, right, bottom - arm), fill=fill)
    return image


def _origin(corner: str) -> tuple[int, int]:
    return (CELL if corner.endswith("east") else 0, CELL if corner.startswith("south") else 0)


def _shaded(colour: tuple[int, int, int], change: int) -> tuple[int, ...]:
    return tuple(min(255, max(0, channel + change)) for channel in colour)


def _scenes(rng: random.Random, split: Split) -> Iterator[Scene]:
    while True:
        size = rng.randint(17, 25)
        scene = Scene(
            colour=rng.choice(tuple(COLOURS)),
            shape=rng.choice(SHAPES),
            corner=rng.choice(tuple(PAPERS)),
            size=size,
            x=rng.randint(1, CELL - 1 - size),
            y=rng.randint(1, CELL - 1 - size),
            shade=rng.randint(108, 148),
            paper=rng.randint(215, 255),
        )
        if split_of(scene) == split:
            yield scene


def _question(scene: Scene, rng: random.Random, name: str) -> dict[str, Any]:
    family = rng.choice(tuple(FAMILIES))
    problem, words = FAMILIES[family]
    choices = rng.sample(words, len(words))
    return {
        "id": name,
        "source": "shapes",
        "family": family,
        "image": draw_scene(scene),
        "problem": problem,
        "choices": choices,
        "solution": LETTERS[choices.index(scene.words[family])],
        "thought": " ".join(["a", *scene.words.values()]),
    }
