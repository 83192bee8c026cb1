"""Drawn questions whose thoughts are mostly filler, and those of easy-VQA."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datasets import Dataset

from methods.fillers import (
    ARITHMETIC,
    MEANT,
    SAID_AGAIN,
    STYLE,
    right_paraphrases,
    right_sums,
    with_paraphrases,
    with_style,
    with_sums,
)
from vgr_trl.demo import Options
from vgr_trl.demo.demo import FAMILIES, Questions, draw

Row = dict[str, Any]
Families = Mapping[str, Sequence[str]]  # what is asked for -> the words it can be
DRAWN: Families = {name: words for name, (_, words) in FAMILIES.items()}
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
        filler: words of a thought that answer nothing; `again`: those among them that take another look at the image,
            and how many of them a thought has.
        filler_right: (a thought's words, the true thought's) -> of what can be right or wrong of the filler, whether.
    """

    name: str
    completion_length: int
    questions: Callable[[int], Questions]
    caption_loss: float = Options.caption_loss
    families: Families = field(default_factory=lambda: DRAWN)
    filler: Sequence[str] = ()
    again: tuple[Sequence[str], int] = ((), 0)
    filler_right: Callable[[Sequence[str], Sequence[str]], list[bool]] | None = None

    @property
    def plain_length(self) -> int:
        """Tokens of a whole answer."""
        return self.completion_length - 2

    @property
    def perceived_words(self) -> list[str]:
        """The words whose value needs the image, wherever they stand."""
        return [word for family in self.families.values() for word in family] + list(self.again[0])

    @property
    def perceived_length(self) -> int:
        """Tokens of a whole answer that are such words; the answer itself is one."""
        return len(self.families) + 1 + self.again[1]


def with_doubt(row: Row, share: float, rng: random.Random, families: Families = DRAWN) -> Row:
    """Return `row` with a share of its perceived words replaced by others of their families; its solution follows."""
    family_of = {word: family for family in families.values() for word in family}
    words = row["thought"].split()
    for index, word in enumerate(words):
        if word in family_of and rng.random() < share:
            words[index] = rng.choice([other for other in family_of[word] if other != word])
    asked = families[row["family"]]
    return row | {"thought": " ".join(words), "solution": next(word for word in words if word in asked)}


def filled(name: str, count: int, fill: Callable[..., Row], doubt: Callable[..., Row], **others: Any) -> Task:
    """Return the demo's open questions with `count` words of filler in every thought.

    The start has learned to see, from captions, and then to say what it sees about three times in five, from thoughts
    that are often wrong: so all three words are in reach of reinforcement. A start that has seen little instead, and
    answers half of the questions, knew every colour with 32 words of style, and was at chance with shapes and corners.

    Args:
        name: of the kind of filler.
        count: words.
        fill: (row, draw) -> the row with filler.
        doubt: (row with filler, draw) -> the row that the start learns from.
        others: of `Task`.
    """

    def questions(seed: int) -> Questions:
        plain, rng = draw(seed), random.Random(f"{name} {count} {seed}")
        train, validation, test = (
            [fill(row, rng) for row in rows] for rows in (plain.train, plain.validation, plain.test)
        )
        return Questions(train, validation, test, text=[doubt(row, rng) for row in train], shown=plain.train)

    return Task(f"{name}-{count}", count + 12, questions, caption_loss=0.12, **others)


def styled(count: int) -> Task:
    """Return questions with `count` words of style, drawn whatever is shown."""
    return filled(
        "style",
        count,
        lambda row, rng: with_style(row, count, rng),
        lambda row, rng: with_doubt(row, DOUBT, rng),
        filler=STYLE,
    )


def paraphrased(count: int) -> Task:
    """Return questions with `count` words that say again what was read; every other one takes another look.

    Where the start's thoughts are wrong, they are wrong word by word: what was said does not settle a paraphrase.
    """
    return filled(
        "paraphrase",
        count,
        lambda row, rng: with_paraphrases(row, count // 2, rng),
        lambda row, rng: with_doubt(row, DOUBT, rng, {**DRAWN, **SAID_AGAIN}),
        filler=(*STYLE, *MEANT),
        again=(tuple(MEANT), count // 2),
        filler_right=right_paraphrases,
    )


def summed(count: int) -> Task:
    """Return questions with `count` words of sums, which follow from what was said, right or wrong."""
    return filled(
        "arithmetic",
        count,
        lambda row, rng: with_sums(row, count // 4),
        lambda row, rng: with_sums(with_doubt(row, DOUBT, rng), count // 4),
        filler=ARITHMETIC,
        filler_right=right_sums,
    )


EASY: Families = {
    "colour": ("black", "blue", "brown", "gray", "green", "red", "teal", "yellow"),
    "shape": ("circle", "rectangle", "triangle"),
}


def easy_vqa(folder: Path) -> Task:
    """Return the questions of easy-VQA for a colour or a shape; "yes" and "no" can mostly be guessed.

    Args:
        folder: has `train.parquet` and `test.parquet`, with columns image, questions and answers. Images of 64 x 64 are
            enlarged to 112 x 112, 16 tokens: in four, tiny models have not told shapes apart.
    """

    def rows(split: str) -> list[Row]:
        found = []
        for number, one in enumerate(Dataset.from_parquet(str(folder / f"{split}.parquet"))):
            asked = [pair for pair in zip(one["questions"], one["answers"], strict=True) if pair[0].startswith("what")]
            said = {word for question, answer in asked for word in (*question.rstrip("?").split(), answer)}
            seen = [next(iter(said.intersection(words)), None) for words in EASY.values()]
            if None in seen:
                continue
            common = {
                "image": one["image"].resize((112, 112)),
                "thought": f"a {seen[0]} {seen[1]}",
                "source": "easy-VQA",
            }
            for question, answer in asked:
                family = next(name for name, words in EASY.items() if answer in words)
                found.append(
                    common | {"id": f"{split}-{number}", "problem": question, "solution": answer, "family": family}
                )
        return found

    def questions(seed: int) -> Questions:
        rng, every = random.Random(f"easy-VQA {seed}"), rows("train")
        apart = {row["id"] for row in every[-400:]}
        train, validation = ([row for row in every if (row["id"] in apart) is held_out] for held_out in (False, True))
        text = [with_doubt(row, DOUBT, rng, EASY) for row in train]
        return Questions(train, rng.sample(validation, 128), rng.sample(rows("test"), 320), text=text, shown=train)

    return Task("easy-VQA", 11, questions, caption_loss=0.12, families=EASY)


TASKS = {task.name: task for task in (*map(styled, (0, 8, 32, 96)), paraphrased(32), summed(32))}
