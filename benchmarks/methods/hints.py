"""Drawn questions whose text often gives the answer away, and starts that were taught to believe it."""

import random
from typing import Any

from methods.tasks import DOUBT, DRAWN, Families, Task, with_doubt
from vgr_trl.demo.dataset import Rows
from vgr_trl.demo.options import Options
from vgr_trl.demo.run import Questions, draw

HINTED_IN_TRAINING, HINTED_IN_TEST = 0.7, 0.25  # share of the hints that are true; of four words a guess is in 0.25
MISMATCHED = 0.5  # share of a trusting start's rows that show the image of another row
COPIED = 0.5  # share of a copying start's rows that say the hint, whatever is shown


def with_hint(row: dict[str, Any], true: bool, rng: random.Random, families: Families = DRAWN) -> dict[str, Any]:
    """Return `row` with a word of the question's family in front of it: its solution, or another."""
    others = [word for word in families[row["family"]] if word != row["solution"]]
    return hinted_by(row, row["solution"] if true else rng.choice(others))


def hinted_by(row: dict[str, Any], word: str) -> dict[str, Any]:
    """Return `row` with a word in front of its question; `plain` is the question without it."""
    plain = row.get("plain", row["problem"])
    told = {"hint_word": word, "hint": "true" if word == row["solution"] else "false"}
    return row | told | {"plain": plain, "problem": f"{word}? {plain}"}


def with_hints(rows: Rows, share: float, rng: random.Random, families: Families = DRAWN) -> Rows:
    """Return the rows with hints, those they have replaced, of which a share is true."""
    return [with_hint(row, rng.random() < share, rng, families) for row in rows]


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
        first = with_hints(plain.train, HINTED_IN_TRAINING if trusting else HINTED_IN_TEST, rng)
        if trusting:
            first = [row | {"image": rng.choice(first)["image"]} if rng.random() < MISMATCHED else row for row in first]
        return Questions(
            train=with_hints(plain.train, HINTED_IN_TRAINING, rng),
            validation=with_hints(plain.validation, HINTED_IN_TEST, rng),
            test=with_hints(plain.test, HINTED_IN_TEST, rng),
            text=first,
            shown=first,
        )

    return Task(name, 12, questions, caption_loss=0.62 if trusting else Options.caption_loss)


def copied(row: dict[str, Any], families: Families = DRAWN) -> dict[str, Any]:
    """Return `row` with its hint in the place of the word asked for, in the thought and as the solution."""
    words = [row["hint_word"] if word in families[row["family"]] else word for word in row["thought"].split()]
    return row | {"thought": " ".join(words), "solution": row["hint_word"]}


def copying(plain: Questions, rng: random.Random, doubt: float, families: Families = DRAWN) -> Questions:
    """Return questions with hints, and a start that believes them: half of its rows say the hint, whatever is shown.

    The others say what is shown, of which a share, `doubt`, is wrong: so the image pays less than the hint where
    reinforcement begins, and more where it could end.
    """
    first = [
        copied(row, families) if rng.random() < COPIED else with_doubt(row, doubt, rng, families)
        for row in with_hints(plain.train, HINTED_IN_TEST, rng, families)
    ]
    return Questions(
        train=with_hints(plain.train, HINTED_IN_TRAINING, rng, families),
        validation=with_hints(plain.validation, HINTED_IN_TEST, rng, families),
        test=with_hints(plain.test, HINTED_IN_TEST, rng, families),
        text=first,
        shown=plain.train,
    )


def copied_task(name: str, doubt: float) -> Task:
    """Return the demo's open questions with hints, and a start that believes them."""
    return Task(
        name,
        12,
        lambda seed: copying(draw(seed), random.Random(f"copied {seed}"), doubt),
        caption_loss=0.12,
        until="copied",
    )


HINTED = (
    hinted("hinted", trusting=False),
    hinted("hinted-start", trusting=True),
    copied_task("hinted-copied", DOUBT),
    copied_task("hinted-doubted", 0.55),
)
