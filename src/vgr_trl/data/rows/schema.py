"""What a row needs before it can be trained on, and why a row is left out.

A row has a `prompt` (a conversation or a text) or a `problem` (the question's text, with `choices` for multiple
choice), a `solution`, and `image`, `images`, `video` or `videos` unless it is about text alone.
"""

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from datasets import Dataset, IterableDataset, Json, List

from vgr_trl.data.read.readers import UNREADABLE
from vgr_trl.data.read.tables import with_column
from vgr_trl.data.rows.columns import (
    IMAGE_COLUMNS,
    VIDEO_COLUMNS,
    decoded,
    images_of,
    require_columns,
    undecoded,
    video_columns,
    videos_of,
)
from vgr_trl.data.rows.marks import as_parts, placed, texts_of
from vgr_trl.data.rows.open_images import open_image
from vgr_trl.data.rows.prompts import SYSTEM_PROMPT, SystemTemplate, build_prompt
from vgr_trl.data.rows.questions import value_of
from vgr_trl.data.rows.reading import KEYS, LABEL, read_row, read_text
from vgr_trl.data.rows.scan import scan
from vgr_trl.data.rows.skipped import SkippedRow
from vgr_trl.data.rows.streams import PLACE, prepare_stream
from vgr_trl.data.rows.video import DEFAULT_VIDEO_OPTIONS, VideoOptions, frames_of, without_video_marks
from vgr_trl.data.rows.video_rows import with_frames
from vgr_trl.errors import DataError, RewardError

ANSWERS = tuple(name for name in KEYS.answer if name != LABEL)


def row_problem(
    row: Mapping[str, Any],
    *,
    root: Path = Path(),
    needs_solution: bool = True,
    system_prompt: str | SystemTemplate | None = None,
    videos: VideoOptions = DEFAULT_VIDEO_OPTIONS,
    special: re.Pattern[str] | None = None,
) -> str | None:
    """Return why `row` cannot be used, in one sentence, or None if it can.

    Args:
        row: with undecoded or decoded images.
        root: folder that relative image paths start from.
        needs_solution: whether a row must say what is right (an accuracy reward is on).
        system_prompt: put before a `problem`; a template may fail on the row.
        videos: rate and limit of the frames of videos.
        special: finds the special tokens of the model's tokenizer, which no text of a row may hold.

    Raises:
        ConfigError: the row has a video, and PyAV is not installed.
    """
    try:
        reading = read_row(row, needs_answer=needs_solution)
        _conversation(row, system_prompt)
        for text in texts_of(placed(_conversation(row, None))):
            if special is not None and (found := special.search(text)):
                return f"its text has {found[0]!r}, which the model's tokenizer reads as a special token: take it out"
        for value in reading.images:
            open_image(value, root)
        frames_of(row, videos, root)
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
) -> dict[str, Any]:
    """Return a row in which `row_problem` finds nothing with its prompt and its images, those of videos included.

    Args:
        row: with undecoded or decoded images.
        root, system_prompt, videos: as in `row_problem`.
        several: whether there may be several images, which are then in `images`, in every row alike.
    """
    gone = (*IMAGE_COLUMNS, *VIDEO_COLUMNS, PLACE, UNREADABLE)
    ready = {name: value for name, value in row.items() if name not in gone}
    ready["prompt"] = placed(_conversation(row, system_prompt))
    ready |= {name: value for name, value in _stated(row).items() if value is not None or name in row}
    images = [open_image(value, root) for value in images_of(row)] + frames_of(row, videos, root)
    return ready | ({"images": images} if several else {"image": images[0] if images else None})


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
) -> tuple[Dataset | IterableDataset, list[SkippedRow]]:
    """Return `dataset` with a column `prompt` and without the rows that cannot be used, and the list of those.

    Every image is decoded once to see whether it can be, each process looking at its share. Of a stream the rows are
    checked as they are read: the list is empty, and `on_skipped` hears of each row once. Videos become images: of a
    data set with a column `video` or `videos`, each row has its images and then its frames in `images`.

    Args:
        dataset: rows as described at the top of this file.
        split: name of the split, for messages.
        root: folder that relative image paths start from.
        needs_solution: whether a row must have a usable `solution` or `label_idx`.
        system_prompt: put before each `problem`; rows with a `prompt` of their own keep it.
        videos: rate and limit of the frames of videos.
        on_skipped: called for each row of a stream that is left out; None: a warning.
        shuffle_seed: of a stream: draw each row from the next 1000, which wait with their images undecoded, in a
            small part of the memory that shuffling the result takes. None: keep the order.
        special: as in `row_problem`.

    Raises:
        ConfigError: there are videos, and PyAV is not installed.
        DataError: the data set is empty, lacks the needed columns, or no row is left.
    """
    options: dict[str, Any] = {"root": root, "system_prompt": system_prompt, "videos": videos}
    examine = partial(row_problem, needs_solution=needs_solution, special=special, **options)
    if isinstance(dataset, IterableDataset):
        ready = partial(ready_row, several=_are_several(dataset), **options)
        return prepare_stream(dataset, split, needs_solution, examine, ready, on_skipped, shuffle_seed), []
    if len(dataset) == 0:
        raise DataError(f"The {split} data set has no rows: give a data set with at least one.")
    dataset = undecoded(dataset)
    if dataset.column_names != [UNREADABLE]:
        require_columns([name for name in dataset.column_names if name != UNREADABLE], split, needs_solution)
    reasons = scan(dataset, examine, f"check rows ({split})")
    ids = dataset["id"] if "id" in dataset.column_names else range(len(dataset))
    skipped = [SkippedRow(split, row, ids[row], reason) for row, reason in enumerate(reasons) if reason is not None]
    if len(skipped) == len(dataset):
        raise DataError(
            f"None of the {len(dataset)} rows of the {split} data can be used; the first: {skipped[0].reason}."
        )
    if skipped:
        dataset = dataset.select([row for row, reason in enumerate(reasons) if reason is None])
    if UNREADABLE in dataset.column_names:
        dataset = dataset.remove_columns(UNREADABLE)
    dataset = with_frames(_with_texts(dataset, system_prompt), videos, root)
    column = "images" if _are_several(dataset) else "image"
    return decoded(dataset).with_transform(partial(_shown, root=root, column=column)), skipped


def _conversation(row: Mapping[str, Any], system_prompt: str | SystemTemplate | None) -> list[dict[str, Any]]:
    prompt, choices = read_text(row)
    if isinstance(prompt, str):
        source = row.get("source") if isinstance(row.get("source"), str) else None
        prompt = build_prompt(prompt, choices, system_prompt=system_prompt, source=source)
    return without_video_marks(prompt) if videos_of(row) else prompt


def _stated(row: Mapping[str, Any]) -> dict[str, Any]:
    """Options and answer of a row under the names that rewards know them by."""
    return {"choices": read_text(row)[1], "solution": value_of(row, *ANSWERS)}


def _with_texts(dataset: Dataset, system_prompt: str | SystemTemplate | None) -> Dataset:
    names = {*KEYS.prompt, *KEYS.choices, *ANSWERS, "source", *VIDEO_COLUMNS} & set(dataset.column_names)
    rows = list(dataset.select_columns(sorted(names)))
    conversations = [_conversation(row, system_prompt) for row in rows]
    if not all(isinstance(message["content"], str) for messages in conversations for message in messages):
        conversations = [
            [{**message, "content": as_parts(message["content"])} for message in messages] for messages in conversations
        ]
    stated = [_stated(row) for row in rows]
    for name in ("choices", "solution"):
        values = [row[name] for row in stated]
        is_there = name in dataset.column_names or any(value is not None for value in values)
        if is_there and values != [row.get(name) for row in rows]:
            dataset = with_column(dataset, name, values)
    return with_column(dataset, "prompt", conversations)


def _are_several(dataset: Dataset | IterableDataset) -> bool:
    """Whether a row may have several images: they are in `images` then, which TRL looks for in a batch's first row."""
    names = dataset.column_names
    if names is None or "image" not in names or "images" in names or video_columns(names):
        return True
    return isinstance((dataset.features or {}).get("image"), List | Json)


def _shown(batch: dict[str, list[Any]], *, root: Path, column: str) -> dict[str, list[Any]]:
    """Rows as TRL gets them: marks replaced by parts, images decoded."""
    ready = {name: values for name, values in batch.items() if name not in IMAGE_COLUMNS}
    if "prompt" in batch:
        ready["prompt"] = [placed(prompt) for prompt in batch["prompt"]]
    names = [name for name in IMAGE_COLUMNS if name in batch]
    if names:
        rows = [dict(zip(names, values, strict=True)) for values in zip(*(batch[name] for name in names), strict=True)]
        images = [[open_image(value, root) for value in images_of(row)] for row in rows]
        ready[column] = images if column == "images" else [found[0] if found else None for found in images]
    return ready
