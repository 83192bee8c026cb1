"""Rows as public sets and other trainers lay them out, in the columns that the reading knows.

A-OKVQA, ArxivQA and MMMU-Pro as on the hub; `messages` (ms-swift) and `conversations` (LLaVA), whose last message of
the assistant is the answer.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vgr_trl.data.rows.columns import images_of
from vgr_trl.data.rows.questions import answer_of, options_of
from vgr_trl.data.rows.text.prompts import LETTERS
from vgr_trl.errors import DataError
from vgr_trl.rewards import resolve_solution

MOST_IMAGES = 7
NUMBERED_IMAGES = tuple(f"image_{number}" for number in range(1, MOST_IMAGES + 1))
NUMBERED_MARK = re.compile(r"<image\s*(\d+)>", re.IGNORECASE)
VISION_ONLY_PROBLEM = "Answer the multiple-choice question in the image with the letter of the right option."
ROLES = {"system": "system", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant"}


def laid_out(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return `row` as one with `problem` or `question`, `choices`, `solution` and `images`, if it is of a known set.

    Raises:
        DataError, RewardError: it is, but cannot be understood.
    """
    if _is_numbered(row):
        return _numbered(row)
    if is_vision_only(row):
        options = options_of(row["options"])
        right = resolve_solution(answer_of(row, options, "answer"), options)
        return {**row, "problem": VISION_ONLY_PROBLEM, "options": None, "answer": LETTERS[int(right.index or 0)]}
    if isinstance(row.get("label"), str) and all(row.get(name) is None for name in ("solution", "answer")):
        return {**row, "answer": row["label"]} if row.get("options") else row
    return row


def is_vision_only(row: Mapping[str, Any]) -> bool:
    """Return whether `row` is one of MMMU-Pro whose question and options are to be read from the image."""
    asked = ("prompt", "problem", "question", "query", "messages", "conversations")
    has_all = all(row.get(name) is not None for name in ("image", "options", "answer", "subject"))
    return has_all and not any(row.get(name) for name in asked)


def _is_numbered(row: Mapping[str, Any]) -> bool:
    if any(row.get(name) is not None for name in NUMBERED_IMAGES):
        return True
    return any(name in row for name in NUMBERED_IMAGES) and bool(NUMBERED_MARK.search(str(row.get("question"))))


def _numbered(row: Mapping[str, Any]) -> Mapping[str, Any]:
    numbers = [number for number, name in enumerate(NUMBERED_IMAGES, start=1) if row.get(name) is not None]
    images = [row[NUMBERED_IMAGES[number - 1]] for number in numbers] or images_of(row)
    if not isinstance(row.get("question"), str):
        return {**row, "images": images}
    options = [] if row.get("options") is None else options_of(row["options"])
    question, *options = renumber_marks([row["question"], *options], numbers)
    return {**row, "question": question, "options": options or None, "images": images}


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
        for match in NUMBERED_MARK.finditer(text):
            if int(match[1][:4]) not in position:
                raise DataError(f"it refers to {match[0][:40]}, but there is no image_{match[1][:4]}")
    return [NUMBERED_MARK.sub(lambda match: f"<image {position[int(match[1])]}>", text) for text in texts]


@dataclass(frozen=True)
class Dialogue:
    """What a list of messages asks: a text, or a conversation, and what the assistant says to it, if it does."""

    prompt: str | list[dict[str, Any]]
    said: str | None


def dialogue_of(messages: Sequence[Any], name: str) -> Dialogue:
    """Return what messages of `role` and `content`, or of `from` and `value`, ask.

    Raises:
        DataError: they are not such messages, or none of the user is left to be answered.
    """
    turns = [_turn(message, name) for message in messages]
    said = turns.pop()["content"] if turns and turns[-1]["role"] == "assistant" else None
    if not turns or turns[-1]["role"] != "user":
        raise DataError(f"its {name} do not end with a message of the user, with or without its answer")
    is_question = len(turns) == 1 and isinstance(turns[0]["content"], str)
    return Dialogue(turns[0]["content"] if is_question else turns, said if isinstance(said, str) else None)


def _turn(message: Any, name: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise DataError(f"one of its {name} is a {type(message).__name__}: give objects with role and content")
    role = message.get("role") or message.get("from")
    content = message["content"] if message.get("content") is not None else message.get("value")
    if role not in ROLES:
        raise DataError(f"one of its {name} is from {role!r}: known are {', '.join(ROLES)}")
    if not isinstance(content, str | list):
        raise DataError(f"one of its {name} has no content")
    return {"role": ROLES[role], "content": content}
