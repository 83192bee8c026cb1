"""Rows as a run reads them: images decoded, once for all copies that a sampler asks for."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from datasets import Dataset
from PIL import Image

from vgr_trl.data.rows.columns import FOLDER, IMAGE_COLUMNS, PLACE, folder_of, images_of
from vgr_trl.data.rows.images.opening import open_image
from vgr_trl.data.rows.images.sizes import ANY_SIZE, ImageRule
from vgr_trl.data.rows.text.marks import placed
from vgr_trl.errors import DataError


def show_rows(
    batch: dict[str, list[Any]], *, split: str, root: Path, column: str, images: ImageRule
) -> dict[str, list[Any]]:
    """Rows as TRL gets them: marks replaced by parts, images decoded."""
    ready = {name: values for name, values in batch.items() if name not in (*IMAGE_COLUMNS, FOLDER, PLACE)}
    if "prompt" in batch:
        ready["prompt"] = [placed(prompt) for prompt in batch["prompt"]]
    names = [name for name in (*IMAGE_COLUMNS, FOLDER, PLACE) if name in batch]
    if set(names) & set(IMAGE_COLUMNS):
        rows = [dict(zip(names, values, strict=True)) for values in zip(*(batch[name] for name in names), strict=True)]
        opened = [[_reopened(value, row, split, root, images) for value in images_of(row)] for row in rows]
        ready[column] = opened if column == "images" else [found[0] if found else None for found in opened]
    return ready


def _reopened(value: Any, row: Mapping[str, Any], split: str, root: Path, images: ImageRule) -> Image.Image:
    """An image that could be read when the data were checked."""
    try:
        return images.fitted(open_image(value, folder_of(row, root)))
    except DataError as error:
        if PLACE not in row:
            raise
        reason = str(error).rstrip(".")
        name = value.get("path") if isinstance(value, Mapping) else value
        file = "" if not isinstance(name, str) or name in reason else f" ({str(folder_of(row, root) / name)[:200]})"
        raise DataError(
            f"Row {row[PLACE]} of the {split} data could be read when the run began, and cannot be any more: {reason}"
            f"{file}. Mend it and continue with resume_from_checkpoint; without the row a run takes another order."
        ) from error


class ReadOnce:
    """A data set whose rows are read, and their images decoded, once for all copies of them in one batch and the next.

    TRL's sampler gives every prompt G times in a batch, and the batch again for each micro-batch of a rollout, of which
    the trainer looks at the first.

    Args:
        rows: as `reads_alike` wants them.
    """

    def __init__(self, rows: Dataset) -> None:
        self._rows, self._last = rows, dict[int, dict[str, Any]]()

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Return rows by their numbers; equal ones are copies with the same images."""
        missing = [index for index in dict.fromkeys(indices) if index not in self._last]
        read = dict(zip(missing, self._rows.__getitems__(missing), strict=True)) if missing else {}
        self._last = {index: read[index] if index in read else self._last[index] for index in dict.fromkeys(indices)}
        return [dict(self._last[index]) for index in indices]


def reads_alike(dataset: object) -> bool:
    """Whether rows can be read by number and are the same every time; a transform of a user's own may draw lots."""
    if not isinstance(dataset, Dataset):
        return False
    return dataset.format["format_kwargs"].get("transform") is None or _shown(dataset) is not None


def fitted_by(dataset: Dataset) -> ImageRule:
    """Return what brings the images of `dataset` to the size in which a run reads them."""
    shown = _shown(dataset)
    return ANY_SIZE if shown is None else shown.keywords["images"]


def _shown(dataset: Dataset) -> partial[Any] | None:
    """The `show_rows` through which rows are read, None without."""
    transform = dataset.format["format_kwargs"].get("transform")
    return transform if isinstance(transform, partial) and transform.func is show_rows else None
