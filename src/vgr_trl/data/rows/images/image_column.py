"""The frames of a data set's videos, and images in numbered columns, as its column `images`."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow
from accelerate import PartialState
from datasets import Dataset, Features, Image, List, concatenate_datasets
from datasets.fingerprint import Hasher
from pyarrow import compute

from vgr_trl.data.rows.columns import (
    FOLDER,
    IMAGE_COLUMNS,
    VIDEO_COLUMNS,
    folder_of,
    is_media,
    video_columns,
    videos_of,
)
from vgr_trl.data.rows.images.opening import image_bytes
from vgr_trl.data.rows.images.video import VideoOptions, frames_of
from vgr_trl.data.rows.layouts import NUMBERED_IMAGES
from vgr_trl.data.rows.reading import images_in

ROWS_IN_MEMORY = 8  # frames are large; the rest waits in the cache file
JPEG_QUALITY = 95


def with_joined_images(dataset: Dataset, options: VideoOptions, root: Path = Path()) -> Dataset:
    """Return `dataset` with its numbered images, and the frames of its videos as JPEG, in order in the column `images`.

    They are written to the cache of `datasets`, where there is one, by one process of each machine.

    Args:
        dataset: with undecoded images and videos that can be read.
    """
    columns = video_columns(dataset.column_names)
    if not columns and not set(NUMBERED_IMAGES) & set(dataset.column_names):
        return dataset
    known = (*IMAGE_COLUMNS, *NUMBERED_IMAGES, *VIDEO_COLUMNS)
    shown = [name for name in known if name in dataset.column_names]
    folder = [FOLDER] if FOLDER in dataset.column_names else []

    def fill(row: Mapping[str, Any]) -> dict[str, Any]:
        start = folder_of(row, root)
        frames = [{"bytes": _encoded(frame), "path": None} for frame in frames_of(row, options, start)]
        return {"images": [*({"bytes": image_bytes(value, start), "path": None} for value in images_in(row)), *frames]}

    state = PartialState()
    with state.local_main_process_first():
        frames = dataset.select_columns([*shown, *folder]).map(
            fill,
            remove_columns=[*shown, *folder],
            features=Features({"images": List(Image(decode=False))}),
            writer_batch_size=ROWS_IN_MEMORY,
            new_fingerprint=_fingerprint(dataset, options, root, columns),
            desc="images and frames of videos",
        )
    return concatenate_datasets([dataset.remove_columns(shown), frames], axis=1)


def with_whole_paths(dataset: Dataset, root: Path) -> Dataset:
    """Return `dataset` with images that are paths alone as whole paths: `datasets` would read them from elsewhere."""
    names = [name for name in IMAGE_COLUMNS if is_media(dataset.features.get(name)) and _has_paths(dataset, name)]

    def fill(row: Mapping[str, Any]) -> dict[str, Any]:
        start = folder_of(row, root)
        return {name: _whole(row[name], start) for name in names}

    return dataset.map(fill, features=dataset.features, desc="paths of images") if names else dataset


def _has_paths(dataset: Dataset, name: str) -> bool:
    column = dataset.data.column(name)
    while pyarrow.types.is_list(column.type) or pyarrow.types.is_large_list(column.type):
        column = compute.list_flatten(column)
    stored = column.drop_null()
    return bool(compute.any(compute.is_null(compute.struct_field(stored, "bytes"))).as_py())


def _whole(value: Any, start: Path) -> Any:
    if isinstance(value, list):
        return [_whole(one, start) for one in value]
    if value is None or value["bytes"] is not None or value["path"] is None:
        return value
    return {"bytes": None, "path": str(start / value["path"])}


def _encoded(frame: Any) -> bytes:
    buffer = io.BytesIO()
    frame.save(buffer, "JPEG", quality=JPEG_QUALITY)
    return buffer.getvalue()


def _fingerprint(dataset: Dataset, options: VideoOptions, root: Path, columns: list[str]) -> str:
    """A name for the result that changes with the files too, so that no frames of an older file are found."""
    states = []
    for row in dataset.select_columns(columns):
        for value in videos_of(row):
            path = value.get("path") if isinstance(value, Mapping) else value
            if isinstance(path, str) and (root / path).is_file():
                state = (root / path).stat()
                states.append((path, state.st_size, state.st_mtime_ns))
    return str(Hasher.hash([dataset._fingerprint, options.fps, options.max_frames, str(root), states]))
