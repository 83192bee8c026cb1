"""Drawn questions whose thoughts are mostly style, and questions whose text often gives the answer away."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vgr_trl.demo.options import Options
from vgr_trl.demo.rows import Rows
from vgr_trl.demo.run import Questions, draw
from vgr_trl.demo.shapes import FAMILIES

OTHERS = {word: [other for other in family if other != word] for _, family in FAMILIES.values() for word in family}
STYLE = tuple("well so now then here look see just maybe next also still thus hence okay right".split())
DOUBT = 0.4  # share of the words read off the image that are wrong in the thoughts a model starts from
HINTED_IN_TRAINING, HINTED_IN_TEST = 0.7, 0.25  # share of the hints that are true, of four words
MISMATCHED = 0.5  # share of a trusting start's rows that show the image of another row


@dataclass(frozen=True)
class Task:
    """What is asked, and how long an answer may be.

    Attributes:
        name: in flags and tables.
        completion_length: in tokens; of a whole answer, with two to spare.
        questions: seed -> rows; `shown` are captions without style, of which the warm start makes the first step.
        caption_loss: at which that step ends, in nats; below 0.2 nothing is left to be learned about what is seen.
    """

    name: str
    completion_length: int
    questions: Callable[[int], Questions]
    caption_loss: float = Options.caption_loss

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


def with_doubt(row: dict[str, Any], share: float, rng: random.Random) -> dict[str, Any]:
    """Return `row` with a share of its perceived words replaced by others of their families; its solution follows."""
    words = row["thought"].split()
    for index, word in enumerate(words):
        if word in OTHERS and rng.random() < share:
            words[index] = rng.choice(OTHERS[word])
    _, family = FAMILIES[row["family"]]
    return row | {"thought": " ".join(words), "solution": next(word for word in words if word in family)}


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


def with_hint(row: dict[str, Any], true: bool, rng: random.Random) -> dict[str, Any]:
    """Return `row` with a word of the question's family in front of it: its solution, or another."""
    _, words = FAMILIES[row["family"]]
    word = row["solution"] if true else rng.choice([word for word in words if word != row["solution"]])
    return row | {"problem": f"{word}? {row['problem']}", "hint": "true" if true else "false"}


def hinted(name: str, *, trusting: bool) -> Task:
    """Return the demo's open questions with a hint that is mostly true in training and as good as a guess in the test.

    Args:
        name: of the task.
        trusting: the warm start sees hints that are as often true as those of training, and with half of them the image
            of another row, so that the hint is all there is to go by; else hints that are as good as a guess, so that
            reinforcement alone could teach to trust them.
    """

    def questions(seed: int) -> Questions:
        plain, rng = draw(seed), random.Random(f"hint {seed}")

        def hint(rows: Rows, share: float) -> Rows:
            return [with_hint(row, rng.random() < share, rng) for row in rows]

        first = hint(plain.train, HINTED_IN_TRAINING if trusting else HINTED_IN_TEST)
        if trusting:
            first = [row | {"image": rng.choice(first)["image"]} if rng.random() < MISMATCHED else row for row in first]
        return Questions(
            train=hint(plain.train, HINTED_IN_TRAINING),
            validation=hint(plain.validation, HINTED_IN_TEST),
            test=hint(plain.test, HINTED_IN_TEST),
            text=first,
            shown=first,
        )

    return Task(name, 12, questions, caption_loss=0.62 if trusting else Options.caption_loss)


HINTED = (hinted("hinted", trusting=False), hinted("hinted-start", trusting=True))
TASKS = {task.name: task for task in (*(styled(count) for count in (0, 8, 32, 96)), *HINTED)}
