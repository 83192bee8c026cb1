"""easy-VQA (Victor Zhou, MIT): questions that nobody here made, as rows for the demo's path.

Each image is a drawing of one coloured shape with templated questions about it; the answer is a colour, a shape, yes or
no. Six in seven are yes or no, so rows are drawn evenly from the three families.
"""

import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

FAMILIES = ("colour", "shape", "yes/no")


def family_of(problem: str, answer: str) -> str:
    """Return which of `FAMILIES` the answer to `problem` belongs to."""
    if answer in ("yes", "no"):
        return "yes/no"
    return "colour" if re.match(r"what (color|is the color)\b", problem) else "shape"


def vocabulary(images: Iterable[Mapping[str, Any]]) -> dict[str, set[str]]:
    """Return the answers of the families colour and shape, from the answers to `images`' questions."""
    words: dict[str, set[str]] = {"colour": set(), "shape": set()}
    for image in images:
        for problem, answer in zip(image["questions"], image["answers"], strict=True):
            if (family := family_of(problem, answer)) in words:
                words[family].add(answer)
    return words


def thought_of(image: Mapping[str, Any], words: Mapping[str, set[str]]) -> str | None:
    """Return what the image shows, `a blue circle`, as far as its own questions and answers tell, else None."""
    seen: dict[str, str] = {}
    for problem, answer in zip(image["questions"], image["answers"], strict=True):
        named = set(re.findall(r"\w+", problem))
        if answer in ("yes", "no"):
            negated = bool(named & {"not", "no"})
            true = named if (answer == "yes") != negated else set()
        else:
            true = {*named, answer}
        for family, choices in words.items():
            for word in true & choices:
                seen[family] = word
    return f"a {seen['colour']} {seen['shape']}" if len(seen) == 2 else None


def balanced_rows(
    images: Sequence[Mapping[str, Any]], count: int, *, words: Mapping[str, set[str]], seed: int, split: str
) -> list[dict[str, Any]]:
    """Return `count` questions, as many of each family, as rows for warm start, training and evaluation.

    Images whose own questions do not tell what they show are left out.

    Args:
        images: with `image_id`, `image`, `questions` and `answers`.
        count: at most what the rarest family has, times 3.
        words: colours and shapes, see `vocabulary`.
        seed: of the choice.
        split: named in the rows' ids.
    """
    by_family: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for image in images:
        if (thought := thought_of(image, words)) is None:
            continue
        for number, (problem, answer) in enumerate(zip(image["questions"], image["answers"], strict=True)):
            family = family_of(problem, answer)
            by_family[family].append(
                {
                    "id": f"{split}-{image['image_id']}-{number}",
                    "source": "easy-VQA",
                    "family": family,
                    "image": image["image"],
                    "problem": problem,
                    "solution": answer,
                    "thought": thought,
                }
            )
    rng = random.Random(f"{split} {seed}")
    rows = [row for family in FAMILIES for row in rng.sample(by_family[family], count // len(FAMILIES))]
    rng.shuffle(rows)
    return rows


def commonest_answer_accuracy(
    train: Sequence[Mapping[str, Any]], test: Sequence[Mapping[str, Any]], by: str = "family"
) -> dict[str, float]:
    """Return, per family and over all test rows (`all`), how often the commonest train answer is right.

    Args:
        train: rows that say which answer is the commonest.
        test: rows to answer.
        by: `family`: the commonest of the family. `problem`: the commonest to that very question, which is the most
            that can be had without looking: most colours asked for are absent.
    """
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for row in train:
        counts[row[by]][row["solution"]] += 1
    right: dict[str, list[bool]] = defaultdict(list)
    for row in test:
        commonest = counts[row[by]].most_common(1)
        hit = bool(commonest) and row["solution"] == commonest[0][0]
        right[row["family"]].append(hit)
        right["all"].append(hit)
    return {name: sum(hits) / len(hits) for name, hits in right.items()}


def text_rows(images: Iterable[Mapping[str, Any]], *, words: Mapping[str, set[str]]) -> list[dict[str, Any]]:
    """Return every question of `images` without its image, in the proportions of the data; yes and no need practice."""
    rows = []
    for image in images:
        if thought := thought_of(image, words):
            rows += [
                {"problem": problem, "thought": thought, "solution": answer}
                for problem, answer in zip(image["questions"], image["answers"], strict=True)
            ]
    return rows


def mismatch_images(rows: Sequence[dict[str, Any]], share: float, *, seed: int) -> list[dict[str, Any]]:
    """Return the rows, a `share` of them with the image of another row: demonstrations that are wrong now and then.

    From these a model learns to see, but not to be sure: what it samples stays diverse, and reinforcement has something
    to choose from. Question, thought and answer of a row still fit each other.
    """
    rng = random.Random(seed)
    return [{**row, "image": rng.choice(rows)["image"]} if rng.random() < share else row for row in rows]
