"""The one schema that every data set is converted to, and the reading of doubtful values into it.

A stored row has `id`, `source`, `problem`, `choices` (2 to 10 texts, or none for an open question), `solution` (the
letter of the right option, else a text) and `image`, or `images` where a set has questions about several. Where a set
says what a question is about, `regions` has boxes: left, top, width and height as shares of the image.
"""

import ast
import json
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

from vgr_trl.data.rows.text.prompts import LETTERS
from vgr_trl.errors import DataError, RewardError
from vgr_trl.rewards.answers.solutions import resolve_solution

# What \alpha, \beta, \theta, \vec, \frac and \rho begin with where the text of a list was written without care.
_MISREAD = re.compile(r"[\a\b\t\v\f\r]")
_LABELLED = re.compile(r"(?:\(([A-J])\)|([A-J])\s?[).:])\s*(\S.*)", re.DOTALL)


@dataclass(frozen=True)
class Origin:
    """Where a row was read: the file (or the name on the hub) and the 0-based row in it, for JSONL the 0-based line."""

    file: str
    row: int


@dataclass(frozen=True)
class Question:
    """A row of the schema whose images (and videos) are not read yet."""

    id: str
    source: str
    problem: str
    solution: str
    images: list[Any] = field(default_factory=list)
    choices: list[str] | None = None
    videos: list[Any] = field(default_factory=list)
    regions: list[list[float]] = field(default_factory=list)


Record = tuple[Origin, Mapping[str, Any] | str]
"""A row as it was read, or why it could not be."""
Candidate = tuple[Origin, Question | str]
"""A question, or why a row does not become one."""


def to_candidates(
    records: Iterable[Record], convert: Callable[[Origin, Mapping[str, Any]], Iterable[Question | str]]
) -> Iterator[Candidate]:
    """Yield what `convert` makes of each record, or the reason why it makes nothing."""
    for origin, record in records:
        if isinstance(record, str):
            yield origin, record
            continue
        try:
            for question in convert(origin, record):
                yield origin, question
        except (DataError, RewardError) as error:
            yield origin, str(error).rstrip(".")


def with_images(candidates: Iterable[Candidate]) -> Iterator[tuple[Candidate, Sequence[Any]]]:
    """Yield each candidate with the images of its question, none where it is a reason."""
    for origin, found in candidates:
        yield (origin, found), () if isinstance(found, str) else found.images


def try_question(**fields: Any) -> Question | str:
    """Return `make_question(**fields)`, or why there is none: for rows that hold several questions."""
    try:
        return make_question(**fields)
    except (DataError, RewardError) as error:
        return str(error).rstrip(".")


def make_question(
    *,
    id: Any,
    source: str,
    problem: str,
    answer: Any,
    images: Sequence[Any],
    choices: Sequence[str] | None = None,
    videos: Sequence[Any] = (),
    regions: Sequence[list[float]] = (),
    needs_image: bool = True,
) -> Question:
    """Return a checked question; `answer` is a letter, an index or an option's text with `choices`, else open.

    Raises:
        DataError: a text is empty or is no Unicode, or there is nothing to look at and `needs_image`.
        RewardError: the answer is missing, is none of the choices, or could mean two of them; or two choices are alike.
    """
    if needs_image and not images and not videos:
        raise DataError("it has no image")
    resolved = resolve_solution(answer, choices)
    solution = resolved.text if resolved.index is None else LETTERS[resolved.index]
    if resolved.index is not None:
        resolve_solution(solution, resolved.choices or None)  # in the form that training is going to read
    question = Question(
        id=str(id),
        source=source,
        problem=problem.strip(),
        solution=solution,
        images=list(images),
        choices=[choice.strip() for choice in resolved.choices] or None,
        videos=list(videos),
        regions=list(regions),
    )
    if not question.problem:
        raise DataError("its question is empty")
    texts = (question.id, question.source, question.problem, question.solution)
    for text in (*texts, *(question.choices or ()), *question.videos):
        _require_unicode(text)
    return question


def text_of(row: Mapping[str, Any], *names: str) -> str:
    """Return the text in the first of the columns `names` that the row has.

    Raises:
        DataError: it has none of them, or not a text.
    """
    value = value_of(row, *names)
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"its {_named(names)} is {_shown(value)}: it must be a text")
    return value


def value_of(row: Mapping[str, Any], *names: str) -> Any:
    """Return the value in the first of the columns `names` that the row has one in, else None."""
    return next((row[name] for name in names if row.get(name) is not None), None)


def id_of(row: Mapping[str, Any], origin: Origin, *names: str) -> str:
    """Return the row's id, a text or a whole number, or one made of its place where it has none."""
    value = value_of(row, *names)
    if value is None or value == "":
        return f"{origin.file.replace(chr(92), '/').rsplit('/', 1)[-1]}-{origin.row}"
    if isinstance(value, bool) or not isinstance(value, str | Integral):
        raise DataError(f"its {_named(names)} is {_shown(value)}: it must be a text or a whole number")
    return str(value)


def options_of(value: Any) -> list[str]:
    """Return the texts of a question's options, stored as a list or as the text of a list, numbers among them or not.

    Letters that the options carry themselves (`A) red`, `B) blue`) are taken off if all carry their own.

    Raises:
        DataError: it is no list of 2 to 10 texts and numbers.
    """
    options = list_of(value, "options")
    if not 2 <= len(options) <= len(LETTERS):
        raise DataError(f"it has {len(options)} options: there must be 2 to {len(LETTERS)}")
    return _without_letters([_option_text(option) for option in options])


def answer_of(row: Mapping[str, Any], options: Sequence[str] | None, *names: str) -> Any:
    """Return the stated answer of a row: a letter, an index or a text.

    Raises:
        DataError: it is a number that could be an index as well as another option's text.
    """
    answer = value_of(row, *names)
    if hasattr(answer, "item"):
        answer = answer.item()
    is_number = isinstance(answer, int) and not isinstance(answer, bool)
    if is_number and options and str(answer) in options and str(answer) not in options[answer : answer + 1]:
        raise DataError(
            f"its {_named(names)} is the number {answer}, which is one option's text and could be another's index"
        )
    return answer


def list_of(value: Any, name: str) -> list[Any]:
    """Return a value that is a list, or the text of one in Python's or JSON's notation.

    Raises:
        DataError: it is neither.
    """
    if hasattr(value, "tolist"):
        value = value.tolist()
    found = _parsed(value) if isinstance(value, str) else value
    if not isinstance(found, list | tuple):
        raise DataError(f"its {name} is {_shown(value)}: it must be a list, or the text of one")
    if isinstance(value, str) and any(isinstance(item, str) and _MISREAD.search(item) for item in found):
        raise DataError(f"its {name} is {_shown(value)}: backslashes in it stand for control characters")
    return list(found)


def _parsed(text: str) -> Any:
    for parse in (ast.literal_eval, json.loads):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of backslashes that escape nothing, which stay as they are
                return parse(text.strip())
        except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
            continue
    return None


def _option_text(option: Any) -> str:
    if isinstance(option, bool) or not isinstance(option, str | Real) or option != option:
        raise DataError(f"one of its options is {_shown(option)}: options must be texts or numbers")
    text = str(option).strip()
    if not text:
        raise DataError("one of its options is empty")
    return text


def _without_letters(options: list[str]) -> list[str]:
    found = [_LABELLED.fullmatch(option) for option in options]
    if not all(found):
        return options
    labels = "".join(match[1] or match[2] for match in found if match)
    if not LETTERS.startswith(labels):
        raise DataError(f"its options carry the letters {', '.join(labels)}, which are not those of their places")
    return [match[3] for match in found if match]


def _require_unicode(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(f"its text {text[:40]!a} has characters that are not Unicode") from error


def _named(names: Sequence[str]) -> str:
    return names[0] + (f" (or {' or '.join(names[1:])})" if len(names) > 1 else "")


def _shown(value: Any) -> str:
    text = ascii(value) if isinstance(value, str) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
