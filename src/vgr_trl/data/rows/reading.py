"""What a row of the user's own data says: the one reading that `train`, `evaluate`, `inspect` and `convert` share.

Names of columns are in `Keys`; what other sets and trainers write is in `layouts.py`, and becomes understood everywhere
by being added there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from vgr_trl.data.rows.columns import UNREADABLE, files_of
from vgr_trl.data.rows.layouts import NUMBERED_IMAGES, dialogue_of, laid_out
from vgr_trl.data.rows.questions import answer_of, options_of, text_of, value_of
from vgr_trl.data.rows.text.marks import refuse_named_files, require_marks
from vgr_trl.data.rows.text.prompts import LETTERS, format_question
from vgr_trl.errors import DataError
from vgr_trl.rewards import resolve_solution

LABEL = "label_idx"
INDICES = (LABEL, "correct_choice_idx")  # always an index


@dataclass(frozen=True)
class Keys:
    """Names of the columns; several: the first that a row has."""

    prompt: tuple[str, ...] = ("prompt", "problem", "question", "query", "messages", "conversations")
    answer: tuple[str, ...] = ("solution", "answer", *INDICES)
    image: tuple[str, ...] = ("images", "image")
    video: tuple[str, ...] = ("videos", "video")
    choices: tuple[str, ...] = ("choices", "options")


KEYS = Keys()
DIALOGUES = ("messages", "conversations")


@dataclass(frozen=True)
class Text:
    """What a row says without its images.

    Attributes:
        prompt: the question, or a conversation; `<image>` in it marks the place of an image.
        choices: the options, None for an open question.
        answer: letter, index or text as stated; None where nothing is.
        is_whole: whether the prompt is a conversation that has, or wants, no system prompt of ours.
    """

    prompt: str | list[dict[str, Any]]
    choices: list[str] | None
    answer: Any
    is_whole: bool = False


@dataclass(frozen=True)
class Reading(Text):
    """A row as it is understood; `images` and `videos` (paths, bytes, or dicts with these) are not opened yet."""

    images: list[Any] = field(default_factory=list)
    videos: list[Any] = field(default_factory=list)


def read_row(row: Mapping[str, Any], *, needs_answer: bool = True) -> Reading:
    """Return what `row` says.

    Args:
        row: with undecoded or decoded images, its columns under names of `KEYS`, or as a known set lays them out.

    Raises:
        DataError, RewardError: it cannot be understood; the message is the reason.
    """
    row = _laid_out(row)
    text = _text_of(row)
    if needs_answer:
        text = replace(text, answer=_checked_answer(row, text))
        resolve_solution(text.answer, text.choices)
    images, videos = images_in(row), files_of(row, *KEYS.video)
    shown: Any = format_question(text.prompt, text.choices) if isinstance(text.prompt, str) else text.prompt
    require_marks(shown, len(images), bool(videos))
    return Reading(**vars(text), images=images, videos=videos)


def read_text(row: Mapping[str, Any]) -> Text:
    """Return what a row says without its images; the answer is not checked.

    Raises:
        DataError: there is no question, or it cannot be understood.
    """
    return _text_of(_laid_out(row))


def _laid_out(row: Mapping[str, Any]) -> Mapping[str, Any]:
    if row.get(UNREADABLE) is not None:
        raise DataError(row[UNREADABLE])
    return laid_out(row)


def _text_of(row: Mapping[str, Any]) -> Text:
    name = next((name for name in KEYS.prompt if _is_given(row.get(name))), None)
    prompt: Any = None if name is None else row[name]
    said, is_whole = None, False
    if name is None or isinstance(prompt, str):
        prompt = text_of(row, *(KEYS.prompt[:3] if name is None else [name]))
    elif name == "prompt" or not isinstance(prompt, list):
        prompt, is_whole = checked_conversation(prompt), True
    else:
        dialogue = dialogue_of(prompt, name)
        prompt, said = dialogue.prompt, dialogue.said
        is_whole = not isinstance(prompt, str) and prompt[0]["role"] == "system"
    if not isinstance(prompt, str):
        refuse_named_files(prompt)
    stated = value_of(row, *KEYS.choices)
    choices = None if stated is None or stated == [] else options_of(stated)
    answer = _stated_answer(row, choices)
    return Text(prompt, choices, said if answer is None else answer, is_whole)


def images_in(row: Mapping[str, Any]) -> list[Any]:
    """Return the images of a row, undecoded or decoded, in their order."""
    numbered = [row[name] for name in NUMBERED_IMAGES if row.get(name) is not None]
    return numbered or files_of(row, *KEYS.image)


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


def _stated_answer(row: Mapping[str, Any], choices: Sequence[str] | None) -> Any:
    answer = value_of(row, *[name for name in KEYS.answer if name not in INDICES])
    if answer is not None:
        return answer
    index = _number(value_of(row, *INDICES))
    return index if choices is not None or index not in range(len(LETTERS)) else LETTERS[int(index)]


def _number(index: Any) -> Any:
    """An index, also where it is a text, as CSV files and some copies of A-OKVQA have it."""
    return int(index) if isinstance(index, str) and index.strip().isdecimal() else index


def _checked_answer(row: Mapping[str, Any], text: Text) -> Any:
    """The answer, unless it is a number that could be an index as well as an option's text."""
    names = [name for name in KEYS.answer if name not in INDICES]
    if value_of(row, *names) is not None:
        return answer_of(row, text.choices, *names)
    index = value_of(row, *INDICES)
    return text.answer if text.choices or index is None else resolve_solution(None, None, _number(index)).text
