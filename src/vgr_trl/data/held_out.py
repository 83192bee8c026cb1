"""Rows that are held out of a data set without a split to evaluate on, such that no image is on both sides."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from datasets import Dataset

from vgr_trl.data.build.merge_plan import Row, split
from vgr_trl.data.rows.columns import FOLDER, IMAGE_COLUMNS, folder_of, images_of, undecoded
from vgr_trl.data.rows.images.opening import image_bytes
from vgr_trl.data.rows.text.marks import texts_of
from vgr_trl.errors import DataError

TEST_SHARE = 0.1


def hold_out(dataset: Dataset, seed: int, root: Path = Path()) -> tuple[Dataset, Dataset]:
    """Return the rows to train on, and a tenth to evaluate on; rows that share an image (or a question) stay together.

    Args:
        dataset: as `prepare_rows` gives it.
        seed: of the choice, which depends on nothing else but the images.

    Raises:
        DataError: all rows share images.
    """
    wanted = ("prompt", *IMAGE_COLUMNS, FOLDER)
    stored = undecoded(dataset.with_format(None))
    stored = stored.select_columns([name for name in wanted if name in stored.column_names])
    rows = [Row(0, place, _digests(row, root), "", "") for place, row in enumerate(stored)]
    try:
        train, test = split(rows, TEST_SHARE, seed)
    except DataError as error:
        raise DataError(
            f"The {len(rows)} rows cannot be split, for all share images: give rows to evaluate on."
        ) from error
    return dataset.select([row.position for row in train]), dataset.select([row.position for row in test])


def _digests(row: Mapping[str, Any], root: Path) -> tuple[str, ...]:
    shown = [image_bytes(value, folder_of(row, root)) for value in images_of(row)]
    what = shown or ["\0".join(texts_of(row["prompt"][-1:])).encode()]
    return tuple(hashlib.sha256(data).hexdigest() for data in what)
