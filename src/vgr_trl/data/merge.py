"""Merge sets without duplicates, and split them into train and test sets that share no image."""

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from random import Random
from typing import Any

from datasets import Dataset, Features, List, Value

from vgr_trl.data.checked_rows import REASON
from vgr_trl.data.convert import DIGESTS
from vgr_trl.data.images import FOLDER, MEDIA, folder_of, image_bytes, images_of, videos_of
from vgr_trl.data.map_rows import map_rows
from vgr_trl.data.prompts import texts_of
from vgr_trl.data.read_row import undecoded
from vgr_trl.errors import ConfigError, DataError
from vgr_trl.rewards.answers import LETTERS
from vgr_trl.rewards.language import normalise

TEST_SHARE = 0.1
DUPLICATE = "it has the same image and question as an earlier row"
CONTRADICTION = "another row with the same image and question has another answer"


def merge(rows: Dataset, test_share: float, seed: int) -> tuple[Dataset, dict[str, list[int]]]:
    """Return converted rows, duplicates with a `REASON`, and the shuffled numbers of the rows of `train` and `test`.

    The first of several rows with the same images and question stays. If two of them contradict each other, none stays,
    as the right answer is unknown.

    Args:
        rows: converted rows with `DIGESTS`.
        test_share: share of rows in `test`, in [0, 1); 0: no split.
        seed: of the split and the order.

    Raises:
        ConfigError: `test_share` is out of range.
        DataError: there is no way to split the rows.
    """
    if not 0 <= test_share < 1:
        raise ConfigError(f"test_share is {test_share}: give a number in [0, 1); 0: no split.")
    reasons, images = list(rows[REASON]), dict[int, list[str]]()
    alike = defaultdict[Any, list[tuple[int, str, list[str]]]](list)  # number, right answer and options
    for number, row in enumerate(rows.select_columns(["problem", "solution", "choices", DIGESTS])):
        if reasons[number] is None:
            choices, problem = [normalise(choice) for choice in row["choices"] or ()], normalise(row["problem"])
            right = choices[LETTERS.index(row["solution"])] if choices else normalise(row["solution"])
            images[number] = row[DIGESTS] or [problem]
            alike[(*images[number], problem)].append((number, right, choices))
    for same in alike.values():
        contradicts = any(
            answer != other and ((answer in others and other in choices) or (not choices and not others))
            for (_, answer, choices), (_, other, others) in combinations(same, 2)  # both could have been chosen
        )
        for number, *_ in same if contradicts else same[1:]:
            reasons[number] = CONTRADICTION if contradicts else DUPLICATE
            del images[number]
    numbers, sides = list(images), dict[str, list[int]]()
    split = split_by_image(list(images.values()), test_share if images else 0, seed)
    for name, side in zip(("train", "test"), split, strict=True):
        sides[name] = Random(seed).sample([numbers[place] for place in side], len(side))
    rows = rows.remove_columns(REASON).add_column(REASON, reasons, feature=rows.features[REASON])
    return rows, sides


def train_test_split(
    dataset: Dataset, seed: int, root: Path = Path(), most: int | None = None
) -> tuple[Dataset, Dataset]:
    """Split prepared rows into training rows and a tenth for evaluation that share no image.

    Args:
        dataset: as `prepare_rows` gives it; rows without an image are compared by their question.
        seed: of the choice, which depends on nothing else but the images.
        root: folder that relative paths start from.
        most: largest number of rows for evaluation; None: no limit.

    Raises:
        DataError: all rows share images.
    """
    stored = undecoded(dataset.with_format(None))
    stored = stored.select_columns([name for name in ("prompt", *MEDIA, FOLDER) if name in stored.column_names])
    features = Features({DIGESTS: List(Value("string"))})

    def examine(row: Mapping[str, Any]) -> dict[str, list[str]]:
        shown = [image_bytes(value, folder_of(row, root)) for value in (*images_of(row), *videos_of(row))]
        content = shown or ["\0".join(texts_of(row["prompt"][-1:])).encode()]
        return {DIGESTS: [hashlib.sha256(data).hexdigest() for data in content]}

    found = list(map_rows(stored, examine, features, None, "Comparing images", root=root)[DIGESTS])
    train, test = split_by_image(found, min(TEST_SHARE, (most or len(found)) / len(found)), seed)
    return dataset.select(train), dataset.select(test[:most])


def split_by_image(images: Sequence[Sequence[str]], test_share: float, seed: int) -> tuple[list[int], list[int]]:
    """Return the numbers of the rows to train on and to test on, with no image on both sides.

    Rows that share an image, also through other rows, stay together.

    Args:
        images: per row the names of its images.
        test_share: share of rows to test on, in [0, 1), which is met as closely as possible.
        seed: of the choice, which depends on nothing else but the images.

    Raises:
        DataError: shared images link all rows.
    """
    if test_share == 0:
        return list(range(len(images))), []
    leader: dict[str, str] = {}

    def find(image: str) -> str:
        while leader.setdefault(image, image) != image:
            leader[image] = image = leader[leader[image]]
        return image

    for first, *others in images:
        for image in others:
            leader[find(image)] = find(first)
    groups = defaultdict[str, list[int]](list)
    for row, of in enumerate(images):
        groups[find(of[0])].append(row)
    if len(groups) < 2:
        raise DataError(f"The {len(images)} rows cannot be split: shared images link all of them.")

    def rank(group: list[int]) -> str:
        image = min(image for row in group for image in images[row])
        return hashlib.sha256(f"{seed}\0split\0{image}".encode()).hexdigest()  # another hash would change all splits

    ranked, test = sorted(groups.values(), key=rank), set[int]()
    wanted = min(max(1, round(test_share * len(images))), len(images) - 1)
    for group in ranked:
        if len(test) + len(group) <= wanted:
            test.update(group)
    test = test or {*min(ranked, key=lambda group: len(group))}
    return [row for row in range(len(images)) if row not in test], sorted(test)
