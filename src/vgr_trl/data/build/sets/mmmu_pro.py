"""MMMU-Pro (Yue et al., 2024): questions of college courses with up to seven images.

The standard configurations, with 4 and 10 options, have `id`, `question`, `options` (the text of a list), `answer` (a
letter), `image_1` to `image_7` and `subject`; question and options refer to the images by `<image k>`. The vision-only
configuration has `id`, `image`, `options` and `answer`: question and options are to be read from the image.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from vgr_trl.data.rows.prompts import LETTERS
from vgr_trl.data.rows.questions import (
    Candidate,
    Origin,
    Question,
    answer_of,
    id_of,
    make_question,
    options_of,
    text_of,
    to_candidates,
)
from vgr_trl.data.read.sources import Source
from vgr_trl.errors import DataError

HUB_NAME = "MMMU/MMMU_Pro"
HUB_CONFIG = "standard (10 options)"
MOST_IMAGES = 7
VISION_ONLY_PROBLEM = "Answer the multiple-choice question in the image with the letter of the right option."
MARK = re.compile(r"<image\s*(\d+)>", re.IGNORECASE)


def read(source: Source) -> Iterator[Candidate]:
    """Yield the questions of `source`, or why a row is none."""
    return to_candidates(source.records(), _questions)


def _questions(origin: Origin, row: Mapping[str, Any]) -> list[Question]:
    is_standard = "question" in row or any(f"image_{number}" in row for number in range(1, MOST_IMAGES + 1))
    return [_standard(origin, row) if is_standard else _vision_only(origin, row)]


def _standard(origin: Origin, row: Mapping[str, Any]) -> Question:
    problem, options = text_of(row, "question"), options_of(row.get("options"))
    numbers = [number for number in range(1, MOST_IMAGES + 1) if row.get(f"image_{number}") is not None]
    problem, *options = renumber_marks([problem, *options], numbers)
    return make_question(
        id=id_of(row, origin, "id"),
        source="MMMU-Pro",
        problem=problem,
        choices=options,
        answer=answer_of(row, options, "answer"),
        images=[row[f"image_{number}"] for number in numbers],
    )


def _vision_only(origin: Origin, row: Mapping[str, Any]) -> Question:
    """The options stay out of the row: in its text they would answer what is to be read, and be open to shuffling."""
    options = options_of(row.get("options"))
    checked = make_question(
        id=id_of(row, origin, "id"),
        source="MMMU-Pro vision",
        problem=VISION_ONLY_PROBLEM,
        choices=options,
        answer=answer_of(row, options, "answer"),
        images=[] if row.get("image") is None else [row["image"]],
    )
    if checked.solution not in LETTERS[: len(options)]:
        raise DataError(f"its answer is {row['answer']!r}: it must be a letter")
    return make_question(
        id=checked.id,
        source=checked.source,
        problem=checked.problem,
        answer=checked.solution,
        images=checked.images,
    )


def renumber_marks(texts: list[str], numbers: list[int]) -> list[str]:
    """Return the texts with `<image k>` standing for the k-th image that there is.

    Args:
        texts: question and options.
        numbers: of the images that there are, ascending; these become 1, 2, …

    Raises:
        DataError: a mark refers to an image that is missing.
    """
    position = {number: index for index, number in enumerate(numbers, start=1)}
    for text in texts:
        for match in MARK.finditer(text):
            if int(match[1][:4]) not in position:
                raise DataError(f"it refers to {match[0][:40]}, but there is no image_{match[1][:4]}")
    return [MARK.sub(lambda match: f"<image {position[int(match[1])]}>", text) for text in texts]
