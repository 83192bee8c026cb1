"""A-OKVQA (Schwenk et al., 2022): questions about photographs that need knowledge of the world.

Columns: `image`, `question_id`, `question`, `choices`, `correct_choice_idx`, and `direct_answers`,
`difficult_direct_answer`, `rationales`, which are not used. The published test split has no answers.
"""

from collections.abc import Iterator, Mapping
from numbers import Integral
from typing import Any

from vgr_trl.data.read.sources import Source
from vgr_trl.data.rows.questions import (
    Candidate,
    Origin,
    Question,
    id_of,
    make_question,
    options_of,
    text_of,
    to_candidates,
    value_of,
)
from vgr_trl.errors import DataError

HUB_NAME = "HuggingFaceM4/A-OKVQA"


def read(source: Source) -> Iterator[Candidate]:
    """Yield the questions of `source`, or why a row is none."""
    return to_candidates(source.records(), _questions)


def _questions(origin: Origin, row: Mapping[str, Any]) -> list[Question]:
    choices = options_of(row.get("choices"))
    index = row.get("correct_choice_idx")
    if isinstance(index, bool) or not isinstance(index, Integral | str | None):
        raise DataError(f"its correct_choice_idx is {index!r}: it must be a whole number")
    if isinstance(index, str):  # some copies of the set store it so
        index = int(index) if index.strip().isdecimal() else index
    image = value_of(row, "image")
    return [
        make_question(
            id=id_of(row, origin, "question_id"),
            source="A-OKVQA",
            problem=text_of(row, "question"),
            choices=choices,
            answer=index,
            images=[] if image is None else [image],
        )
    ]
