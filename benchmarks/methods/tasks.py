"""Drawn questions whose thoughts are mostly style."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from vgr_trl.demo.options import Options
from vgr_trl.demo.run import Questions, draw
from vgr_trl.demo.shapes import FAMILIES

Families = Mapping[str, Sequence[str]]  # what is asked for -> the words it can be
DRAWN: Families = {name: words for name, (_, words) in FAMILIES.items()}
STYLE = tuple("well so now then here look see just maybe next also still thus hence okay right".split())
DOUBT = 0.4  # share of the words read off the image that are wrong in the thoughts a model starts from


@dataclass(frozen=True)
class Task:
    """What is asked, and how long an answer may be.

    Attributes:
        name: in flags and tables.
        completion_length: in tokens; of a whole answer, with two to spare.
        questions: seed -> rows; `shown` are captions without style, of which the warm start makes the first step.
        caption_loss: at which that step ends, in nats; below 0.2 nothing is left to be learned about what is seen.
        families: all are read off the image in a thought, one is asked for.
        until: whose share ends the warm start: right answers, or answers that are a hint that misleads.
    """

    name: str
    completion_length: int
    questions: Callable[[int], Questions]
    caption_loss: float = Options.caption_loss
    families: Families = field(default_factory=lambda: DRAWN)
    until: Literal["accuracy", "copied"] = "accuracy"

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


def with_doubt(row: dict[str, Any], share: float, rng: random.Random, families: Families = DRAWN) -> dict[str, Any]:
    """Return `row` with a share of its perceived words replaced by others of their families; its solution follows."""
    family_of = {word: family for family in families.values() for word in family}
    words = row["thought"].split()
    for index, word in enumerate(words):
        if word in family_of and rng.random() < share:
            words[index] = rng.choice([other for other in family_of[word] if other != word])
    asked = families[row["family"]]
    return row | {"thought": " ".join(words), "solution": next(word for word in words if word in asked)}


def styled(count: int) -> Task:
    """Return the demo's open questions with `count` words of style in every thought.

    The start has learned to see, from captions, and then to say what it sees about three times in five, from thoughts
    that are often wrong: so all three words are in reach of reinforcement. A start that has seen little instead, and
    answers half of the questions, knew every colour with 32 words of style, and was at chance with shapes and corners.
    """

    def questions(seed: int) -> Questions:
        plain, rng = draw(seed), random.Random(f"style {count} {seed}")
        train, validation, test = (
            [with_style(row, count, rng) for row in rows] for rows in (plain.train, plain.validation, plain.test)
        )
        doubtful = [with_doubt(row, DOUBT, rng) for row in train]
        return Questions(train, validation, test, text=doubtful, shown=plain.train)

    return Task(f"style-{count}", count + 12, questions, caption_loss=0.12)


TASKS = {task.name: task for task in (styled(count) for count in (0, 8, 32, 96))}
