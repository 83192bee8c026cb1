"""Columns of a data set: which ones are needed, and which are images or videos."""

from collections.abc import Iterable, Mapping
from typing import Any

from datasets import Image, List, Video

from vgr_trl.errors import DataError

IMAGE_COLUMNS = ("image", "images")
VIDEO_COLUMNS = ("video", "videos")


def image_columns(dataset: Any) -> list[str]:
    """Return the columns of `dataset` that TRL takes images from; of a stream without known columns, look at a row."""
    names = getattr(dataset, "column_names", None)
    if names is None:
        names = list(next(iter(dataset), {}))
    return [name for name in IMAGE_COLUMNS if name in names]


def images_of(row: Mapping[str, Any]) -> list[Any]:
    """Return the images of `row`, decoded or not, in order; `images` counts before `image`, as in TRL."""
    if row.get("images") is not None:
        return list(row["images"])
    return [row["image"]] if row.get("image") is not None else []


def video_columns(names: Iterable[str]) -> list[str]:
    """Return which of the columns `names` hold videos."""
    return [name for name in VIDEO_COLUMNS if name in set(names)]


def videos_of(row: Mapping[str, Any]) -> list[Any]:
    """Return the videos of `row`, undecoded, in order; `videos` counts before `video`."""
    if row.get("videos") is not None:
        return list(row["videos"]) if isinstance(row["videos"], list | tuple) else [row["videos"]]
    return [row["video"]] if row.get("video") is not None else []


def require_columns(names: Iterable[str], split: str, needs_solution: bool) -> None:
    """Raise `DataError` if no row of a data set with the columns `names` could be used."""
    names = list(names)
    if not {"prompt", "problem"} & set(names):
        raise DataError(f"The {split} data has the columns {names}: it needs `prompt`, or `problem` with `solution`.")
    if needs_solution and not {"solution", "label_idx"} & set(names):
        raise DataError(
            f"The {split} data has the columns {names}: the accuracy reward needs `solution` (letter, index or text)."
        )


def undecoded(dataset: Any) -> Any:
    """Return a data set or stream whose images and videos come as bytes or paths."""
    for name, feature in (dataset.features or {}).items():
        if name not in (*IMAGE_COLUMNS, *VIDEO_COLUMNS):
            continue
        for kind in (Image, Video):
            if isinstance(feature, kind):
                dataset = dataset.cast_column(name, kind(decode=False))
            elif isinstance(feature, List) and isinstance(feature.feature, kind):
                dataset = dataset.cast_column(name, List(kind(decode=False)))
    return dataset
