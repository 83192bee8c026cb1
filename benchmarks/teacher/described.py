"""The same pictures, answered with a description before the digit; a teacher may read the answer."""

import random
from typing import Any

from mosaics.model import teach
from mosaics.task import Row
from PIL import Image

from teacher.runs import METHODS, Method, Start, taught
from teacher.task import ANSWER, Example, crop

SHAPES = {"rings": "0689", "strokes": "147", "bows": "235"}  # what a digit has -> digits
HINT = "the answer is {}"
CHOSEN = {name: METHODS[name] for name in ("plain", "plain, 240 steps", "divergence", "labels", "rlsd")} | {
    "divergence, answer": taught("teacher_divergence", columns={"privileged_context": "hint"}),
    "plain, 0.0001, 240 steps": Method({"learning_rate": 1e-4, "max_steps": 240}),  # the best rate on the tuning seed
    "rlsd, answer": taught("rlsd", 1.0, columns={"privileged_context": "hint"}),
}


def reply(row: Row, image: Image.Image, digit: str, hint: str = "") -> Example:
    """Return the question about an image, and an answer behind its description."""
    (shape,) = (shape for shape, digits in SHAPES.items() if digit in digits)
    question = [{**row["prompt"][0], "content": row["prompt"][0]["content"] + (hint and f"\n\n{hint}")}]
    return [*question, {"role": "assistant", "content": f"it has {shape} {ANSWER.format(digit)}"}], [image]


class DescribedStart(Start):
    """A model that describes the digit of a crop before it names it, and knows what to do with a hint."""

    tokens, task = 12, "described"

    def draw_rows(self, count: int, **options: Any) -> list[Row]:
        """Draw pictures with the column `hint`."""
        return [row | {"hint": HINT.format(row["solution"])} for row in super().draw_rows(count, **options)]

    def texts(self) -> list[str]:
        """Return further texts of the task."""
        return [f"it has {' '.join(SHAPES)}", HINT]

    def warm_up(self, rows: list[Row]) -> None:
        """Teach to read crops and, from one whole picture in four, hints."""
        steps = self.settings.reading_steps
        teach(self.model, self.processor, rows, self.reading, steps=steps, rate=2e-3, seed=self.seed)

    def reading(self, row: Row, rng: random.Random) -> Example:
        """Return a crop, a whole picture with a hint, or once in 16 one with a digit that is right half the time."""
        drawn = rng.random()
        if drawn < 1 / 16:
            return reply(row, row["image"], rng.choice([row["solution"], str(rng.randrange(10))]))
        if drawn < 5 / 16:
            return reply(row, row["image"], row["solution"], row["hint"])
        return reply(row, crop(row), row["solution"])

    def label(self, row: Row, rng: random.Random) -> Example:
        """Return the whole picture with its answer."""
        return reply(row, row["image"], row["solution"])
