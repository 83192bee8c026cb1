"""Merge converted sets into one without duplicates, split into train and test that share no image.

The sets are read twice: once to decide which rows are written where, once to write them.
"""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from vgr_trl.data.columns import Candidate, Origin, Question
from vgr_trl.data.convert import Output, convert, encode_candidates, finished
from vgr_trl.data.prompts import LETTERS
from vgr_trl.data.public_sets import jsonl_read, shuffled_choices
from vgr_trl.data.read import Source
from vgr_trl.rewards.answers import normalise
from vgr_trl.utils import ConfigError, DataError


@dataclass(frozen=True)
class Row:
    """What is known of a row.

    Attributes:
        source: which set it is in.
        position: which of the set's candidates it is.
        images: hashes of the pixels of its images, then of its video files; of a row without any, its question.
        problem: its question, in normal form.
        answer: its right answer as a text, in normal form.
        choices: its options, in normal form; empty for an open question.
        columns: those of `images`, `videos` and `regions` that it needs.
    """

    source: int
    position: int
    images: tuple[str, ...]
    problem: str
    answer: str
    choices: frozenset[str] = frozenset()
    columns: frozenset[str] = frozenset()


def merge(
    sources: Sequence[Source],
    output: Output,
    identity: Mapping[str, Any],
    *,
    test_share: float = 0.1,
    seed: int = 0,
    shuffle_choices: bool = False,
) -> None:
    """Write the rows of `sources` as `train` and `test` to the folder of `output`.

    Args:
        sources: sets in the schema, as `convert` writes them, or JSONL of the user's own.
        output: where and how; its split and columns are not read.
        identity: what the result depends on, as JSON.
        test_share: of the rows, in [0, 1); 0: no split.
        seed: of the split and of the order of options.
        shuffle_choices: whether options are put in another order, right letters coming equally often.

    Raises:
        ConfigError: an option is out of range, or the folder holds something else.
        DataError: a set cannot be read, no row is left, or there is no way to split.
    """
    if not 0 <= test_share < 1:
        raise ConfigError(f"test_share is {test_share}: give a number from 0 (no split) up to below 1.")
    splits = ("train", "test") if test_share else ("train",)
    if None not in [finished(replace(output, split=name), identity) for name in splits]:
        return
    rows, left_out = _examine(sources, output)
    kept, duplicates = without_duplicates(list(rows))
    left_out += [(rows[row], reason) for row, reason in duplicates.items()]
    needed = frozenset[str]().union(*(row.columns for row in kept))
    columns = ("images" if "images" in needed else "image", *sorted(needed - {"images"}, reverse=True))
    for name, side in zip(splits, split(kept, test_share if kept else 0, seed), strict=False):
        candidates = _read_rows(sources, interleaved(side))
        if shuffle_choices:
            candidates = shuffled_choices(candidates, seed)
        listed = left_out if name == "train" else []
        convert(chain(listed, candidates), replace(output, split=name, columns=columns), identity)


def _examine(sources: Sequence[Source], output: Output) -> tuple[dict[Row, Origin], list[Candidate]]:
    """Return what is known of the usable rows, with their origins, and why others cannot be used."""
    rows: dict[Row, Origin] = {}
    left_out: list[Candidate] = []
    for number, source in enumerate(sources):
        bar = tqdm(jsonl_read(source), desc=f"examine {source}", unit=" rows", delay=1)
        for position, (origin, question) in enumerate(encode_candidates(bar, output, with_digest=True)):
            if isinstance(question, str):
                left_out.append((origin, question))
            else:
                rows[_row(number, position, question)] = origin
    return rows, left_out


def _row(source: int, position: int, question: Question) -> Row:
    choices = question.choices or []
    films = [hashlib.sha256(Path(path).read_bytes()).hexdigest() for path in question.videos]
    needs = {"images": len(question.images) != 1, "videos": bool(films), "regions": bool(question.regions)}
    return Row(
        source,
        position,
        (*(image.digest for image in question.images), *films) or (normalise(question.problem),),
        normalise(question.problem),
        normalise(choices[LETTERS.index(question.solution)] if choices else question.solution),
        frozenset(map(normalise, choices)),
        frozenset(name for name, needed in needs.items() if needed),
    )


def _read_rows(sources: Sequence[Source], rows: Sequence[Row]) -> Iterator[Candidate]:
    """Yield the candidates of rows that are in order of position within each source; each source is read once."""
    readers = {number: enumerate(jsonl_read(sources[number])) for number in {row.source for row in rows}}
    for row in rows:
        yield next(candidate for position, candidate in readers[row.source] if position == row.position)


def without_duplicates(rows: Sequence[Row]) -> tuple[list[Row], dict[Row, str]]:
    """Return the rows that show other images or ask something else than those before, and why the others are left out.

    Of rows with the same images and question the first stays, unless two contradict each other: then it is not known
    which is right, and none stays.
    """
    alike: dict[tuple[tuple[str, ...], str], list[Row]] = defaultdict(list)
    for row in rows:
        alike[row.images, row.problem].append(row)
    kept, reasons = [], {}
    for same in alike.values():
        if any(_contradict(one, other) for one, other in combinations(same, 2)):
            reasons.update(dict.fromkeys(same, "another row with the same image and question has another answer"))
            continue
        kept.append(same[0])
        reasons.update(dict.fromkeys(same[1:], "it has the same image and question as an earlier row"))
    return kept, reasons


def _contradict(one: Row, other: Row) -> bool:
    """Whether the rows call different answers right where both could have been chosen."""
    both_open = not one.choices and not other.choices
    return one.answer != other.answer and (both_open or (one.answer in other.choices and other.answer in one.choices))


def split(rows: Sequence[Row], test_share: float, seed: int) -> tuple[list[Row], list[Row]]:
    """Return the rows to train on and those to test on, such that no image is on both sides.

    Rows that share an image stay together, also over several rows. Sides depend on `seed` and on the images alone.

    Args:
        rows: without duplicates.
        test_share: of the rows to test on, from 0 (none) up to below 1; met as nearly as rows that share images allow.

    Raises:
        DataError: there is no way to split the rows.
    """
    if test_share == 0:
        return list(rows), []
    groups = sharing_images(rows)
    if len(groups) == 1:
        raise DataError(f"The {len(rows)} rows cannot be split: all are linked by images they share.")

    def rank(group: list[Row]) -> str:
        image = min(image for row in group for image in row.images)
        return hashlib.sha256(f"{seed}\0split\0{image}".encode()).hexdigest()

    groups.sort(key=rank)
    wanted, test = min(max(1, round(test_share * len(rows))), len(rows) - 1), set[Row]()
    for group in groups:
        if len(test) + len(group) <= wanted:
            test.update(group)
    test = test or set(sorted(groups, key=len)[0])
    return [row for row in rows if row not in test], [row for row in rows if row in test]


def sharing_images(rows: Sequence[Row]) -> list[list[Row]]:
    """Return the rows in groups, such that rows with an image in common are in one group; in order of appearance."""
    leader: dict[str, str] = {}

    def find(image: str) -> str:
        while leader.setdefault(image, image) != image:
            leader[image] = image = leader[leader[image]]
        return image

    for row in rows:
        for image in row.images[1:]:
            leader[find(image)] = find(row.images[0])
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[find(row.images[0])].append(row)
    return list(groups.values())


def interleaved(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with the sources spread evenly from start to end; rows of a source keep their order."""
    counts, seen = Counter(row.source for row in rows), Counter[int]()
    places: dict[Row, Any] = {}
    for row in rows:
        seen[row.source] += 1
        places[row] = ((seen[row.source] - 0.5) / counts[row.source], row.source)
    return sorted(rows, key=places.__getitem__)
