"""Count what a set consists of, and print it."""

import re
from collections import Counter
from collections.abc import Sized
from typing import Any

from vgr_trl.utils import printable

Counts = dict[str, Counter[str]]
"""Counts over the rows of a set, under the names of `TITLES`."""
TITLES = {
    "sources": "rows by source",
    "choices": "rows by number of choices",
    "letters": "multiple-choice rows by right letter",
    "answers": "commonest answers to open questions",
    "images": "rows by number of images",
    "sizes": "images by pixels of the shorter side",
    "tokens": "images by tokens",
    "lengths": "prompt length in tokens, images included",
    "reasons": "left out",
}
BY_COUNT = ("sources", "answers", "reasons")  # the tables of which the commonest are listed
LONGEST_ANSWER = 80  # characters
MOST_LINES = 12


def count_row(counts: Counts, source: str, choices: Sized | None, images: int, right: Any = None) -> None:
    """Count a row; `right` is the letter of its right option or the answer to an open question, None if not known."""
    counts["sources"][to_one_line(source)] += 1
    counts["choices"][str(len(choices)) if choices else "open"] += 1
    counts["images"][str(images)] += 1
    if right is not None and choices:
        counts["letters"][right] += 1
    elif right is not None:
        counts["answers"][to_one_line(str(right))[:LONGEST_ANSWER]] += 1


def power_class(number: int) -> str:
    """Return the powers of two that a number above 0 lies between, `256 to 511` for example."""
    low = 1 << (number.bit_length() - 1)
    return f"{low} to {2 * low - 1}"


def kind_of(reason: str) -> str:
    """Return `reason` with an ellipsis for what differs from row to row: quotations, names of files, numbers."""
    reason = re.sub(r"(?<!\w)'[^']*'|\"[^\"]*\"|\([^()]*\)", "…", reason)
    reason = re.sub(r"((?:image|video) file) .+ (does not exist)", r"\1 … \2", reason)
    return to_one_line(re.sub(r"(?<!UTF-)\d[\d,.x]*(?<![,.])", "…", reason)[:160])


def to_one_line(text: str) -> str:
    """Return `text` of the data for a terminal: on one line, characters that do not show as their numbers."""
    return printable(" ".join(text.split()))


def tables(counts: Counts) -> dict[str, dict[str, int]]:
    """Return the counts that are not empty: the commonest of some, the others in the order of numbers or letters."""
    found = {}
    for table in filter(counts.get, TITLES):
        in_order = sorted(counts[table].items(), key=lambda pair: (len(pair[0]), pair[0]))
        found[table] = dict(counts[table].most_common(MOST_LINES) if table in BY_COUNT else in_order)
    return found


def report(counts: Counts) -> str:
    """Return the tables as a text."""
    lines = []
    for table, numbers in tables(counts).items():
        lines += ["", TITLES[table]]
        total = counts[table].total()
        lines += [f"  {number:>9,}  {number / total:>6.1%}  {name}" for name, number in numbers.items()]
    return "\n".join(lines)
