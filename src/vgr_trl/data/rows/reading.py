"""What a row of the user's own data says: the one reading that `train`, `evaluate`, `inspect` and `convert` share.

A layout of columns that is to be understood everywhere is added here: names in `Keys`, other shapes in `read_row`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vgr_trl.data.read.readers import UNREADABLE
from vgr_trl.data.rows.columns import files_of
from vgr_trl.data.rows.marks import require_marks
from vgr_trl.data.rows.prompts import format_question
from vgr_trl.data.rows.questions import answer_of, options_of, text_of, value_of
from vgr_trl.errors import DataError
from vgr_trl.rewards import resolve_solution

LABEL = "label_idx"  # always an index


@dataclass(frozen=True)
class Keys:
    """Names of the columns; several: the first that a row has."""

    prompt: tuple[str, ...] = ("prompt", "problem", "question")
    answer: tuple[str, ...] = ("solution", "answer", LABEL)
    image: tuple[str, ...] = ("images", "image")
    video: tuple[str, ...] = ("videos", "video")
    choices: tuple[str, ...] = ("choices", "options")


KEYS = Keys()


@dataclass(frozen=True)
class Reading:
    """A row as it is understood; images and videos are not opened yet.

    Attributes:
        prompt: the question, or a conversation; `<image>` in it marks the place of an image.
        choices: the options, None for an open question.
        answer: letter, index or text as stated; None where none is needed.
        images, videos: paths, bytes, or dicts with `bytes` or `path`.
    """

    prompt: str | list[dict[str, Any]]
    choices: list[str] | None
    answer: Any
    images: list[Any]
    videos: list[Any]


def read_row(row: Mapping[str, Any], keys: Keys = KEYS, *, needs_answer: bool = True) -> Reading:
    """Return what `row` says.

    Args:
        row: with undecoded or decoded images.
        keys: names of its columns.
        needs_answer: whether it must say what is right.

    Raises:
        DataError, RewardError: it cannot be understood; the message is the reason.
    """
    prompt, choices = read_text(row, keys)
    answer = None
    if needs_answer:
        answer = _answer(row, choices, keys)
        resolve_solution(answer, choices)
    images, videos = files_of(row, *keys.image), files_of(row, *keys.video)
    shown: Any = format_question(prompt, choices) if isinstance(prompt, str) else prompt
    require_marks(shown, len(images), bool(videos))
    return Reading(prompt, choices, answer, images, videos)


def read_text(row: Mapping[str, Any], keys: Keys = KEYS) -> tuple[str | list[dict[str, Any]], list[str] | None]:
    """Return the question (or a conversation) and the options of a row.

    Raises:
        DataError: there are none, or they cannot be understood.
    """
    if row.get(UNREADABLE) is not None:
        raise DataError(row[UNREADABLE])
    prompt = _prompt(row, keys)
    stated = value_of(row, *keys.choices)
    return prompt, None if stated is None or stated == [] else options_of(stated)


def _prompt(row: Mapping[str, Any], keys: Keys) -> str | list[dict[str, Any]]:
    name = next((name for name in keys.prompt if _is_given(row.get(name))), None)
    if name is None or isinstance(row[name], str):
        return text_of(row, *(keys.prompt if name is None else [name]))
    return checked_conversation(row[name])


def _is_given(value: Any) -> bool:
    return value is not None and value != [] and value != ""


def checked_conversation(prompt: Any) -> list[dict[str, Any]]:
    """Return `prompt`, a list of messages of which the last is there to be answered.

    Raises:
        DataError: it is something else.
    """
    if not isinstance(prompt, list) or not all(isinstance(message, dict) for message in prompt):
        raise DataError(f"its prompt is a {type(prompt).__name__}: give a text or a conversation (a list of messages)")
    for message in prompt:
        if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str | list):
            raise DataError("a message of its prompt lacks a role or a content")
    if prompt[-1]["role"] == "assistant":
        raise DataError("its prompt ends with a message of the assistant, so there is nothing to answer")
    return prompt


def _answer(row: Mapping[str, Any], choices: Sequence[str] | None, keys: Keys) -> Any:
    answer = answer_of(row, choices, *[name for name in keys.answer if name != LABEL])
    if answer is not None or LABEL not in keys.answer or row.get(LABEL) is None:
        return answer
    return row[LABEL] if choices is not None else resolve_solution(None, None, row[LABEL]).text
