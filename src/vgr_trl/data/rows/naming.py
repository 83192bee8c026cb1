"""What the columns of a data set are called: other names, given by flags, become those that the reading knows."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from datasets import Dataset

from vgr_trl.data.rows.columns import FOLDER, UNREADABLE, is_media
from vgr_trl.data.rows.layouts import NUMBERED_IMAGES, is_vision_only
from vgr_trl.data.rows.questions import list_of, value_of
from vgr_trl.data.rows.reading import KEYS, Keys
from vgr_trl.data.rows.text.prompts import LETTERS
from vgr_trl.errors import ConfigError, DataError

FLAGS = {"prompt": "problem_key", "answer": "solution_key", "image": "image_key", "video": "video_key",
         "choices": "choices_key"}  # fmt: skip
STANDARD = {"prompt": "problem", "answer": "solution", "image": "image", "video": "video", "choices": "choices"}
NONE = "none"  # the name of no column: the data have none
IMAGE_FILE = re.compile(r"[^\s]+\.(?:png|jpe?g|webp|bmp|gif|tiff?)", re.IGNORECASE)
MOST_SHOWN = 12


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
    gone, names = _plan(keys)
    return {names.get(name, name): value for name, value in row.items() if name not in gone}


def renamed(dataset: Dataset, keys: Keys) -> Dataset:
    """Return `dataset` with the columns of `keys` under the names that are known."""
    gone, names = _plan(keys)
    dataset = dataset.remove_columns([name for name in dataset.column_names if name in gone])
    return dataset.rename_columns({name: new for name, new in names.items() if name in dataset.column_names})


def _plan(keys: Keys) -> tuple[set[str], dict[str, str]]:
    """The columns that are left out because another one is named, and the new names of those."""
    gone: set[str] = set()
    names: dict[str, str] = {}
    for part in (option.name for option in fields(Keys)):
        given, known = getattr(keys, part), getattr(KEYS, part)
        if given != known:
            gone |= set(known) - set(given)
            names |= {name: STANDARD[part] for name in given if name not in known}
    return gone, names


def require_columns(
    row: Mapping[str, Any],
    split: str,
    needs_solution: bool,
    keys: Keys = KEYS,
    features: Mapping[str, Any] | None = None,
) -> None:
    """Raise `DataError` if no row of a data set could be used, with what was found and the flag that would say more.

    Args:
        row: the first that can be read.
        needs_solution: whether a row must say what is right.
        features: types of the columns where they are known.
    """
    names = [name for name in row if name not in (UNREADABLE, FOLDER)]
    found = f"The {split} data has the columns {_shown(row, names)}"
    for part, flag in FLAGS.items():
        given = getattr(keys, part)
        if given != getattr(KEYS, part) and given and given[0] not in names:
            raise DataError(f"{found}: {flag} is {given[0]}, which is none of them.")
    if not set(keys.prompt) & set(names) and not is_vision_only(row):
        raise DataError(
            f"{found}: it needs `prompt`, or `problem` with `solution` (also known: "
            f"{', '.join(keys.prompt[2:])}); say which one holds the question by --problem_key."
        )
    dialogue = next((name for name in keys.prompt if isinstance(row.get(name), list)), "prompt")
    answers = {*keys.answer, *(("label",) if set(keys.choices) & set(names) else ())}
    if needs_solution and dialogue == "prompt" and not answers & set(names):
        raise DataError(
            f"{found}: the accuracy reward needs `solution` (letter, index or text; also known: "
            f"{', '.join(keys.answer[1:])}); say which one holds it by --solution_key."
        )
    if keys.image and not {*keys.image, *keys.video, *NUMBERED_IMAGES} & set(names):
        likely = [name for name in names if is_media((features or {}).get(name)) or _looks_like_image(row[name])]
        if likely:
            raise DataError(
                f"{found}: none of {', '.join(keys.image)} is there, but `{likely[0]}` seems to hold images; say so by "
                f"--image_key {likely[0]}, or train on the text alone by --image_key {NONE}."
            )
    answer = value_of(row, *keys.answer)
    if needs_solution and keys.choices and not set(keys.choices) & set(names):
        likely = [name for name in names if _looks_like_options(row[name], answer)]
        if likely:
            raise DataError(
                f"{found}: none of {', '.join(keys.choices)} is there, but `{likely[0]}` seems to hold the options of "
                f"which the answer, {answer}, is one; say so by --choices_key {likely[0]}, or train on open questions "
                f"by --choices_key {NONE}."
            )


def _looks_like_options(value: Any, answer: Any) -> bool:
    """Whether a value is a list of different texts, of which the answer could be the index, from 0 or from 1."""
    try:
        texts = list_of(value, "options")
    except DataError:
        return False
    if not all(isinstance(text, str) for text in texts) or _looks_like_image(texts) or len(set(texts)) != len(texts):
        return False
    return 2 <= len(texts) <= len(LETTERS) and str(answer) in map(str, range(len(texts) + 1))


def _looks_like_image(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and _looks_like_image(value[0])
    if isinstance(value, Mapping):
        return set(value) == {"bytes", "path"}
    return isinstance(value, str) and IMAGE_FILE.fullmatch(value) is not None


def _shown(row: Mapping[str, Any], names: Sequence[str]) -> str:
    shown = [f"`{name}` ({_example(row[name])})" for name in names[:MOST_SHOWN]]
    return ", ".join(shown) + (f" and {len(names) - MOST_SHOWN} more" if len(names) > MOST_SHOWN else "")


def _example(value: Any) -> str:
    if isinstance(value, Mapping) and "bytes" in value:
        return "an image or video"
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
