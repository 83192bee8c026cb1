"""Words that make a thought longer than what is read off the image: style, paraphrases, arithmetic."""

import random
from collections.abc import Sequence
from typing import Any

from vgr_trl.demo.demo import FAMILIES

STYLE = tuple("well so now then here look see just maybe next also still thus hence okay right".split())
OTHER_WORDS = {
    "red": ("crimson", "scarlet", "ruby"),
    "green": ("emerald", "lime", "olive"),
    "blue": ("azure", "navy", "cobalt"),
    "yellow": ("golden", "lemon", "amber"),
    "circle": ("disc", "ring", "ball"),
    "square": ("block", "box", "tile"),
    "triangle": ("wedge", "pyramid", "arrowhead"),
    "cross": ("crux", "rood", "saltire"),
    "northwest": ("topleft", "upperleft", "northwestern"),
    "northeast": ("topright", "upperright", "northeastern"),
    "southwest": ("bottomleft", "lowerleft", "southwestern"),
    "southeast": ("bottomright", "lowerright", "southeastern"),
}
MEANT = {other: word for word, others in OTHER_WORDS.items() for other in others}
SAID_AGAIN = {  # the ways to say a family's words again -> its words, said so
    f"{family} {way}": tuple(OTHER_WORDS[word][way] for word in words)
    for family, (_, words) in FAMILIES.items()
    for way in range(3)
}
NUMBERS = {word: place for _, words in FAMILIES.values() for place, word in enumerate(words, 1)}
PLUS, MAKES = "plus", "makes"
ARITHMETIC = (PLUS, MAKES, *map(str, range(10)))

Row = dict[str, Any]


def with_style(row: Row, count: int, rng: random.Random) -> Row:
    """Return `row` with `count` words of style in its thought, spread before its words that are read off the image."""
    first, *perceived = row["thought"].split()
    words = [first]
    for word, share in zip(perceived, shares(count, len(perceived)), strict=True):
        words += [*rng.choices(STYLE, k=share), word]
    return row | {"thought": " ".join(words)}


def with_paraphrases(row: Row, count: int, rng: random.Random) -> Row:
    """Return `row` with `count` paraphrases, a word of style and another word each, behind what they say again."""
    first, *perceived = row["thought"].split()
    words = [first]
    for word, share in zip(perceived, shares(count, len(perceived)), strict=True):
        words.append(word)
        for _ in range(share):
            words += [rng.choice(STYLE), rng.choice(OTHER_WORDS[word])]
    return row | {"thought": " ".join(words)}


def with_sums(row: Row, count: int) -> Row:
    """Return `row` with `count` sums behind what is read off: the words' numbers in turn, each added to the last digit.

    A sum takes four words: `a red cross southeast plus 1 makes 1 plus 4 makes 5 plus 4 makes 9 plus 1 makes 0`.
    """
    words = row["thought"].split()[:4]
    total = 0
    for index in range(count):
        number = NUMBERS[words[1 + index % 3]]
        total = (total + number) % 10
        words += [PLUS, str(number), MAKES, str(total)]
    return row | {"thought": " ".join(words)}


def shares(count: int, places: int) -> list[int]:
    """Return `count` spread over places, the first getting what is over."""
    return [count // places + (index < count % places) for index in range(places)]


def right_paraphrases(said: Sequence[str], truth: Sequence[str]) -> list[bool]:
    """Return of every paraphrase in a thought whether it is right of the image that `truth` is the thought of."""
    return [MEANT[word] in truth for word in said if word in MEANT]


def right_sums(said: Sequence[str], truth: Sequence[str]) -> list[bool]:
    """Return of every sum in a thought whether it is due after the words that were read off, right or wrong."""
    count, read = said.count(MAKES), said[:4]
    if len(read) < 4 or not NUMBERS.keys() >= set(read[1:]):
        return [False] * count
    due = with_sums({"thought": " ".join(read)}, count)["thought"].split()
    return [list(said[place : place + 4]) == due[place : place + 4] for place in range(4, len(due), 4)]
