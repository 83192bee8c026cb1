"""Drawn questions whose thoughts are mostly style, and questions whose text often gives the answer away."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vgr_trl.demo.rows import Rows
from vgr_trl.demo.run import Questions, draw
from vgr_trl.demo.shapes import FAMILIES

STYLE = tuple("well so now then here look see just maybe next also still thus hence okay right".split())
HINTED_IN_TRAINING, HINTED_IN_TEST = 0.7, 0.25  # share of the hints that are true, of four words


@dataclass(frozen=True)
class Task:
    """What is asked, and how long an answer may be.

    Attributes:
        name: in flags and tables.
        completion_length: in tokens; of a whole answer, with two to spare.
        questions: seed -> rows; `shown` are captions without style, of which the warm start makes the first step.
    """

    name: str
    completion_length: int
    questions: Callable[[int], Questions]

    @property
    def plain_length(self) -> int:
        """Tokens of a whole answer."""
        return self.completion_length - 2


def with_style(row: dict[str, Any], count: int, rng: random.Random) -> dict[str, Any]:
    """Return `row` with `count` words of style in its thought, spread before its words that are read off the image."""
    first, *perceived = row["thought"].split()
    words = [first]
    for index, word in enumerate(perceived):
        share = count // len(perceived) + (index < count % len(perceived))
        words += [*rng.choices(STYLE, k=share), word]
    return row | {"thought": " ".join(words)}


def styled(count: int) -> Task:
    """Return the demo's open questions with `count` words of style in every thought."""

    def questions(seed: int) -> Questions:
        plain, rng = draw(seed), random.Random(f"style {count} {seed}")
        train, validation, test = (
            [with_style(row, count, rng) for row in rows] for rows in (plain.train, plain.validation, plain.test)
        )
        return Questions(train, validation, test, text=train, shown=plain.train)

    return Task(f"style-{count}", count + 12, questions)


def with_hint(row: dict[str, Any], true: bool, rng: random.Random) -> dict[str, Any]:
    """Return `row` with a word of the question's family in front of it: its solution, or another."""
    _, words = FAMILIES[row["family"]]
    word = row["solution"] if true else rng.choice([word for word in words if word != row["solution"]])
    return row | {"problem": f"{word}? {row['problem']}", "hint": "true" if true else "false"}


def hinted() -> Task:
    """Return the demo's open questions with a hint that is mostly true in training and as good as a guess in the test.

    The warm start sees hints that are as good as a guess, so that reinforcement alone teaches to trust them.
    """

    def questions(seed: int) -> Questions:
        plain, rng = draw(seed), random.Random(f"hint {seed}")

        def hint(rows: Rows, share: float) -> Rows:
            return [with_hint(row, rng.random() < share, rng) for row in rows]

        return Questions(
            train=hint(plain.train, HINTED_IN_TRAINING),
            validation=hint(plain.validation, HINTED_IN_TEST),
            test=hint(plain.test, HINTED_IN_TEST),
            text=hint(plain.train, HINTED_IN_TEST),
            shown=hint(plain.train, HINTED_IN_TEST),
        )

    return Task("hinted", 12, questions)


TASKS = {task.name: task for task in (*(styled(count) for count in (0, 8, 32, 96)), hinted())}
