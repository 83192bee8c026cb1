"""Rows that a sampler asks for again and again, read once."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from datasets import Dataset

from vgr_trl.data.rows.schema import show_rows


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
    transform = dataset.format["format_kwargs"].get("transform")
    return transform is None or (isinstance(transform, partial) and transform.func is show_rows)
