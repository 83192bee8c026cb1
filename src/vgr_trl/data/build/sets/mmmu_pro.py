"""MMMU-Pro (Yue et al., 2024): questions of college courses with up to seven images.

The standard configurations, with 4 and 10 options, have `id`, `question`, `options` (the text of a list), `answer` (a
letter), `image_1` to `image_7` and `subject`; question and options refer to the images by `<image k>`. The vision-only
configuration has `id`, `image`, `options` and `answer`: question and options are to be read from the image.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from vgr_trl.data.read.sources import Source
from vgr_trl.data.rows.layouts import MOST_IMAGES, VISION_ONLY_PROBLEM, renumber_marks
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
from vgr_trl.data.rows.text.prompts import LETTERS
from vgr_trl.errors import DataError

HUB_NAME = "MMMU/MMMU_Pro"
HUB_CONFIG = "standard (10 options)"


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
