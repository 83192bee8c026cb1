"""Read the question and the answer of a row from columns of many names, formats and types.

`train`, `evaluate`, `inspect`, `convert` and `merge` share `read_row`.
"""

import ast
import json
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from numbers import Real
from typing import Any

from datasets import Image, Json, List, Video

from vgr_trl.data.images import (
    BASE64_IMAGE,
    FOLDER,
    IMAGE_COLUMNS,
    MEDIA,
    NUMBERED_IMAGES,
    PLACE,
    image_size,
    images_of,
    refuse_named_files,
    videos_of,
)
from vgr_trl.data.prompts import PromptTemplate, build_prompt, drop_video_placeholders, require_placeholders, to_parts
from vgr_trl.errors import ConfigError, DataError, RewardError
from vgr_trl.rewards.answers import LETTERS, Solution, resolve_solution, to_python

DIALOGUES = ("messages", "conversations")
REWARD_MODEL = "reward_model"  # column of verl, with the answer as `ground_truth`
INDICES = ("label_idx", "correct_choice_idx")  # always an index
UNREADABLE = "__unreadable__"  # column: why there is no row at this place of a file
VISION_ONLY_PROBLEM = "Answer the multiple-choice question in the image with the letter of the right option."
ROLES = {"system": "system", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant"}
RESERVED = {"", PLACE, "completions", "prompts"}  # names that TRL or this library give to columns of their own
NONE = "none"  # the name of no column: the data have none

_NUMBERED = re.compile(r"<image\s*(\d+)>", re.IGNORECASE)
_NUMBERED_COLUMN = re.compile(r"image_?\d+")
_IMAGE_FILE = re.compile(r"[^\s]+\.(?:png|jpe?g|webp|bmp|gif|tiff?)", re.IGNORECASE)
# What \alpha, \beta, \theta, \vec, \frac and \rho begin with where the text of a list was written without care.
_MISREAD = re.compile(r"[\a\b\t\v\f\r]")
_LABELLED = re.compile(r"(?:\(([A-J])\)|([A-J])\s?[).:])\s*(\S.*)", re.DOTALL)

_OPTION_COLUMN = re.compile(r"([A-J])|(?:option|choice)_?([A-Ja-j])")  # A, option_a, optionA, choice_a, …


Keys = dict[str, tuple[str, ...]]
# Our name of a column → the names that it may have; the first that a row has counts.
KEYS: Keys = {
    "problem": ("prompt", "problem", "question", "query", *DIALOGUES),
    "solution": ("solution", "answer", "answers", *INDICES, f"{REWARD_MODEL}.ground_truth"),
    "image": ("images", "image"),
    "video": ("videos", "video"),
    "choices": ("choices", "options"),
}
FLAGS = [f"{name}_key" for name in KEYS]


@dataclass(frozen=True)
class Question:
    """The question of a row.

    Attributes:
        prompt: the question, or a conversation; `<image>` in it is the placeholder of an image.
        choices: the options, None for an open question.
        answer: letter, index or text as stated, or a list of accepted ones; None where nothing is.
        right: the resolved answer; None where the row needs no answer.
        is_complete: whether the prompt is a conversation to which no system prompt is added.
        images, videos: paths, bytes, or dicts with these, not opened.
        source: where the question comes from, for templates.
    """

    prompt: str | list[dict[str, Any]]
    choices: list[str] | None
    answer: Any
    right: Solution | None
    is_complete: bool
    images: list[Any]
    videos: list[Any]
    source: str | None

    def conversation(self, system: str | PromptTemplate | None) -> Any:
        """Return the prompt as a conversation without `<video>`, and put a system prompt or template before a text."""
        prompt: Any = self.prompt
        if not self.is_complete or (isinstance(system, PromptTemplate) and system.role == "user"):
            prompt = build_prompt(prompt, self.choices, system_prompt=system, source=self.source)
        return drop_video_placeholders(prompt) if self.videos else prompt


def reason_of(error: DataError | RewardError) -> str:
    """Return the message of an error, without its full stop, as the reason of a row that cannot be used."""
    return str(error).rstrip(".")


def read_row(row: Mapping[str, Any], *, needs_answer: bool = True) -> Question:
    """Return the question that a row asks, without opening a file.

    Args:
        row: columns with names of `KEYS`, or in a known format.
        needs_answer: whether the row must have an answer.

    Raises:
        DataError: the row asks no question; the message is the reason.
    """
    if row.get(UNREADABLE) is not None:
        raise DataError(str(row[UNREADABLE]))
    try:
        stated = value_of(row, *KEYS["choices"])
        row = _rename_known_formats(drop_empty_choices(row))
        prompt, replied, is_complete = _read_prompt(row)
        choices, answer = value_of(row, *KEYS["choices"]), value_of(row, *KEYS["solution"])
        if needs_answer or not is_complete:  # else they are the user's own, also empty, for rewards of their own
            choices = None if choices is None else options_of(choices)
            answer = _answer_of(row, choices)
        elif choices is None:
            choices = stated
        answer = replied if answer is None else answer
        right = resolve_solution(answer, choices) if needs_answer else None
        images, videos = images_of(row), videos_of(row)
        require_placeholders(build_prompt(prompt, choices, system_prompt=None), len(images), bool(videos))
        source = row.get("source") if isinstance(row.get("source"), str) else None
        return Question(prompt, choices, answer, right, is_complete, images, videos, source)
    except RewardError as error:
        raise DataError(str(error)) from error


def drop_empty_choices(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row without its columns of options that are `[]` or its text, as MMMU's open questions have them."""
    return {name: value for name, value in row.items() if name not in KEYS["choices"] or str(value) != "[]"}


def _rename_known_formats(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a row of MMMU-Pro, ArxivQA or MMBench with the columns `question`, `options`, `answer` and `images`."""
    columns = [match for name in row if (match := _OPTION_COLUMN.fullmatch(name)) and _is_option(row[name])]
    by_letter = {(match[1] or match[2]).upper(): str(row[match[0]]) for match in columns}
    if value_of(row, *KEYS["choices"]) is None and {"A", "B"} <= by_letter.keys():
        options = [by_letter[letter] for letter in sorted(by_letter)]
        row = {name: value for name, value in row.items() if not _OPTION_COLUMN.fullmatch(name)} | {"options": options}
    numbers = [number for number, name in enumerate(NUMBERED_IMAGES, start=1) if row.get(name) is not None]
    question = row.get("question")
    if isinstance(question, str) and (numbers or (NUMBERED_IMAGES[0] in row and _NUMBERED.search(question))):
        options = [] if row.get("options") is None else options_of(row["options"])
        question, *options = renumber_placeholders([question, *options], numbers)
        return {**row, "question": question, "options": options or None, "images": images_of(row)}
    if is_vision_only(row):
        options = options_of(row["options"])
        right = resolve_solution(_answer_of(row, options), options)
        return {**row, "problem": VISION_ONLY_PROBLEM, "options": None, "answer": LETTERS[int(right.index or 0)]}
    if isinstance(row.get("label"), str) and row.get("options") and value_of(row, "solution", "answer") is None:
        return {**row, "answer": row["label"]}
    return row


def _is_option(value: Any) -> bool:
    """Whether a value is the text of an option, or a number: MMBench has NaN where there is none."""
    is_value = isinstance(value, str | Real) and not isinstance(value, bool)
    return is_value and value == value and str(value).strip() != ""


def is_vision_only(row: Mapping[str, Any]) -> bool:
    """Return whether the question and options of a row of MMMU-Pro are in its image."""
    has_all = all(row.get(name) is not None for name in ("image", "options", "answer", "subject"))
    return has_all and not any(row.get(name) for name in KEYS["problem"])


def renumber_placeholders(texts: list[str], numbers: list[int]) -> list[str]:
    """Renumber image placeholders from the `numbers` of existing images to 1, 2, …, or raise `DataError`."""

    def renumbered(match: re.Match[str]) -> str:
        number = int(match[1][:9])
        if number not in numbers:
            raise DataError(f"it refers to {match[0]:.40}, but there is no image_{number}")
        return f"<image {numbers.index(number) + 1}>"

    return [_NUMBERED.sub(renumbered, text) for text in texts]


def _read_prompt(row: Mapping[str, Any]) -> tuple[Any, str | None, bool]:
    """Return the question or conversation, the assistant's reply if given, and whether to add no system prompt."""
    name = next((name for name in KEYS["problem"] if row.get(name) not in (None, [], "")), None)
    prompt: Any = None if name is None else row[name]
    if name is None or isinstance(prompt, str):
        return text_of(row, *(KEYS["problem"][:3] if name is None else [name])), None, False
    if not isinstance(prompt, list):
        raise DataError(f"its prompt is a {type(prompt).__name__}: give a text or a conversation (a list of messages)")
    turns = prompt if name == "prompt" else [_turn(message, name) for message in prompt]
    for turn in turns:
        if not isinstance(turn, dict) or not isinstance(turn.get("role"), str) or not _is_content(turn.get("content")):
            raise DataError("a message of its prompt lacks a role or a content")
    replied = turns.pop()["content"] if name != "prompt" and turns[-1]["role"] == "assistant" else None
    last = turns[-1]["role"] if turns else "assistant"
    if last == "assistant" or (name != "prompt" and last != "user"):
        raise DataError(f"its {name} does not end with a user message: add one for the assistant to answer")
    refuse_named_files(turns)
    if any(part.get("image") is not None for turn in turns for part in to_parts(turn["content"])):
        raise DataError("a part of its prompt holds an image: give images in the column `images`")
    if name == "prompt":
        return turns, None, True
    is_question = len(turns) == 1 and isinstance(turns[0]["content"], str)
    question = turns[0]["content"] if is_question else turns
    parts = [] if replied is None else to_parts(replied)
    is_text = parts and all(part.get("type") == "text" for part in parts)
    return question, "".join(part["text"] for part in parts) if is_text else None, turns[0]["role"] == "system"


def _is_content(value: Any) -> bool:
    """Whether a value is a text, or a list of parts in which every part of type text has a text."""
    parts = value if isinstance(value, list) else [{"type": "text", "text": value}]
    are_parts = all(isinstance(part, Mapping) for part in parts)
    return are_parts and all(part.get("type") != "text" or isinstance(part.get("text"), str) for part in parts)


def _turn(message: Any, name: str) -> dict[str, Any]:
    turn = message if isinstance(message, Mapping) else {}
    role, content = value_of(turn, "role", "from"), value_of(turn, "content", "value")
    if role not in ROLES or not isinstance(content, str | list):
        raise DataError(f"one of its {name} is {message!r:.80}: give a role ({', '.join(ROLES)}) and a content")
    return {"role": ROLES[role], "content": content}


def text_of(row: Mapping[str, Any], *names: str) -> str:
    """Return the text in the first of the columns `names` that has a value, or raise `DataError`."""
    value = value_of(row, *names)
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"its {' or '.join(names)} is {value!r:.80}: it must be a text")
    return value


def value_of(row: Mapping[str, Any], *names: str) -> Any:
    """Return the first value that is not None in the columns `names`, or None."""
    return next((row[name] for name in names if row.get(name) is not None), None)


def options_of(value: Any) -> list[str]:
    """Return the texts of 2 to 10 options, given as a list, a mapping from letters, the text of either, or lines.

    Letters that the options carry themselves (`A) red`, `B) blue`) are taken off if all carry their own.
    """
    lines = value.strip().splitlines() if isinstance(value, str) else []
    are_lines = len(lines) > 1 and all(_LABELLED.fullmatch(line.strip()) for line in lines)
    options = lines if are_lines else list_of(value, "options")
    if not 2 <= len(options) <= len(LETTERS):
        raise DataError(f"it has {len(options)} options: there must be 2 to {len(LETTERS)}")
    if not all(map(_is_option, options)):
        raise DataError(f"its options are {options!r:.80}: they must be texts or numbers")
    texts = [str(option).strip() for option in options]
    labelled = [match for match in map(_LABELLED.fullmatch, texts) if match]
    if len(labelled) < len(texts):
        return texts
    labels = "".join(match[1] or match[2] for match in labelled)
    if not LETTERS.startswith(labels):
        raise DataError(f"its options carry the letters {', '.join(labels)} instead of A, B, C, …")
    return [match[3] for match in labelled]


def _answer_of(row: Mapping[str, Any], options: Sequence[str] | None) -> Any:
    """Return the stated answer of a row: a letter, an index or a text, or a list of answers that all count."""
    name = next((name for name in KEYS["solution"] if row.get(name) is not None), "")
    answer = to_python(row.get(name))
    if name in INDICES:
        answer = int(answer) if isinstance(answer, str) and answer.strip().isdecimal() else answer
        return answer if options else resolve_solution(None, None, answer).text
    if isinstance(answer, list):  # VQA has a mapping for each annotator
        return [item.get("answer") if isinstance(item, Mapping) else item for item in answer]
    is_number = isinstance(answer, int) and not isinstance(answer, bool)
    if is_number and options and str(answer) in options and str(answer) not in options[answer : answer + 1]:
        raise DataError(f"its {name} is the number {answer}, which could be an option's text or an index")
    return answer


def list_of(value: Any, name: str) -> list[Any]:
    """Return a list, also from its text in Python's or JSON's notation, or raise `DataError` for another value."""
    items = to_python(value)
    for parse in (ast.literal_eval, json.loads) if isinstance(value, str) else ():
        try:
            with warnings.catch_warnings(action="ignore"):  # backslashes that escape nothing stay as they are
                items = parse(value.strip())
                break
        except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
            continue
    if isinstance(items, Mapping):
        texts, labels = items.get("text"), items.get("label")  # ARC's lists
        if isinstance(texts, list) and isinstance(labels, list) and len(texts) == len(labels):
            items = [{"label": label, "text": text} for label, text in zip(labels, texts, strict=True)]
        else:
            items = [items[letter] for letter in sorted(items) if items[letter] is not None]
    if isinstance(items, list) and items and all(isinstance(item, Mapping) and "text" in item for item in items):
        items = _join_labels(items)
    if not isinstance(items, list | tuple):
        raise DataError(f"its {name} is {value!r:.80}: it must be a list, or the text of one")
    if isinstance(value, str) and any(isinstance(item, str) and _MISREAD.search(item) for item in items):
        raise DataError(f"its {name} is {value!r:.80}: its backslashes became control characters")
    return list(items)


def _join_labels(options: list[Mapping[str, Any]]) -> list[str]:
    """Return options like `{"label": "A", "text": "red"}` as `A. red`, or raise `DataError` for another label."""
    labels = [str(value_of(option, "label", "key", "id", "letter") or "").strip().upper() for option in options]
    if any(labels) and not all(len(label) == 1 and label in LETTERS for label in labels):
        raise DataError(f"its options carry the labels {', '.join(labels)}: give letters from {LETTERS[0]} on")
    texts = zip(labels, (option["text"] for option in options), strict=True)
    return [f"{label}. {text}" if label else text for label, text in texts]


# Columns


def column_names(dataset: Any) -> Sequence[str] | None:
    """Return the columns of a data set, or None if it does not list them: a stream, or a data set of PyTorch."""
    return getattr(dataset, "column_names", None)


def image_columns(dataset: Any) -> list[str]:
    """Return the columns from which TRL takes images; a stream without known columns is asked for its first row."""
    names: Any = column_names(dataset) or next(iter(dataset), {})
    return [name for name in IMAGE_COLUMNS if name in names]


def image_column(features: Mapping[str, Any] | None, keys: Keys) -> str:
    """Return the column for decoded images: `image` if every row has at most one image, else `images`.

    TRL looks at the first row of a batch only.
    """
    names = known_names(features or (), keys)
    columns = [column for column, name in names.items() if name in MEDIA]
    is_one = [names[column] for column in columns] == ["image"]
    return "image" if is_one and features and not isinstance(features[columns[0]], List | Json) else "images"


def undecoded(dataset: Any) -> Any:
    """Return a data set or stream whose images and videos come as bytes or paths."""
    for name, feature in (dataset.features or {}).items():
        if is_media(feature):
            several = isinstance(feature, List)
            kind = type(feature.feature if several else feature)(decode=False)
            dataset = dataset.cast_column(name, List(kind) if several else kind)
    return dataset


def is_media(feature: Any) -> bool:
    """Return whether a column holds images or videos, or lists of them."""
    return isinstance(feature.feature if isinstance(feature, List) else feature, Image | Video)


def keys_of(**flags: str | None) -> Keys:
    """Return the column names that the flags give, where `none` stands for no column."""
    flag_values = {name: flags.get(f"{name}_key") for name in KEYS}
    for name, column in flag_values.items():
        if column == "" or (name == "problem" and column == NONE):
            raise ConfigError(f"{name}_key is {column!r}: give the name of a column, or leave the flag out.")
    return {name: () if column == NONE else (column,) if column else KEYS[name] for name, column in flag_values.items()}


def known_names(columns: Iterable[str], keys: Keys) -> dict[str, str]:
    """Return column → name in `KEYS`, without the columns that `keys` replaces by others."""
    new = {column: name for name, chosen in keys.items() for column in chosen if column not in KEYS[name]}
    replaced = {column for name, chosen in keys.items() for column in {*KEYS[name]} - {*chosen}}
    return {column: new.get(column, column) for column in columns if column in new or column not in replaced}


def renamed_row(row: Mapping[str, Any], keys: Keys) -> dict[str, Any]:
    """Return `row` with the columns of `keys` under the names that are known."""
    return {name: row[column] for column, name in known_names(row, keys).items()}


def require_columns(rows: Any, split: str, needs_solution: bool, keys: Keys = KEYS, is_part: bool = False) -> Any:
    """Return the first readable row of a data set or stream, or its first row if none is readable.

    Args:
        rows: the data set or stream.
        split: its name in messages.
        needs_solution: whether rows need an answer.
        keys: accepted names of columns.
        is_part: whether further files, which may have the columns that flags name, are joined to these rows.

    Raises:
        DataError: there is no row, or the columns are not understood; the message has the cure.
    """
    row: Any = next((row for row in rows if row.get(UNREADABLE) is None), None) or next(iter(rows), None)
    if row is None:
        raise DataError(f"The {split} data set has no rows: give a data set with at least one.")
    if row.get(UNREADABLE) is not None:
        return row
    names = [name for name in row if name not in (UNREADABLE, FOLDER)]
    if taken := RESERVED & {*known_names(row, keys).values()}:
        raise DataError(f"The {split} data have a column named {min(taken)!r}: rename or remove it.")

    def has(*accepted: str) -> bool:
        return not {*accepted}.isdisjoint(names)

    answer = value_of(row, *keys["solution"])
    has_answer = has(*keys["solution"]) or (has(*keys["choices"]) and has("label"))
    is_dialogue = any(isinstance(row.get(name), list) for name in DIALOGUES)
    stated = {name: chosen[0] for name, chosen in keys.items() if chosen not in ((), KEYS[name])}
    missing = next((f"{name}_key is {column}" for name, column in stated.items() if not has(column)), None)
    features = rows.features or {}
    images = [name for name in names if is_media(features.get(name)) or _is_image_file(row[name])]
    unread = [name for name in images if _NUMBERED_COLUMN.fullmatch(name) and name not in (*MEDIA, *keys["image"])]
    choices = next((name for name in names if _looks_like_options(row[name], answer)), None)
    if missing is not None and not is_part:
        problem = f"{missing}, which is not among them."
        if missing.startswith("solution_key"):
            none = "--solution_key none (data.answer_key=none or dataset.answer_key=none)"
            problem += f" If no reward needs it, give {none}."
    elif not has(*keys["problem"]) and not is_vision_only(row):
        problem = "it needs `prompt`, or `problem` with `solution`; name the question column with --problem_key."
    elif needs_solution and not is_dialogue and not has_answer:
        problem = "the accuracy reward needs `solution`; name the answer column with --solution_key."
    elif images and keys["image"] and not has(*keys["image"], *keys["video"], *NUMBERED_IMAGES):
        problem = f"`{images[0]}` seems to hold images; give --image_key {images[0]} or none, or rename it to `image`."
    elif unread and keys["image"]:
        problem = f"`{unread[0]}` would not be read; number columns of images from image_1 to image_7, "
        problem += "or give a list in `images`."
    elif choices is not None and needs_solution and keys["choices"] and not has(*keys["choices"]):
        problem = f"`{choices}` seems to hold the options, with the answer {answer} among them; give "
        problem += f"--choices_key {choices}, or --choices_key none for open questions."
    else:
        return row
    shown = ", ".join(f"`{name}` ({row[name]!r:.40})" for name in names[:12])
    raise DataError(f"The {split} data has the columns {shown}{', …' if len(names) > 12 else ''}: {problem}")


def _looks_like_options(value: Any, answer: Any) -> bool:
    """Whether a value is a list of different texts that the answer could index, from 0 or from 1."""
    try:
        texts = list_of(value, "options")
    except DataError:
        return False
    are_options = all(isinstance(text, str) for text in texts) and 2 <= len(set(texts)) == len(texts) <= len(LETTERS)
    return are_options and not _is_image_file(texts) and str(answer) in map(str, range(len(texts) + 1))


def _is_image_file(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and _is_image_file(value[0])
    if isinstance(value, Mapping):
        return set(value) == {"bytes", "path"}
    if isinstance(value, bytes) or (isinstance(value, str) and BASE64_IMAGE.fullmatch(value)):
        with suppress(DataError):
            return bool(image_size(value))
    return isinstance(value, str) and _IMAGE_FILE.fullmatch(value) is not None
