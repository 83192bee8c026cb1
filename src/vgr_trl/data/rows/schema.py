"""What a row needs before it can be trained on, and why a row is left out.

A row has a `prompt` (a conversation or a text) or a `problem` (the question's text, with `choices` for multiple
choice), a `solution`, and `image`, `images`, `video` or `videos` unless it is about text alone; or it is laid out as
`layouts.py` knows, or has other names for these that flags give (`naming.py`).
"""

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from datasets import Dataset, IterableDataset, Json, List

from vgr_trl.data.rows.columns import (
    FOLDER,
    IMAGE_COLUMNS,
    PLACE,
    UNREADABLE,
    VIDEO_COLUMNS,
    decoded,
    folder_of,
    image_columns,
    is_media,
    undecoded,
    video_columns,
)
from vgr_trl.data.rows.images.image_column import with_joined_images, with_whole_paths
from vgr_trl.data.rows.images.opening import open_image
from vgr_trl.data.rows.images.sizes import ANY_SIZE, ImageRule
from vgr_trl.data.rows.images.video import DEFAULT_VIDEO_OPTIONS, VideoOptions, frames_of, without_video_marks
from vgr_trl.data.rows.kinds import with_column
from vgr_trl.data.rows.layouts import NUMBERED_IMAGES
from vgr_trl.data.rows.naming import renamed, require_columns
from vgr_trl.data.rows.reading import DIALOGUES, KEYS, Keys, Text, images_in, read_row, read_text
from vgr_trl.data.rows.regions import boxes_of
from vgr_trl.data.rows.repeated import show_rows
from vgr_trl.data.rows.scan import scan
from vgr_trl.data.rows.skipped import SkippedRow, skipped_rows
from vgr_trl.data.rows.streams import prepare_stream
from vgr_trl.data.rows.text.marks import as_parts, placed, texts_of
from vgr_trl.data.rows.text.prompts import SYSTEM_PROMPT, QuestionTemplate, SystemTemplate, build_prompt, system_message
from vgr_trl.data.rows.text.special import special_problem
from vgr_trl.errors import DataError, RewardError

GONE = (*IMAGE_COLUMNS, *NUMBERED_IMAGES, *VIDEO_COLUMNS, *DIALOGUES, PLACE, FOLDER, UNREADABLE)


def row_problem(
    row: Mapping[str, Any],
    *,
    root: Path = Path(),
    needs_solution: bool = True,
    system_prompt: str | SystemTemplate | None = None,
    videos: VideoOptions = DEFAULT_VIDEO_OPTIONS,
    special: re.Pattern[str] | None = None,
    images: ImageRule = ANY_SIZE,
    boxes: bool = False,
) -> str | None:
    """Return why `row` cannot be used, in one sentence, or None if it can.

    Args:
        row: with undecoded or decoded images.
        needs_solution: whether a row must say what is right (an accuracy reward is on).
        system_prompt: put before a `problem`; a template may fail on the row.
        special: finds the special tokens of the model's tokenizer, which no text of a row may hold.
        images: whether large images are left out.
        boxes: whether something reads the boxes of rows with one image.

    Raises:
        ConfigError: the row has a video, and PyAV is not installed.
    """
    try:
        reading = read_row(row, needs_answer=needs_solution)
        _conversation(row, reading, system_prompt)
        if (problem := special_problem(special, _conversation(row, reading, None))) is not None:
            return problem
        shown = [open_image(value, folder_of(row, root)) for value in reading.images]
        for image in shown:
            images.check(image)
        shown += frames_of(row, videos, folder_of(row, root))
        if boxes and len(shown) == 1:
            boxes_of(row, images.limits.size_of(*shown[0].size), "it")
    except (DataError, RewardError) as error:
        return str(error).rstrip(".")
    return None


def ready_row(
    row: Mapping[str, Any],
    *,
    root: Path = Path(),
    system_prompt: str | SystemTemplate | None = SYSTEM_PROMPT,
    videos: VideoOptions = DEFAULT_VIDEO_OPTIONS,
    several: bool = True,
    images: ImageRule = ANY_SIZE,
) -> dict[str, Any]:
    """Return a row in which `row_problem` finds nothing with its prompt and its images, those of videos included.

    Args:
        row: with undecoded or decoded images.
        several: whether there may be several images, which are then in `images`, in every row alike.
    """
    text, root = read_text(row), folder_of(row, root)
    ready = {name: value for name, value in row.items() if name not in GONE}
    ready["prompt"] = placed(_conversation(row, text, system_prompt))
    ready |= {name: value for name, value in _stated(text).items() if value is not None or name in row}
    opened = [open_image(value, root) for value in images_in(row)] + frames_of(row, videos, root)
    shown = [images.fitted(image) for image in opened]
    return ready | ({"images": shown} if several else {"image": shown[0] if shown else None})


def prepare_rows(
    dataset: Dataset | IterableDataset,
    *,
    split: str = "train",
    root: Path = Path(),
    needs_solution: bool = True,
    system_prompt: str | SystemTemplate | None = SYSTEM_PROMPT,
    videos: VideoOptions = DEFAULT_VIDEO_OPTIONS,
    on_skipped: Callable[[SkippedRow], None] | None = None,
    shuffle_seed: int | None = None,
    special: re.Pattern[str] | None = None,
    keys: Keys = KEYS,
    images: ImageRule = ANY_SIZE,
    boxes: bool = False,
) -> tuple[Dataset | IterableDataset, list[SkippedRow]]:
    """Return `dataset` with a column `prompt` and without the rows that cannot be used, and the list of those.

    Every image is decoded once to see whether it can be, each process looking at its share. Of a stream the rows are
    checked as they are read: the list is empty, and `on_skipped` hears of each row once. Videos become images: of a
    data set with a column `video` or `videos`, each row has its images and then its frames in `images`.

    Args:
        dataset: rows as described at the top of this file.
        needs_solution: whether a row must have a usable `solution` or `label_idx`.
        system_prompt: put before each `problem`; rows with a `prompt` of their own keep it.
        on_skipped: called for each row of a stream that is left out; None: a warning.
        shuffle_seed: of a stream: draw each row from the next 1000, which wait with their images undecoded, in a
            small part of the memory that shuffling the result takes. None: keep the order.
        boxes: whether something reads the boxes of rows, so that rows with a bad one are left out.

    Raises:
        ConfigError: there are videos, and PyAV is not installed.
        DataError: the data set is empty, lacks the needed columns, or no row is left.
    """
    options: dict[str, Any] = {"root": root, "system_prompt": system_prompt, "videos": videos, "images": images}
    examine = partial(row_problem, needs_solution=needs_solution, special=special, boxes=boxes, **options)
    if isinstance(dataset, IterableDataset):
        ready = partial(ready_row, several=_are_several(dataset, keys), **options)
        stream = prepare_stream(dataset, split, needs_solution, keys, examine, ready, GONE, on_skipped, shuffle_seed)
        return stream, []
    if len(dataset) == 0:
        raise DataError(f"The {split} data set has no rows: give a data set with at least one.")
    dataset = undecoded(dataset)
    if dataset.column_names != [UNREADABLE]:
        require_columns(_first(dataset), split, needs_solution, keys, dataset.features)
    dataset = renamed(dataset, keys)
    reasons = scan(dataset, examine, f"check rows ({split})")
    skipped = skipped_rows(split, reasons, dataset["id"] if "id" in dataset.column_names else None)
    if any(not is_media(dataset.features[name]) for name in image_columns(dataset)):  # files, which may go
        dataset = dataset.add_column(PLACE, list(range(len(dataset))))
    if skipped:
        dataset = dataset.select([row for row, reason in enumerate(reasons) if reason is None])
    dataset = with_whole_paths(with_joined_images(_with_texts(dataset, system_prompt), videos, root), root)
    dataset = dataset.remove_columns([name for name in (UNREADABLE, *DIALOGUES) if name in dataset.column_names])
    column = "images" if _are_several(dataset) else "image"
    shown = partial(show_rows, split=split, root=root, column=column, images=images)
    return decoded(dataset).with_transform(shown), skipped


def _first(dataset: Dataset) -> dict[str, Any]:
    """The first row that could be read, else the first."""
    if UNREADABLE not in dataset.column_names:
        return dict(dataset[0])
    place = next((row for row, reason in enumerate(dataset[UNREADABLE]) if reason is None), 0)
    return dict(dataset[place])


def _conversation(
    row: Mapping[str, Any], text: Text, system_prompt: str | SystemTemplate | None
) -> list[dict[str, Any]]:
    source = row.get("source") if isinstance(row.get("source"), str) else None
    if isinstance(system_prompt, QuestionTemplate) and not isinstance(text.prompt, str):
        raise DataError(f"its question is a conversation, which {system_prompt.name} cannot be filled in with")
    if isinstance(text.prompt, str):
        prompt = build_prompt(text.prompt, text.choices, system_prompt=system_prompt, source=source)
    elif text.is_whole:
        prompt = text.prompt
    else:
        asked = " ".join(texts_of(text.prompt[-1:]))
        prompt = [*system_message(system_prompt, asked, text.choices, source), *text.prompt]
    return without_video_marks(prompt) if any(row.get(name) is not None for name in VIDEO_COLUMNS) else prompt


def _stated(text: Text) -> dict[str, Any]:
    """Options and answer of a row under the names that rewards know them by."""
    return {"choices": text.choices, "solution": text.answer}


def _with_texts(dataset: Dataset, system_prompt: str | SystemTemplate | None) -> Dataset:
    names = {*KEYS.prompt, *KEYS.choices, *KEYS.answer, *NUMBERED_IMAGES, *VIDEO_COLUMNS, "label", "source"}
    if "subject" in dataset.column_names:
        names |= {"image", "subject"}  # which tell rows of MMMU-Pro
    conversations, stated = [], []
    for row in dataset.select_columns(sorted(names & set(dataset.column_names))):
        text = read_text(row)
        conversations.append(_conversation(row, text, system_prompt))
        stated.append(_stated(text))
    if not all(isinstance(message["content"], str) for messages in conversations for message in messages):
        conversations = [
            [{**message, "content": as_parts(message["content"])} for message in messages] for messages in conversations
        ]
    for name in ("choices", "solution"):
        values = [row[name] for row in stated]
        if values != (list(dataset[name]) if name in dataset.column_names else [None] * len(values)):
            dataset = with_column(dataset, name, values)
    return with_column(dataset, "prompt", conversations)


def _are_several(dataset: Dataset | IterableDataset, keys: Keys = KEYS) -> bool:
    """Whether a row may have several images: they are in `images` then, which TRL looks for in a batch's first row."""
    names = dataset.column_names
    name = keys.image[0] if keys != KEYS and len(keys.image) == 1 else "image"
    if names is None or name not in names or name == "images" or ("images" in names and keys.image == KEYS.image):
        return True
    if video_columns(names) or set(keys.video) & set(names):
        return True
    return isinstance((dataset.features or {}).get(name), List | Json)
