"""easy-VQA (Victor Zhou): templated questions about drawings of one coloured shape, several to an image.

Columns: `image_id`, `image`, and `questions` and `answers`, lists of equal length.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vgr_trl.data.read.sources import Source
from vgr_trl.data.rows.questions import (
    Candidate,
    Origin,
    Question,
    id_of,
    list_of,
    to_candidates,
    try_question,
    value_of,
)
from vgr_trl.errors import DataError


def read(source: Source) -> Iterator[Candidate]:
    """Yield the questions of `source`, or why a row or one of its questions is none."""
    return to_candidates(source.records(), _questions)


def _questions(origin: Origin, row: Mapping[str, Any]) -> Iterator[Question | str]:
    questions, answers = list_of(row.get("questions"), "questions"), list_of(row.get("answers"), "answers")
    if len(questions) != len(answers) or not questions:
        raise DataError(f"it has {len(questions)} questions and {len(answers)} answers: there must be as many of both")
    name, image = id_of(row, origin, "image_id"), value_of(row, "image")
    for number, (problem, answer) in enumerate(zip(questions, answers, strict=True)):
        if not isinstance(problem, str):
            yield f"its question {number} is a {type(problem).__name__}: it must be a text"
            continue
        yield try_question(
            id=f"{Path(origin.file).stem}-{name}-{number}",
            source="easy-VQA",
            problem=problem,
            answer=answer,
            images=[] if image is None else [image],
        )
