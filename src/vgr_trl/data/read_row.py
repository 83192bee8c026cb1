"""Read a row: what it asks and what is right, by whatever names, formats and types its columns have.

`train`, `evaluate`, `inspect`, `convert` and `merge` share `read_row`.
"""

import ast
import json
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from datasets import Dataset, Image, List, Video

from vgr_trl.data.images import (
    FOLDER,
    IMAGE_COLUMNS,
    NUMBERED_IMAGES,
    images_of,
    refuse_named_files,
    videos_of,
)
from vgr_trl.data.prompts import LETTERS, format_question, require_placeholders
from vgr_trl.rewards.answers import Solution, resolve_solution
from vgr_trl.utils import ConfigError, DataError, RewardError

DIALOGUES = ("messages", "conversations")
INDICES = ("label_idx", "correct_choice_idx")  # always an index
UNREADABLE = "__unreadable__"  # the column that says why there is no row at this place of a file
VISION_ONLY_PROBLEM = "Answer the multiple-choice question in the image with the letter of the right option."
ROLES = {"system": "system", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant"}
NONE = "none"  # the name of no column: the data have none
MOST_SHOWN = 12

_NUMBERED = re.compile(r"<image\s*(\d+)>", re.IGNORECASE)
_IMAGE_FILE = re.compile(r"[^\s]+\.(?:png|jpe?g|webp|bmp|gif|tiff?)", re.IGNORECASE)
# What \alpha, \beta, \theta, \vec, \frac and \rho begin with where the text of a list was written without care.
_MISREAD = re.compile(r"[\a\b\t\v\f\r]")
_LABELLED = re.compile(r"(?:\(([A-J])\)|([A-J])\s?[).:])\s*(\S.*)", re.DOTALL)


@dataclass(frozen=True)
class Keys:
    """Names of the columns; several: the first that a row has."""

    prompt: tuple[str, ...] = ("prompt", "problem", "question", "query", *DIALOGUES)
    answer: tuple[str, ...] = ("solution", "answer", "answers", *INDICES)
    image: tuple[str, ...] = ("images", "image")
    video: tuple[str, ...] = ("videos", "video")
    choices: tuple[str, ...] = ("choices", "options")


KEYS = Keys()
STANDARD = {"prompt": "problem", "answer": "solution", "image": "image", "video": "video", "choices": "choices"}
FLAGS = {part: f"{name}_key" for part, name in STANDARD.items()}


def image_columns(dataset: Any) -> list[str]:
    """Return the columns of `dataset` that TRL takes images from; of a stream without known columns, look at a row."""
    names: Any = getattr(dataset, "column_names", None) or next(iter(dataset), {})
    return [name for name in IMAGE_COLUMNS if name in names]


def undecoded(dataset: Any) -> Any:
    """Return a data set or stream whose images and videos come as bytes or paths."""
    for name, feature in (dataset.features or {}).items():
        if is_media(feature):
            several = isinstance(feature, List)
            kind = type(feature.feature if several else feature)(decode=False)
            dataset = dataset.cast_column(name, List(kind) if several else kind)
    return dataset


def is_media(feature: Any) -> bool:
    """Return whether a column holds images or videos, one or a list of them."""
    return isinstance(feature.feature if isinstance(feature, List) else feature, Image | Video)


@dataclass(frozen=True)
class Question:
    """A question read from a row.

    Attributes:
        prompt: the question, or a conversation; `<image>` in it is the placeholder of an image.
        choices: the options, None for an open question.
        answer: letter, index or text as stated, or a list of accepted ones; None where nothing is.
        right: what the answer means, where the row must say what is right.
        is_complete: whether the prompt is a conversation that has, or wants, no system prompt of ours.
        images, videos: paths, bytes, or dicts with these, not opened.
    """

    prompt: str | list[dict[str, Any]]
    choices: list[str] | None
    answer: Any
    right: Solution | None
    is_complete: bool
    images: list[Any]
    videos: list[Any]


def read_row(row: Mapping[str, Any], *, needs_answer: bool = True) -> Question | str:
    """Return the question that a row asks, or the reason why it asks none; no file is opened.

    Args:
        row: with undecoded or decoded images, its columns under names of `KEYS`, or in a known format.
        needs_answer: whether it must say what is right.
    """
    if row.get(UNREADABLE) is not None:
        return str(row[UNREADABLE])
    try:
        return _question(_rename_known_formats(row), needs_answer)
    except (DataError, RewardError) as error:
        return str(error).rstrip(".")


def _question(row: Mapping[str, Any], needs_answer: bool) -> Question:
    prompt, replied, is_complete = _read_question(row)
    stated = value_of(row, *KEYS.choices)
    choices = None if stated is None or stated == [] else options_of(stated)
    names = [name for name in KEYS.answer if name not in INDICES]
    answer = value_of(row, *names)
    if answer is not None and needs_answer:
        answer = answer_of(row, choices, *names)
    elif answer is None and (index := value_of(row, *INDICES)) is not None:
        answer = int(index) if isinstance(index, str) and index.strip().isdecimal() else index
        if not choices and needs_answer:
            answer = resolve_solution(None, None, answer).text
        elif not choices and answer in range(len(LETTERS)):
            answer = LETTERS[int(answer)]
    answer = replied if answer is None else answer
    right = resolve_solution(answer, choices) if needs_answer else None
    images, videos = images_of(row), videos_of(row)
    shown: Any = format_question(prompt, choices) if isinstance(prompt, str) else prompt
    require_placeholders(shown, len(images), bool(videos))
    return Question(prompt, choices, answer, right, is_complete, images, videos)


def _rename_known_formats(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a row of MMMU-Pro, ArxivQA or MMBench as one with `question`, `options`, `answer` and `images`."""
    if value_of(row, *KEYS.choices) is None and all(_is_option(row.get(letter)) for letter in "AB"):
        options = [str(row[letter]) for letter in LETTERS if _is_option(row.get(letter))]
        row = {name: value for name, value in row.items() if name not in LETTERS} | {"options": options}
    numbers = [number for number, name in enumerate(NUMBERED_IMAGES, start=1) if row.get(name) is not None]
    has_numbers = any(name in row for name in NUMBERED_IMAGES) and _NUMBERED.search(str(row.get("question")))
    if numbers or has_numbers:
        images = images_of(row)
        if not isinstance(row.get("question"), str):
            return {**row, "images": images}
        options = [] if row.get("options") is None else options_of(row["options"])
        question, *options = renumber_placeholders([row["question"], *options], numbers)
        return {**row, "question": question, "options": options or None, "images": images}
    if is_vision_only(row):
        options = options_of(row["options"])
        right = resolve_solution(answer_of(row, options, "answer"), options)
        return {**row, "problem": VISION_ONLY_PROBLEM, "options": None, "answer": LETTERS[int(right.index or 0)]}
    if isinstance(row.get("label"), str) and row.get("options") and value_of(row, "solution", "answer") is None:
        return {**row, "answer": row["label"]}
    return row


def _is_option(value: Any) -> bool:
    """Whether the value of a column that is a letter is an option: MMBench has NaN where there is none."""
    return isinstance(value, str | Real) and value == value and str(value).strip() != ""


def is_vision_only(row: Mapping[str, Any]) -> bool:
    """Return whether `row` is one of MMMU-Pro whose question and options are to be read from the image."""
    has_all = all(row.get(name) is not None for name in ("image", "options", "answer", "subject"))
    return has_all and not any(row.get(name) for name in KEYS.prompt)


def renumber_placeholders(texts: list[str], numbers: list[int]) -> list[str]:
    """Return the texts with `<image k>` standing for the k-th image that there is.

    Args:
        texts: question and options.
        numbers: of the images that there are, ascending; these become 1, 2, …

    Raises:
        DataError: a placeholder refers to an image that is missing.
    """
    position = {number: index for index, number in enumerate(numbers, start=1)}
    for text in texts:
        for match in _NUMBERED.finditer(text):
            if int(match[1][:4]) not in position:
                raise DataError(f"it refers to {match[0][:40]}, but there is no image_{match[1][:4]}")
    return [_NUMBERED.sub(lambda match: f"<image {position[int(match[1])]}>", text) for text in texts]


def _read_question(row: Mapping[str, Any]) -> tuple[Any, str | None, bool]:
    """Return the question or conversation, what the assistant answers to it, and whether it wants no system prompt."""
    name = next((name for name in KEYS.prompt if row.get(name) not in (None, [], "")), None)
    prompt: Any = None if name is None else row[name]
    if name is None or isinstance(prompt, str):
        return text_of(row, *(KEYS.prompt[:3] if name is None else [name])), None, False
    if not isinstance(prompt, list) or (name == "prompt" and not all(isinstance(turn, dict) for turn in prompt)):
        raise DataError(f"its prompt is a {type(prompt).__name__}: give a text or a conversation (a list of messages)")
    if name == "prompt":
        for turn in prompt:
            if not isinstance(turn.get("role"), str) or not isinstance(turn.get("content"), str | list):
                raise DataError("a message of its prompt lacks a role or a content")
        if prompt[-1]["role"] == "assistant":
            raise DataError("its prompt ends with a message of the assistant, so there is nothing to answer")
        refuse_named_files(prompt)
        return prompt, None, True
    turns = [_turn(message, name) for message in prompt]
    replied = turns.pop()["content"] if turns[-1]["role"] == "assistant" else None
    if not turns or turns[-1]["role"] != "user":
        raise DataError(f"its {name} do not end with a message of the user, with or without its answer")
    refuse_named_files(turns)
    is_question = len(turns) == 1 and isinstance(turns[0]["content"], str)
    question = turns[0]["content"] if is_question else turns
    return question, replied if isinstance(replied, str) else None, turns[0]["role"] == "system"


def _turn(message: Any, name: str) -> dict[str, Any]:
    turn = message if isinstance(message, Mapping) else {}
    role = turn.get("role") or turn.get("from")
    content = turn["content"] if turn.get("content") is not None else turn.get("value")
    if role not in ROLES or not isinstance(content, str | list):
        raise DataError(f"one of its {name} is {_shown(message)}: give a role ({', '.join(ROLES)}) and a content")
    return {"role": ROLES[role], "content": content}


def text_of(row: Mapping[str, Any], *names: str) -> str:
    """Return the text in the first of the columns `names` that the row has.

    Raises:
        DataError: it has none of them, or not a text.
    """
    value = value_of(row, *names)
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"its {' or '.join(names)} is {_shown(value)}: it must be a text")
    return value


def value_of(row: Mapping[str, Any], *names: str) -> Any:
    """Return the value in the first of the columns `names` that the row has one in, else None."""
    return next((row[name] for name in names if row.get(name) is not None), None)


def options_of(value: Any) -> list[str]:
    """Return the texts of a question's options, stored as a list, by letter in a mapping, or as the text of either.

    Options are texts or numbers. Letters that they carry themselves (`A) red`, `B) blue`) are taken off if all carry
    their own.

    Raises:
        DataError: it is no list of 2 to 10 texts and numbers.
    """
    options = list_of(value, "options")
    if not 2 <= len(options) <= len(LETTERS):
        raise DataError(f"it has {len(options)} options: there must be 2 to {len(LETTERS)}")
    for option in options:
        is_value = isinstance(option, str | Real) and not isinstance(option, bool) and option == option
        if not is_value or not str(option).strip():
            raise DataError(f"one of its options is {_shown(option)}: options must be texts or numbers")
    texts = [str(option).strip() for option in options]
    labelled = [match for match in map(_LABELLED.fullmatch, texts) if match]
    if len(labelled) < len(texts):
        return texts
    labels = "".join(match[1] or match[2] for match in labelled)
    if not LETTERS.startswith(labels):
        raise DataError(f"its options carry the letters {', '.join(labels)}, which are not those of their places")
    return [match[3] for match in labelled]


def answer_of(row: Mapping[str, Any], options: Sequence[str] | None, *names: str) -> Any:
    """Return the stated answer of a row: a letter, an index or a text, or a list of answers that all count.

    Raises:
        DataError: it is a number that could be an index as well as another option's text.
    """
    answer = value_of(row, *names)
    if hasattr(answer, "tolist"):
        answer = answer.tolist()
    if isinstance(answer, list):  # VQA has a mapping for each annotator
        return [each.get("answer") if isinstance(each, Mapping) else each for each in answer]
    is_number = isinstance(answer, int) and not isinstance(answer, bool)
    if is_number and options and str(answer) in options and str(answer) not in options[answer : answer + 1]:
        raise DataError(f"its {names[0]} is the number {answer}, which is one option's text and could be an index")
    return answer


def list_of(value: Any, name: str) -> list[Any]:
    """Return a value that is a list, or the text of one in Python's or JSON's notation.

    Raises:
        DataError: it is neither.
    """
    if hasattr(value, "tolist"):
        value = value.tolist()
    found = _parsed(value) if isinstance(value, str) else value
    if isinstance(found, Mapping):
        found = [found[letter] for letter in sorted(found) if found[letter] is not None]
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


def _shown(value: Any, longest: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def keys_of(**flags: str | None) -> Keys:
    """Return the names of the columns that the flags give; `none`: there is no such column.

    Raises:
        ConfigError: a name is empty, or the question is said to be in no column.
    """
    given = {part: flags.get(flag) for part, flag in FLAGS.items()}
    for part, name in given.items():
        if name == "" or (part == "prompt" and name == NONE):
            raise ConfigError(f"{FLAGS[part]} is {name!r}: give the name of a column, or leave the flag out.")
    return Keys(**{part: () if name == NONE else (name,) for part, name in given.items() if name})


def renamed_row(row: Mapping[str, Any], keys: Keys) -> dict[str, Any]:
    """Return `row` with the columns of `keys` under the names that are known."""
    if keys == KEYS:
        return dict(row)
    names = _new_names(row, keys)
    return {names[name]: value for name, value in row.items() if name in names}


def renamed(dataset: Dataset, keys: Keys) -> Dataset:
    """Return `dataset` with the columns of `keys` under the names that are known."""
    names = _new_names(dataset.column_names, keys)
    return dataset.select_columns(list(names)).rename_columns(names)


def _new_names(columns: Iterable[str], keys: Keys) -> dict[str, str]:
    """Return column → known name of the columns that stay: of what `keys` names, others that are known do not."""
    names = {name: name for name in columns}
    for part, standard in STANDARD.items():
        given, known = getattr(keys, part), getattr(KEYS, part)
        if given != known:
            names = {
                name: standard if name in given and name not in known else new
                for name, new in names.items()
                if name in given or name not in known
            }
    return names


def require_columns(
    row: Mapping[str, Any], split: str, needs_solution: bool, keys: Keys = KEYS, features: Any = None
) -> None:
    """Raise `DataError` if no row of a data set could be used, with what was found and the flag that would say more.

    Args:
        row: the first that can be read.
        needs_solution: whether a row must say what is right.
        features: types of the columns where they are known.
    """
    names = [name for name in row if name not in (UNREADABLE, FOLDER)]

    def has(*known: str) -> bool:
        return not {*known}.isdisjoint(names)

    answer = value_of(row, *keys.answer)
    answers = (*keys.answer, "label") if has(*keys.choices) else keys.answer
    is_dialogue = any(isinstance(row.get(name), list) for name in DIALOGUES)
    given = {flag: getattr(keys, part) for part, flag in FLAGS.items() if getattr(keys, part) != getattr(KEYS, part)}
    missing = next((f"{flag} is {name[0]}" for flag, name in given.items() if name and not has(*name)), None)
    image = next((name for name in names if is_media((features or {}).get(name)) or _is_image_file(row[name])), None)
    choices = next((name for name in names if _looks_like_options(row[name], answer)), None)
    if missing is not None:
        problem = f"{missing}, which is none of them."
        if missing.startswith("solution_key"):
            problem += (
                " No reward needs it? Give --solution_key none (data.answer_key=none or dataset.answer_key=none)."
            )
    elif not has(*keys.prompt) and not is_vision_only(row):
        problem = "it needs `prompt`, or `problem` with `solution`; say which one holds the question by --problem_key."
    elif needs_solution and not is_dialogue and not has(*answers):
        problem = "the accuracy reward needs `solution`; say which one holds it by --solution_key."
    elif image is not None and keys.image and not has(*keys.image, *keys.video, *NUMBERED_IMAGES):
        problem = f"`{image}` seems to hold images; say so by --image_key {image}, or train on the text alone by "
        problem += f"--image_key {NONE}."
    elif choices is not None and needs_solution and keys.choices and not has(*keys.choices):
        problem = f"`{choices}` seems to hold the options of which the answer, {answer}, is one; say so by "
        problem += f"--choices_key {choices}, or train on open questions by --choices_key {NONE}."
    else:
        return
    shown = ", ".join(f"`{name}` ({_shown(row[name], 40)})" for name in names[:MOST_SHOWN])
    more = f" and {len(names) - MOST_SHOWN} more" if len(names) > MOST_SHOWN else ""
    raise DataError(f"The {split} data has the columns {shown}{more}: {problem}")


def _looks_like_options(value: Any, answer: Any) -> bool:
    """Whether a value is a list of different texts, of which the answer could be the index, from 0 or from 1."""
    try:
        texts = list_of(value, "options")
    except DataError:
        return False
    if not all(isinstance(text, str) for text in texts) or _is_image_file(texts) or len(set(texts)) != len(texts):
        return False
    return 2 <= len(texts) <= len(LETTERS) and str(answer) in map(str, range(len(texts) + 1))


def _is_image_file(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and _is_image_file(value[0])
    if isinstance(value, Mapping):
        return set(value) == {"bytes", "path"}
    return isinstance(value, str) and _IMAGE_FILE.fullmatch(value) is not None
