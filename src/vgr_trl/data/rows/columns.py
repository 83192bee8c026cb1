"""Columns of a data set: which ones are needed, and which are images or videos."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from datasets import Image, List, Video

IMAGE_COLUMNS = ("image", "images")
VIDEO_COLUMNS = ("video", "videos")
UNREADABLE = "__unreadable__"  # the column that says why there is no row at this place of a file
FOLDER = "__folder__"  # the column that says where a row's relative paths start, where files lie in several folders
PLACE = "__place__"  # the column in which rows carry their number on the way


def image_columns(dataset: Any) -> list[str]:
    """Return the columns of `dataset` that TRL takes images from; of a stream without known columns, look at a row."""
    names = getattr(dataset, "column_names", None)
    if names is None:
        names = list(next(iter(dataset), {}))
    return [name for name in IMAGE_COLUMNS if name in names]


def files_of(row: Mapping[str, Any], *names: str) -> list[Any]:
    """Return the files in the first of the columns `names` that the row has something in, be it one or a list."""
    value = next((row[name] for name in names if row.get(name) is not None), None)
    return list(value) if isinstance(value, list | tuple) else [] if value is None else [value]


def images_of(row: Mapping[str, Any]) -> list[Any]:
    """Return the images of `row`, decoded or not, in order; `images` counts before `image`, as in TRL."""
    return files_of(row, "images", "image")


def video_columns(names: Iterable[str]) -> list[str]:
    """Return which of the columns `names` hold videos."""
    return [name for name in VIDEO_COLUMNS if name in set(names)]


def videos_of(row: Mapping[str, Any]) -> list[Any]:
    """Return the videos of `row`, undecoded, in order; `videos` counts before `video`."""
    return files_of(row, "videos", "video")


def folder_of(row: Mapping[str, Any], root: Path) -> Path:
    """Return the folder that relative paths of `row` start from: `root`, where it does not say another."""
    return Path(row[FOLDER]) if row.get(FOLDER) else root


def undecoded(dataset: Any) -> Any:
    """Return a data set or stream whose images and videos come as bytes or paths."""
    return _with_decode(dataset, False)


def decoded(dataset: Any) -> Any:
    """Return a data set whose columns of images are known as such to whoever reads its features."""
    return _with_decode(dataset, True, IMAGE_COLUMNS)


def is_media(feature: Any) -> bool:
    """Return whether a column holds images or videos, one or a list of them."""
    return isinstance(feature.feature if isinstance(feature, List) else feature, Image | Video)


def _with_decode(dataset: Any, decode: bool, columns: Iterable[str] | None = None) -> Any:
    for name, feature in (dataset.features or {}).items():
        if not is_media(feature) or (columns is not None and name not in columns):
            continue
        several = isinstance(feature, List)
        kind = type(feature.feature if several else feature)(decode=decode)
        if not (decode and isinstance(kind, Video)):
            dataset = dataset.cast_column(name, List(kind) if several else kind)
    return dataset
