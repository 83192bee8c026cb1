"""What a row needs before it can be trained on, and why a row is left out.

A row has a `prompt` (a conversation or a text) or a `problem` (the question's text, with `choices` for multiple
choice), a `solution`, and `image`, `images`, `video` or `videos` unless it is about text alone.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from datasets import Dataset, Image, IterableDataset, List
from pyarrow.lib import ArrowException

from vgr_trl.data.columns import (
    VIDEO_COLUMNS,
    image_columns,
    images_of,
    require_columns,
    undecoded,
    video_columns,
    videos_of,
)
from vgr_trl.data.images import open_image
from vgr_trl.data.prompts import SYSTEM_PROMPT, SystemTemplate, build_prompt
from vgr_trl.data.scan import scan
from vgr_trl.data.skipped import SkippedRow
from vgr_trl.data.streams import PLACE, prepare_stream
from vgr_trl.data.video import DEFAULT_VIDEO_OPTIONS, VideoOptions, frames_of, without_video_marks
from vgr_trl.data.video_rows import with_frames
from vgr_trl.errors import DataError, RewardError
from vgr_trl.rewards import resolve_solution


def row_problem(
    row: Mapping[str, Any],
    *,
    root: Path = Path(),
    needs_solution: bool = True,
    system_prompt: str | SystemTemplate | None = None,
    videos: VideoOptions = DEFAULT_VIDEO_OPTIONS,
) -> str | None:
    """Return why `row` cannot be used, in one sentence, or None if it can.

    Args:
        row: with undecoded or decoded images.
        root: folder that relative image paths start from.
        needs_solution: whether a row must say what is right (an accuracy reward is on).
        system_prompt: put before a `problem`; a template may fail on the row.
        videos: rate and limit of the frames of videos.

    Raises:
        ConfigError: the row has a video, and PyAV is not installed.
    """
    try:
        prompt = _prompt_of(row, system_prompt)
        if needs_solution:
            stated = row.get("solution") if row.get("solution") is not None else row.get("label_idx")
            resolve_solution(stated, row.get("choices"))
        images = images_of(row)
        if (images or videos_of(row)) and isinstance(prompt, str):
            return "its prompt is a text, but a row with images needs a conversation (a list of messages)"
        for value in images:
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
) -> dict[str, Any]:
    """Return a row in which `row_problem` finds nothing with its prompt and its images, those of videos included.

    Args:
        row: with undecoded or decoded images.
        root, system_prompt, videos: as in `row_problem`.
    """
    ready = {name: value for name, value in row.items() if name not in (*VIDEO_COLUMNS, PLACE)}
    ready["prompt"] = _prompt_of(row, system_prompt)
    if any(name in row for name in VIDEO_COLUMNS):
        ready.pop("image", None)
        ready["images"] = [open_image(value, root) for value in images_of(row)] + frames_of(row, videos, root)
    elif row.get("images") is not None:
        ready["images"] = [open_image(value, root) for value in row["images"]]
    elif row.get("image") is not None:
        ready["image"] = open_image(row["image"], root)
    return ready


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

    Raises:
        ConfigError: there are videos, and PyAV is not installed.
        DataError: the data set is empty, lacks the needed columns, or no row is left.
    """
    if isinstance(dataset, IterableDataset):
        examine = partial(
            row_problem, root=root, needs_solution=needs_solution, system_prompt=system_prompt, videos=videos
        )
        ready = partial(ready_row, root=root, system_prompt=system_prompt, videos=videos)
        return prepare_stream(dataset, split, needs_solution, examine, ready, on_skipped, shuffle_seed), []
    if len(dataset) == 0:
        raise DataError(f"The {split} data set has no rows: give a data set with at least one.")
    require_columns(dataset.column_names, split, needs_solution)
    dataset = _with_image_features(dataset, root)
    examine = partial(row_problem, root=root, needs_solution=needs_solution, system_prompt=system_prompt, videos=videos)
    reasons = scan(undecoded(dataset), examine, f"check rows ({split})")
    ids = dataset["id"] if "id" in dataset.column_names else range(len(dataset))
    skipped = [SkippedRow(split, row, ids[row], reason) for row, reason in enumerate(reasons) if reason is not None]
    if len(skipped) == len(dataset):
        raise DataError(
            f"None of the {len(dataset)} rows of the {split} data can be used; the first: {skipped[0].reason}."
        )
    if skipped:
        dataset = dataset.select([row for row, reason in enumerate(reasons) if reason is None])
    dataset = _with_prompts(dataset, system_prompt)
    return (with_frames(undecoded(dataset), videos, root) if video_columns(dataset.column_names) else dataset), skipped


def _prompt_of(row: Mapping[str, Any], system_prompt: str | SystemTemplate | None) -> Any:
    if row.get("prompt") is not None and row["prompt"] != []:
        prompt = _checked_prompt(row["prompt"])
    else:
        problem = row.get("problem")
        if not isinstance(problem, str) or not problem.strip():
            raise DataError("it has neither a prompt nor a problem")
        source = row.get("source") if isinstance(row.get("source"), str) else None
        prompt = build_prompt(problem, row.get("choices"), system_prompt=system_prompt, source=source)
    return without_video_marks(prompt) if videos_of(row) else prompt


def _checked_prompt(prompt: Any) -> Any:
    if isinstance(prompt, str) and prompt.strip():
        return prompt
    if not isinstance(prompt, list) or not all(isinstance(message, dict) for message in prompt):
        raise DataError(f"its prompt is a {type(prompt).__name__}: give a text or a conversation (a list of messages)")
    for message in prompt:
        if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str | list):
            raise DataError("a message of its prompt lacks a role or a content")
    if prompt[-1]["role"] == "assistant":
        raise DataError("its prompt ends with a message of the assistant, so there is nothing to answer")
    return prompt


def _with_prompts(dataset: Dataset, system_prompt: str | SystemTemplate | None) -> Dataset:
    videos = video_columns(dataset.column_names)
    if "prompt" in dataset.column_names and all(dataset["prompt"]) and not videos:
        return dataset
    if "prompt" in dataset.column_names and not isinstance(dataset.features["prompt"], List):
        raise DataError(
            "Some rows have a text as `prompt` and others only a `problem`: give all of them one or the other."
        )
    columns = [name for name in ("prompt", "problem", "choices", "source", *videos) if name in dataset.column_names]
    prompts = [_prompt_of(row, system_prompt) for row in undecoded(dataset.select_columns(columns))]
    if "prompt" in dataset.column_names:
        dataset = dataset.remove_columns("prompt")
    return dataset.add_column("prompt", prompts)


def _with_image_features(dataset: Dataset, root: Path) -> Dataset:
    """Turn columns of paths or bytes, as JSONL and other writers have them, into columns that decode on access."""
    for name in image_columns(dataset):
        feature = dataset.features[name]
        is_list = isinstance(feature, List)
        item = feature.feature if is_list else feature
        if isinstance(item, Image):
            continue
        if getattr(item, "dtype", None) == "string":
            paths = [_under(root, value) for value in dataset[name]]
            dataset = dataset.remove_columns(name).add_column(name, paths)
        try:
            dataset = dataset.cast_column(name, List(Image()) if is_list else Image())
        except (TypeError, ValueError, ArrowException) as error:
            raise DataError(f"The column `{name}` is of type {feature}: give images, paths or bytes.") from error
    return dataset


def _under(root: Path, value: Any) -> Any:
    if isinstance(value, list):
        return [_under(root, path) for path in value]
    return None if value is None else str((root / value).absolute())  # what follows may start from `root` again
