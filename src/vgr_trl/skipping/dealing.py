"""Which rows run together: those of similar length, and as many as a number of tokens allows."""

from collections.abc import Callable, Sequence

from vgr_trl.skipping.live import Extent


def deal_by_length(order: Sequence[int], groups: Sequence[int], lengths: Sequence[int], window: int) -> list[int]:
    """Return a permutation in which rows of similar length follow each other, and the rows of a group, too.

    Groups stand by the length of their longest row, the longest first, and rows within a group likewise; where those
    are equal, by the order given.

    Args:
        order: permutation of the N rows.
        groups: (N,) number of the group of each row.
        lengths: (N,) length of each row.
        window: number of successive rows of `order` that change places with each other only.
    """
    dealt: list[int] = []
    for start in range(0, len(order), window):
        rows = order[start : start + window]
        longest: dict[int, int] = {}  # in order of first appearance
        for row in rows:
            longest[groups[row]] = max(longest.get(groups[row], 0), lengths[row])
        places = {group: place for place, group in enumerate(sorted(longest, key=lambda group: -longest[group]))}
        dealt += sorted(rows, key=lambda row: (places[groups[row]], -lengths[row]))
    return dealt


def pack_rows(count: int, tokens: Callable[[Sequence[int]], int], most: int) -> list[list[int]]:
    """Return rows in order, cut into parts of at most so many tokens, and of one row at least.

    Args:
        tokens: that a pass over some rows computes.
    """
    parts: list[list[int]] = [[0]]
    for row in range(1, count):
        wider = [*parts[-1], row]
        if tokens(wider) > max(most, tokens(parts[-1])):
            parts.append([row])
        else:
            parts[-1] = wider
    return parts


def tokens_of(rows: Sequence[int], extents: Sequence[Extent], groups: Sequence[int] | None) -> int:
    """Return the tokens, padding included, that a pass over some rows computes; rows that do not run cost nothing.

    Prompts, as wide as the longest, are computed once per group, and completions, as wide as the longest.

    Args:
        extents: (N,) what of each row runs.
        groups: (N,) number of the prompt of each row; None: every row computes its own.
    """
    running = [row for row in rows if extents[row].runs]
    prompts = len(running) if groups is None else len({groups[row] for row in running})
    longest = max((extents[row].prompt for row in running), default=0)
    return prompts * longest + len(running) * max((extents[row].completion for row in running), default=0)
