"""Rows of rollout batches, as they are cut out of one batch to go into another."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vgr_trl.batch.pixels import nbytes
from vgr_trl.batch.row_images import ROW_INPUTS, Images, owned, split_images, stack_images, store_images
from vgr_trl.batch.signals import RolloutSignals
from vgr_trl.batch.token_columns import Column, columns_of_signals, signals_of_columns, token_column
from vgr_trl.errors import DataError


@dataclass(eq=False)  # tensors do not compare to a bool
class Rows:
    """n completions with everything that TRL's loss reads for each of them, and their signals.

    Attributes:
        prompt_length: P.
        completion_length: T.
        columns: tensors and lists with one entry per row.
        images: image inputs of each row; tensors are one object where they are known to be equal.
        one_per_row: whether a row without images has an entry among the image inputs too.
    """

    prompt_length: int
    completion_length: int
    columns: dict[str, Any]
    images: list[Images]
    one_per_row: bool = False

    def __len__(self) -> int:
        return len(self.images)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors, image inputs that rows share counted once."""
        inputs = {id(value): value for images in self.images for value in images.values()}
        columns = [value for value in self.columns.values() if isinstance(value, torch.Tensor)]
        return sum(map(nbytes, [*columns, *inputs.values()]))

    @classmethod
    def of_batch(cls, batch: Mapping[str, Any], signals: RolloutSignals | None = None) -> "Rows":
        """Return the rows of a batch of TRL; nothing is copied.

        Columns of unknown names are kept with their rows.

        Args:
            batch: what `_generate_and_score_completions` returns.

        Raises:
            DataError: an entry of the batch cannot be assigned to rows.
        """
        count, prompt_length = batch["prompt_ids"].shape
        completion_length = batch["completion_ids"].size(1)
        images, one_per_row = split_images(batch, count)
        entries = {name: value for name, value in batch.items() if name not in ROW_INPUTS}
        entries |= columns_of_signals(signals)
        columns = {name: value for name, value in entries.items() if not _of_whole_batch(value)}
        rows = cls(prompt_length, completion_length, columns, images, one_per_row)
        for name, value in columns.items():
            rows._check(name, value)
        return rows

    def _check(self, name: str, value: Any) -> None:
        is_tensor = isinstance(value, torch.Tensor)
        found = f"a tensor of shape {tuple(value.shape)}" if is_tensor else f"a {type(value).__name__}"
        if not (is_tensor or isinstance(value, list | tuple)) or len(value) != len(self):
            raise DataError(
                f"The batch has {name}, {found}, which cannot be assigned to its {len(self)} rows: give a tensor or a "
                "list with one entry per row, or a single number."
            )
        if not is_tensor and not all(isinstance(entry, int | float | str | None) for entry in value):
            raise DataError(
                f"The batch has {name}, a list of other things than numbers and texts: give those or a tensor, so that "
                "it can be saved with a checkpoint."
            )
        column = token_column(name)
        if column is None:
            return
        widths = (self.width(column), 1) if column.may_be_single else (self.width(column),)
        if not is_tensor or value.size(-1) not in widths:
            raise DataError(
                f"The batch has {name}, {found}, but its prompts have {self.prompt_length} and its completions "
                f"{self.completion_length} tokens: give a tensor with one entry per token of the {column.along}."
            )

    def width(self, column: Column) -> int:
        """Return the tokens that `column` has an entry for."""
        widths = {"prompt": self.prompt_length, "completion": self.completion_length}
        return widths.get(column.along, self.prompt_length + self.completion_length)

    def take(self, indices: Sequence[int]) -> "Rows":
        """Return the rows with these numbers, in this order; rows that follow each other are not copied."""
        first, last = indices[0], indices[0] + len(indices)
        rows = slice(first, last) if list(indices) == list(range(first, last)) else list(indices)
        columns = {
            name: value[rows] if isinstance(value, torch.Tensor) else [value[index] for index in indices]
            for name, value in self.columns.items()
        }
        images = [self.images[index] for index in indices]
        return Rows(self.prompt_length, self.completion_length, columns, images, self.one_per_row)

    def narrowed(self, prompt_length: int, completion_length: int) -> "Rows":
        """Return the rows with only the last `prompt_length` and the first `completion_length` columns of tokens."""
        starts = {"prompt": self.prompt_length - prompt_length, "completion": 0}
        narrow = Rows(prompt_length, completion_length, {}, self.images, self.one_per_row)
        for name, value in self.columns.items():
            column = token_column(name)
            if column is not None and value.size(-1) == self.width(column):
                start = starts.get(column.along, starts["prompt"])
                value = value[..., start : start + narrow.width(column)]
            narrow.columns[name] = value
        return narrow

    def stored(self) -> "Rows":
        """Return copies on the CPU that keep no batch in memory, with equal image inputs only once."""
        columns = {
            name: owned(value, "cpu") if isinstance(value, torch.Tensor) else list(value)
            for name, value in self.columns.items()
        }
        return Rows(self.prompt_length, self.completion_length, columns, store_images(self.images), self.one_per_row)

    def signals(self) -> RolloutSignals | None:
        """Return the signals of the rows, None if there are none."""
        return signals_of_columns(self.columns)

    def into_batch(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return these rows as a batch of TRL, with the entries of `batch` that belong to no row, in its order."""
        images = stack_images(self.images, self.one_per_row)
        columns = {name: value for name, value in self.columns.items() if not name.startswith("signals.")}
        kept = {name: value for name, value in batch.items() if _of_whole_batch(value) and name not in ROW_INPUTS}
        found = {**kept, **columns, **images}
        return {name: found[name] for name in [*batch, *found] if name in found}


def _of_whole_batch(value: object) -> bool:
    return (
        value is None or isinstance(value, int | float | str) or (isinstance(value, torch.Tensor) and value.ndim == 0)
    )
