"""Which completions pass behind their prompts at a time: those of similar length."""

from collections.abc import Sequence

# Tokens that a device computes in the time that a pass of its own takes more than a part of one.
_OF_A_PASS = {"cpu": 32}
_ON_OTHERS = 256


def tokens_of_a_pass(device: str) -> int:
    """Return what a further pass costs on a type of device, in tokens."""
    return _OF_A_PASS.get(device, _ON_OTHERS)


def cut_by_length(lengths: Sequence[int], of_a_pass: int) -> list[list[int]]:
    """Return the rows of each pass, of which every row is as long as the longest, such that together they cost least.

    Rows stand by length, the longest first, unless one pass is cheapest: it has them as they are.

    Args:
        lengths: (N,) tokens of each row.
        of_a_pass: what a pass costs besides its tokens, in tokens.
    """
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    falls = [place for place in range(1, len(order)) if lengths[order[place]] < lengths[order[place - 1]]]
    best = {len(order): (0, 0)}  # place -> cost of the rows from there on, end of the first pass over them
    for start in [*reversed(falls), 0]:
        longest = lengths[order[start]]
        best[start] = min((of_a_pass + (end - start) * longest + cost, end) for end, (cost, _) in best.items())
    passes, start = [], 0
    while start < len(order):
        end = best[start][1]
        passes.append(order[start:end])
        start = end
    return passes if len(passes) > 1 else [list(range(len(lengths)))]
