"""Which rows of several sets go into one, and on which side of its split: functions on what is known of the rows."""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from vgr_trl.errors import DataError


@dataclass(frozen=True)
class Row:
    """What is known of a row.

    Attributes:
        source: which set it is in.
        position: which of the set's candidates it is.
        images: hashes of the pixels of its images, then of its video files.
        problem: its question, in normal form.
        answer: its right answer as a text, in normal form.
        choices: its options, in normal form; empty for an open question.
        image_count: how many of `images` are images.
        video_count: how many are videos.
        has_regions: whether it says in boxes what it is about.
    """

    source: int
    position: int
    images: tuple[str, ...]
    problem: str
    answer: str
    choices: frozenset[str] = frozenset()
    image_count: int = 1
    video_count: int = 0
    has_regions: bool = False


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
        if any(_contradict(one, other) for index, one in enumerate(same) for other in same[:index]):
            reasons.update(dict.fromkeys(same, "another row with the same image and question has another answer"))
            continue
        kept.append(same[0])
        reasons.update(dict.fromkeys(same[1:], "it has the same image and question as an earlier row"))
    return sorted(kept, key=lambda row: (row.source, row.position)), reasons


def weighted(rows: Sequence[Row], weights: Sequence[float] | None, seed: int) -> list[Row]:
    """Return the largest choice of `rows` in which the sources are to each other as `weights`; None: all rows.

    Which rows of a source stay depends on `seed` and on their content, not on their order.

    Args:
        rows: without duplicates.
        weights: above 0, one for each source.

    Raises:
        DataError: a source has no rows.
    """
    if weights is None:
        return list(rows)
    by_source: dict[int, list[Row]] = {number: [] for number in range(len(weights))}
    for row in rows:
        by_source[row.source].append(row)
    if empty := [number for number, found in by_source.items() if not found]:
        raise DataError(f"Source {empty[0] + 1} has no row that can be used, so no weight can be given to it.")
    scale = min(len(found) / weight for found, weight in zip(by_source.values(), weights, strict=True))
    kept: list[Row] = []
    for found, weight in zip(by_source.values(), weights, strict=True):
        count = max(1, int(scale * weight + 1e-9))
        kept += sorted(found, key=lambda row: _rank(seed, "weight", *row.images, row.problem))[:count]
    return sorted(kept, key=lambda row: (row.source, row.position))


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
    groups = sorted(sharing_images(rows), key=lambda group: _rank(seed, "split", min(_images(group))))
    wanted, test = min(max(1, round(test_share * len(rows))), len(rows) - 1), set[Row]()
    for group in groups:
        if len(test) + len(group) <= wanted:
            test.update(group)
    if not test:
        smallest = min(groups, key=len)
        test.update(smallest)
    if len(test) == len(rows):
        raise DataError(
            f"The {len(rows)} rows cannot be split, for all are linked by images they share: give test_share 0."
        )
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
    counts = Counter(row.source for row in rows)
    met: Counter[int] = Counter()
    places = {}
    for row in rows:
        met[row.source] += 1
        places[row] = ((met[row.source] - 0.5) / counts[row.source], row.source)
    return sorted(rows, key=places.__getitem__)


def _contradict(one: Row, other: Row) -> bool:
    """Whether the rows call different answers right where both could have been chosen."""
    if one.answer == other.answer:
        return False
    if not one.choices and not other.choices:
        return True
    return one.answer in other.choices and other.answer in one.choices


def _images(group: Sequence[Row]) -> list[str]:
    return [image for row in group for image in row.images]


def _rank(seed: int, *texts: str) -> str:
    return hashlib.sha256("\0".join([str(seed), *texts]).encode()).hexdigest()
