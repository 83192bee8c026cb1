"""The commonest answers to open questions: counted in bounded memory, shown in a dozen lines."""

from collections import Counter
from collections.abc import Collection, Mapping

MOST_ANSWERS = 10_000  # different ones that are counted, so that memory stays bounded
LONGEST_ANSWER = 80  # characters
MOST_LINES = 12
OTHERS = "others"


def count_answer(answers: Counter[str], answer: object) -> None:
    """Add an answer, as one of `OTHERS` if it is another than the `MOST_ANSWERS` that came first."""
    text = " ".join(str(answer).split())[:LONGEST_ANSWER]
    answers[text if text in answers or len(answers) < MOST_ANSWERS else OTHERS] += 1


def commonest(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    """Return the first `MOST_LINES` names by their counts, and the others in one."""
    pairs = sorted(((name, count) for name, count in counts.items() if name != OTHERS), key=lambda pair: -pair[1])
    rest = counts.get(OTHERS, 0) + sum(count for _, count in pairs[MOST_LINES:])
    return [*pairs[:MOST_LINES], (OTHERS, rest)] if rest else pairs[:MOST_LINES]


def among(counts: Mapping[str, int], names: Collection[str]) -> dict[str, int]:
    """Return the counts of `names`, and of all others in one, so that the bars of several splits can be compared."""
    named = {name: counts.get(name, 0) for name in names if name != OTHERS}
    rest = sum(counts.values()) - sum(named.values())
    return named | ({OTHERS: rest} if rest else {})
