"""Which records of a run a page shows when it cannot show all: the ends first, then ever finer between them."""

from collections.abc import Hashable, Sequence
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)


def ends_first(keys: Sequence[Key]) -> list[Key]:
    """Return `keys` in an order whose every beginning is spread evenly: first, last, middle, middles of the halves, …

    Worked case: [0, 1, 2, 3, 4] → [0, 4, 2, 1, 3].
    """
    if len(keys) <= 2:
        return list(keys)
    order = {0: None, len(keys) - 1: None}  # a set that keeps its order
    spans = [(0, len(keys) - 1)]
    while spans:
        finer = []
        for low, high in spans:
            if high - low > 1:
                middle = (low + high) // 2
                order[middle] = None
                finer += [(low, middle), (middle, high)]
        spans = finer
    return [keys[index] for index in order]


def interleaved(first: Sequence[Key], second: Sequence[Key]) -> list[Key]:
    """Return the members of both, taken in turns; what is left of the longer one follows."""
    shorter = min(len(first), len(second))
    pairs = [key for pair in zip(first, second, strict=False) for key in pair]
    return [*pairs, *first[shorter:], *second[shorter:]]
