"""What a set consists of: rows by source, choices, letters and image sizes, and what was left out and why."""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any

from vgr_trl.data.build.answers import among, commonest, count_answer
from vgr_trl.data.build.encode import Encoded
from vgr_trl.data.rows.questions import Question
from vgr_trl.data.rows.text.prompts import LETTERS

OPEN = "open"
ANSWERS = "commonest answers to open questions"
SIDES = (32, 64, 128, 256, 512, 1024)  # pixels of the shorter side at which a class of sizes begins


@dataclass
class Statistics:
    """Counts over the rows of a set.

    Attributes:
        sources: rows by `source`.
        choices: rows by the number of their choices, `open` for none.
        letters: multiple-choice rows by their right letter.
        sizes: images by the class of their shorter side in pixels, see `size_class`.
        images: rows by the number of their images.
        answers: open rows by their answer, as `count_answer` counts.
        reasons: rows left out, by kind of reason.
    """

    sources: Counter[str] = field(default_factory=Counter)
    choices: Counter[str] = field(default_factory=Counter)
    letters: Counter[str] = field(default_factory=Counter)
    sizes: Counter[str] = field(default_factory=Counter)
    images: Counter[str] = field(default_factory=Counter)
    answers: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, counts: Mapping[str, Mapping[str, int]]) -> "Statistics":
        """Return the statistics that `counts`, as `as_dict` gives them, stand for."""
        return cls(**{name: Counter(counts.get(name, {})) for name in cls.__dataclass_fields__})

    def as_dict(self) -> dict[str, dict[str, int]]:
        """Return the counts as JSON has them."""
        return {name: dict(getattr(self, name)) for name in self.__dataclass_fields__}

    def add(self, question: Question, images: Sequence[Encoded]) -> None:
        """Count a row, and its images by their sizes."""
        letter, answer = (question.solution, None) if question.choices else (None, question.solution)
        self.count(question.source, question.choices, len(images), letter, answer)
        self.sizes.update(size_class(image.width, image.height) for image in images)

    def count(
        self, source: str, choices: Sized | None, images: int, letter: str | None = None, answer: object = None
    ) -> None:
        """Count a row; `letter` of its right option, and `answer` to an open question, are None where not known."""
        self.sources[source] += 1
        self.choices[str(len(choices)) if choices else OPEN] += 1
        self.images[str(images)] += 1
        if letter is not None:
            self.letters[letter] += 1
        if answer is not None:
            count_answer(self.answers, answer)

    def skip(self, reason: str) -> None:
        """Count a row that was left out."""
        self.reasons[kind_of(reason)] += 1

    @property
    def rows(self) -> int:
        """The number of rows."""
        return self.sources.total()


def together(parts: Iterable[Statistics]) -> Statistics:
    """Return the counts of several sets or splits added up."""
    whole = Statistics()
    for part in parts:
        for name in Statistics.__dataclass_fields__:
            getattr(whole, name).update(getattr(part, name))
    return whole


def size_class(width: int, height: int) -> str:
    """Return the class of an image's shorter side, `256 to 511` for example."""
    side = min(width, height)
    if side < SIDES[0]:
        return f"below {SIDES[0]}"
    if side >= SIDES[-1]:
        return f"{SIDES[-1]} and more"
    low = max(start for start in SIDES if start <= side)
    return f"{low} to {2 * low - 1}"


def kind_of(reason: str) -> str:
    """Return `reason` with an ellipsis for what differs from row to row: quotations, names of files, numbers."""
    reason = re.sub(r"(?<!\w)'[^']*'|\"[^\"]*\"|\([^()]*\)", "…", reason)
    reason = re.sub(r"((?:image|video) file) .+ (does not exist)", r"\1 … \2", reason)
    return re.sub(r"(?<!UTF-)\d[\d,.x]*(?<![,.])", "…", reason)[:160]


def on_one_line(text: str) -> str:
    """Return `text` of the data for a terminal: on one line, characters that do not show as their numbers."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode("ascii")
        for character in " ".join(text.split())
    )


def report(statistics: Statistics) -> str:
    """Return the counts as a text."""
    total = statistics.rows
    lines = [f"{total:,} rows"]
    for title, counts in tables(statistics).items():
        if counts:
            whole = sum(counts.values())
            lines += ["", title]
            lines += [f"  {count:>9,}  {count / whole:>6.1%}  {on_one_line(name)}" for name, count in counts.items()]
    return "\n".join(lines) + "\n"


def tables(statistics: Statistics, answers: Collection[str] | None = None) -> dict[str, dict[str, int]]:
    """Return the counts under their titles, each in the order a person expects.

    Args:
        answers: to open questions, which are shown; None: the commonest.
    """
    shown = dict(commonest(statistics.answers)) if answers is None else among(statistics.answers, answers)
    return {
        "rows by source": dict(statistics.sources.most_common()),
        "rows by number of choices": ordered(statistics.choices, [*map(str, range(2, len(LETTERS) + 1)), OPEN]),
        "multiple-choice rows by right letter": ordered(statistics.letters, LETTERS),
        ANSWERS: shown,
        "rows by number of images": dict(sorted(statistics.images.items(), key=lambda pair: int(pair[0]))),
        "images by pixels of the shorter side": ordered(statistics.sizes, _classes()),
        "left out": dict(statistics.reasons.most_common()),
    }


def _classes() -> list[str]:
    return [size_class(side, side) for side in (1, *SIDES)]


def ordered(counts: Mapping[str, int], order: Sequence[Any]) -> dict[str, int]:
    """Return those of the counts that are above 0, in an order."""
    return {name: counts[name] for name in order if counts.get(name)}
