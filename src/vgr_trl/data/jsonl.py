"""Files of the user's own with one JSON object per line: `prompt`, `answer`, `images`, `videos`, and `choices` if any.

Images and videos are paths; videos stay where they are. A prompt may mark where images belong by `<image>`, once per
image.
"""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from vgr_trl.data.questions import (
    Candidate,
    Origin,
    Question,
    answer_of,
    id_of,
    make_question,
    options_of,
    text_of,
    to_candidates,
    value_of,
)
from vgr_trl.data.sources import Source
from vgr_trl.errors import DataError

MARK = re.compile(r"[ \t]*<image>[ \t]*\n?")


@dataclass(frozen=True)
class Keys:
    """Names of the columns; several: the first that a row has."""

    prompt: tuple[str, ...] = ("prompt", "problem", "question")
    answer: tuple[str, ...] = ("answer", "solution")
    image: tuple[str, ...] = ("images", "image")
    video: tuple[str, ...] = ("videos", "video")
    choices: tuple[str, ...] = ("choices", "options")


def read(source: Source, keys: Keys = Keys(), image_dir: Path | None = None) -> Iterator[Candidate]:
    """Yield the questions of `source`, or why a row is none.

    Args:
        source: JSONL files (JSON and Parquet too).
        keys: names of the columns.
        image_dir: folder that relative paths start from; None: that of the files.
    """
    root = source.folder() if image_dir is None else image_dir
    return to_candidates(source.records(), partial(_questions, keys=keys, root=root))


def names_videos(source: Source, keys: Keys = Keys()) -> bool:
    """Return whether the first row of `source` has a column of videos."""
    first = next((record for _, record in source.records() if not isinstance(record, str)), {})
    return any(name in first for name in keys.video)


def _questions(origin: Origin, row: Mapping[str, Any], *, keys: Keys, root: Path) -> list[Question]:
    choices = value_of(row, *keys.choices)
    options = None if choices is None or choices == [] else options_of(choices)
    images = _files(value_of(row, *keys.image), "image", root)
    return [
        make_question(
            id=id_of(row, origin, "id"),
            source=value_of(row, "source") if isinstance(row.get("source"), str) else Path(origin.file).stem,
            problem=without_marks(_prompt(row, keys), len(images)),
            choices=options,
            answer=answer_of(row, options, *keys.answer),
            images=images,
            videos=_existing(_files(value_of(row, *keys.video), "video", root)),
        )
    ]


def without_marks(prompt: str, images: int) -> str:
    """Return `prompt` without `<image>` marks, which trainers and processors take for places of further images.

    The mark of a single image is taken off; several become `<image 1>`, `<image 2>`, …

    Raises:
        DataError: there are marks, but not as many as images.
    """
    marks = len(MARK.findall(prompt))
    if marks == 0:
        return prompt
    if marks != images:
        raise DataError(f"its prompt has {marks} <image> marks, but there are {images} images")
    if images == 1:
        before, after = MARK.split(prompt)
        return f"{before.rstrip()}\n{after.lstrip()}".strip()
    numbers = iter(range(1, images + 1))
    return re.sub("<image>", lambda _: f"<image {next(numbers)}>", prompt)


def _prompt(row: Mapping[str, Any], keys: Keys) -> str:
    """The text of a question, also where it is a conversation of one message of the user."""
    prompt = value_of(row, *keys.prompt)
    if not isinstance(prompt, list):
        return text_of(row, *keys.prompt)
    if len(prompt) != 1 or not isinstance(prompt[0], dict) or prompt[0].get("role") != "user":
        raise DataError("its prompt is a list: it must be a text, or one message of the user")
    return text_of(prompt[0], "content")


def _files(value: Any, kind: str, root: Path) -> list[Any]:
    """The files of a row, paths from `root` on, absolute so that nothing else has to know where they start."""
    values = value if isinstance(value, list) else [] if value is None else [value]
    found: list[Any] = []
    for number, item in enumerate(values, start=1):
        if isinstance(item, dict) and item.get("bytes") is None:
            item = item.get("path")
        if isinstance(item, str) and item:
            found.append(str((root / item).absolute()))
        elif isinstance(item, dict | bytes) and kind == "image":
            found.append(item)
        else:
            raise DataError(f"its {kind} {number} is {ascii(item)[:80]}: it must be a path")
    return found


def _existing(videos: list[Any]) -> list[str]:
    """The paths of videos, which are not opened here."""
    for path in videos:
        if not os.path.isfile(path):  # Path.is_file raises for a name that is too long
            raise DataError(f"video file {path[:200]} does not exist")
    return videos
