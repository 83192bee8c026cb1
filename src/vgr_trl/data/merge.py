"""Merge sets into one without duplicates, split into train and test that share no image."""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

from datasets import Dataset, Features, List, Value, concatenate_datasets

from vgr_trl.data.convert import DIGESTS, Output, Rules, convert_rows, finished, working_folder, write_split
from vgr_trl.data.images import FOLDER, folder_of, image_bytes, images_of, videos_of
from vgr_trl.data.lengths import SIZES
from vgr_trl.data.prompts import LETTERS, texts_of
from vgr_trl.data.public_sets import shuffle_choices
from vgr_trl.data.read_row import undecoded
from vgr_trl.data.rows import MEDIA, REASON, map_rows
from vgr_trl.rewards.answers import normalise
from vgr_trl.utils import ConfigError, DataError

TEST_SHARE = 0.1


@dataclass(frozen=True)
class Row:
    """Facts about a row.

    Attributes:
        source: which set it is in.
        position: which of all rows it is.
        images: hashes of the pixels of its images, then of its video files; of a row without any, its question.
        problem: its question, in normal form.
        answer: its right answer as a text, in normal form.
        choices: its options, in normal form; empty for an open question.
    """

    source: int
    position: int
    images: tuple[str, ...]
    problem: str
    answer: str
    choices: frozenset[str] = frozenset()


def merge(
    sets: Sequence[tuple[Dataset, Rules]],
    output: Output,
    *,
    test_share: float = 0.1,
    seed: int = 0,
    shuffles_choices: bool = False,
    workers: int = 2,
) -> None:
    """Write the rows of several sets as `train` and `test` to the folder of `output`.

    Args:
        sets: rows in the schema, as `convert` writes them, or of the user's own, and how they are read.
        test_share: of the rows, in [0, 1); 0: no split.
        seed: of the split and of the order of options.
        shuffles_choices: whether options are put in another order, right letters coming equally often.
        workers: processes that decode images.

    Raises:
        ConfigError: an option is out of range, or the folder holds something else.
        DataError: a set cannot be read, no row is left, or there is no way to split.
    """
    if not 0 <= test_share < 1:
        raise ConfigError(f"test_share is {test_share}: give a number from 0 (no split) up to below 1.")
    splits = ("train", "test") if test_share else ("train",)
    if sum(finished(name, output) for name in splits) == len(splits):
        return
    with working_folder(output) as folder:
        parts, known, start = list[Dataset](), list[Row](), 0
        for number, (rows, rules) in enumerate(sets):
            parts.append(convert_rows(rows, rules, folder / str(number), workers))
            known += [
                _row(number, start + place, row) for place, row in enumerate(_texts(parts[-1])) if not row[REASON]
            ]
            start += len(parts[-1])
        everything = concatenate_datasets(parts)
        kept, duplicates = drop_duplicates(known)
        reasons = [duplicates.get(place, reason) for place, reason in enumerate(everything[REASON])]
        feature = everything.features[REASON]
        everything = everything.remove_columns(REASON).add_column(REASON, reasons, feature=feature)
        left_out = [place for place, reason in enumerate(reasons) if reason is not None]
        columns = _columns(everything.select([row.position for row in kept]))
        sides = split(kept, test_share if kept else 0, seed)
        for name, side, listed in zip(splits, sides, (left_out, []), strict=False):
            chosen = everything.select([row.position for row in interleaved(side)])
            chosen = shuffle_choices(chosen, seed) if shuffles_choices else chosen
            write_split(concatenate_datasets([everything.select(listed), chosen]), name, output, columns)


def _columns(rows: Dataset) -> list[str]:
    """Return the columns of media that any of the rows needs."""
    images = "image" if all(len(sizes) == 1 for sizes in rows[SIZES]) else "images"
    return [images, *(name for name in ("videos", "regions") if any(rows[name]))]


def _texts(rows: Dataset) -> Dataset:
    return rows.select_columns(["problem", "solution", "choices", "videos", DIGESTS, REASON])


def _row(source: int, position: int, row: Mapping[str, Any]) -> Row:
    choices, problem = row["choices"] or [], normalise(row["problem"])
    films = [hashlib.sha256(Path(path).read_bytes()).hexdigest() for path in row["videos"]]
    return Row(
        source,
        position,
        (*row[DIGESTS], *films) or (problem,),
        problem,
        normalise(choices[LETTERS.index(row["solution"])] if choices else row["solution"]),
        frozenset(map(normalise, choices)),
    )


def train_test_split(
    dataset: Dataset, seed: int, root: Path = Path(), most: int | None = None
) -> tuple[Dataset, Dataset]:
    """Return the rows to train on, and a tenth to evaluate on; rows that share an image (or a question) stay together.

    Args:
        dataset: as `prepare_rows` gives it.
        seed: of the choice, which depends on nothing else but the images.
        most: rows to evaluate on, where a tenth would be more.

    Raises:
        DataError: all rows share images.
    """
    wanted = ("prompt", *MEDIA, FOLDER)
    stored = undecoded(dataset.with_format(None))
    stored = stored.select_columns([name for name in wanted if name in stored.column_names])
    examine, features = partial(_digests, root=root), Features({DIGESTS: List(Value("string"))})
    found = map_rows(stored, examine, features, str(root), "Comparing images")
    rows = [Row(0, place, tuple(of), "", "") for place, of in enumerate(found[DIGESTS])]
    train, test = split(rows, min(TEST_SHARE, (most or len(rows)) / len(rows)), seed)
    return dataset.select([row.position for row in train]), dataset.select([row.position for row in test[:most]])


def _digests(row: Mapping[str, Any], root: Path) -> dict[str, list[str]]:
    shown = [image_bytes(value, folder_of(row, root)) for value in (*images_of(row), *videos_of(row))]
    content = shown or ["\0".join(texts_of(row["prompt"][-1:])).encode()]
    return {DIGESTS: [hashlib.sha256(data).hexdigest() for data in content]}


def drop_duplicates(rows: Sequence[Row]) -> tuple[list[Row], dict[int, str]]:
    """Return the rows that show other images or ask something else than those before, and why the others are left out.

    Of rows with the same images and question the first stays, unless two contradict each other: then it is not known
    which is right, and none stays.
    """
    alike: dict[tuple[tuple[str, ...], str], list[Row]] = defaultdict(list)
    for row in rows:
        alike[row.images, row.problem].append(row)
    kept, reasons = list[Row](), dict[int, str]()
    for same in alike.values():
        places = [row.position for row in same]
        if any(_contradict(one, other) for one, other in combinations(same, 2)):
            reasons |= dict.fromkeys(places, "another row with the same image and question has another answer")
        else:
            kept.append(same[0])
            reasons |= dict.fromkeys(places[1:], "it has the same image and question as an earlier row")
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
