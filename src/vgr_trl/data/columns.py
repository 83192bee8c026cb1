"""Which columns of a data set hold images."""

from typing import Any

IMAGE_COLUMNS = ("image", "images")


def image_columns(dataset: Any) -> list[str]:
    """Return the columns of `dataset` that TRL takes images from; of a stream without known columns, look at a row."""
    names = getattr(dataset, "column_names", None)
    if names is None:
        names = list(next(iter(dataset), {}))
    return [name for name in IMAGE_COLUMNS if name in names]
