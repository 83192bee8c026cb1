"""Files of the user's own: `prompt`, `solution` or `answer`, `images`, `videos`, and `choices` if any.

Images and videos are paths; videos stay where they are. `<image>` in a prompt marks the place of an image.
"""

import os
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from vgr_trl.data.read.sources import Source
from vgr_trl.data.rows.images.opening import ADDRESS, read_image
from vgr_trl.data.rows.images.places import path_within
from vgr_trl.data.rows.naming import renamed_row
from vgr_trl.data.rows.questions import (
    Candidate,
    Origin,
    Question,
    id_of,
    make_question,
    text_of,
    to_candidates,
    value_of,
)
from vgr_trl.data.rows.reading import KEYS, Keys, read_row
from vgr_trl.data.rows.regions import COLUMNS, as_shares, boxes_of, in_pixels_of_its_image
from vgr_trl.errors import DataError


def read(source: Source, keys: Keys = KEYS, image_dir: Path | None = None) -> Iterator[Candidate]:
    """Yield the questions of `source`, or why a row is none.

    Args:
        image_dir: folder that relative paths start from and images lie in; None: that of the files.
    """
    root = source.folder() if image_dir is None else image_dir.absolute()
    return to_candidates(source.records(), partial(_questions, keys=keys, root=root))


def names_videos(source: Source, keys: Keys = KEYS) -> bool:
    """Return whether the first row of `source` has a column of videos."""
    return any(name in _first(source) for name in keys.video)


def _questions(origin: Origin, row: Mapping[str, Any], *, keys: Keys, root: Path) -> list[Question]:
    row = renamed_row(row, keys)
    reading = read_row(row)
    images = [_from(root, value) for value in reading.images]
    for path in images:
        if isinstance(path, str) and path and not ADDRESS.match(path):
            path_within(root, path)
    return [
        make_question(
            id=id_of(row if isinstance(row.get("id"), str | int) else {}, origin, "id"),  # no row is lost for its name
            source=value_of(row, "source") if isinstance(row.get("source"), str) else Path(origin.file).stem,
            problem=_question(reading.prompt),
            choices=reading.choices,
            answer=reading.answer,
            images=images,
            videos=[_existing(_from(root, value)) for value in reading.videos],
            regions=_regions(row, images),
            needs_image=False,
        )
    ]


def names_regions(source: Source) -> bool:
    """Return whether the first row of `source` has a column of boxes."""
    return any(name in _first(source) for name in COLUMNS)


def _first(source: Source) -> Mapping[str, Any]:
    return next((record for _, record in source.records() if not isinstance(record, str)), {})


def _regions(row: Mapping[str, Any], images: list[Any]) -> list[list[float]]:
    """The boxes of a row of one image; none where it cannot be read, which is told when it is encoded."""
    if len(images) != 1:
        return []
    size = (1, 1)
    if in_pixels_of_its_image(row):
        try:
            size = read_image(images[0]).size
        except DataError:
            return []
    return as_shares(boxes_of(row, size))


def _question(prompt: str | list[dict[str, Any]]) -> str:
    """The text of a question, also where it is a conversation of one message of the user."""
    if isinstance(prompt, str):
        return prompt
    if len(prompt) != 1 or prompt[0]["role"] != "user":
        raise DataError("its prompt is a conversation: a converted row has a text, or one message of the user")
    return text_of(prompt[0], "content")


def _from(root: Path, value: Any) -> Any:
    """A file of a row, as a path from `root` on where it is one, so that nothing else has to know where they start."""
    if isinstance(value, Mapping) and value.get("bytes") is None:
        value = value.get("path")
    is_path = isinstance(value, str) and value and not ADDRESS.match(value)
    return str((root / value).absolute()) if is_path else value


def _existing(video: Any) -> str:
    """The path of a video, which is not opened here."""
    if not isinstance(video, str) or not video:
        raise DataError(f"its video is {ascii(video)[:80]}: it must be a path")
    if not os.path.isfile(video):  # Path.is_file raises for a name that is too long
        raise DataError(f"video file {video[:200]} does not exist")
    return video
