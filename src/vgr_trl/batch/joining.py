"""Rows of several batches joined into one batch, padded to the longest prompt and the longest completion."""

from collections.abc import Sequence
from typing import Any

import torch

from vgr_trl.batch.row_images import Images, move_images
from vgr_trl.batch.rows import Rows
from vgr_trl.batch.token_columns import token_column
from vgr_trl.errors import DataError


def join_rows(parts: Sequence[Rows], *, pad_token_id: int, pad_to_multiple_of: int | None = None) -> Rows:
    """Return all rows of `parts` as one, padded to the longest prompt and the longest completion.

    The first part, the rows of the batch to be trained on, decides about columns that not all parts have: what it
    lacks and no rule of `TOKEN_COLUMNS` fills in is dropped, because the loss does not read it.

    Args:
        parts: at least one; tensors of the result lie where those of the first part do.
        pad_to_multiple_of: P and T become multiples of it.

    Raises:
        DataError: a part lacks a column that the first part has and that cannot be filled in.
    """
    multiple = pad_to_multiple_of or 1
    prompt_length = max(part.prompt_length for part in parts)
    completion_length = max(part.completion_length for part in parts)
    joined = Rows(
        prompt_length + -prompt_length % multiple,
        completion_length + -completion_length % multiple,
        {},
        [],
        any(part.one_per_row for part in parts),
    )
    device = parts[0].columns["prompt_ids"].device
    for name in dict.fromkeys(name for part in parts for name in part.columns):
        first = next(part.columns[name] for part in parts if name in part.columns)
        if token_column(name) is not None:
            values = _token_column(name, parts, joined, pad_token_id)
        elif name in parts[0].columns or name in ("num_images", "num_tiles"):
            values = [_row_column(name, part) for part in parts]
        else:
            values = None
        if values is None:
            continue
        if isinstance(first, torch.Tensor):
            joined.columns[name] = _concatenated(name, [value.to(device, first.dtype) for value in values])
        else:
            joined.columns[name] = [entry for value in values for entry in value]
    joined.images = move_images(_images(parts), device)
    return joined


def _images(parts: Sequence[Rows]) -> list[Images]:
    """Image inputs of all rows, those that the first part has if it has any."""
    wanted = {name: None for row in parts[0].images for name in row}
    rows = [row for part in parts for row in part.images]
    if not wanted:
        return rows
    for row in rows:
        for name in wanted:
            if row and name not in row:
                raise _lacking(name)
    return [{name: row[name] for name in row if name in wanted} for row in rows]


def _token_column(name: str, parts: Sequence[Rows], joined: Rows, pad_token_id: int) -> list[torch.Tensor] | None:
    """The column `name` of each part at the width of `joined`; None if it is to be dropped."""
    column = token_column(name)
    assert column is not None
    present = [part.columns[name] for part in parts if name in part.columns]
    if len(present) < len(parts) and column.missing is None:
        if name not in parts[0].columns:
            return None
        raise _lacking(name)
    single = column.may_be_single and all(value.size(-1) == 1 for value in present)
    padding = pad_token_id if column.padding is None else column.padding
    values = []
    for part in parts:
        value = part.columns.get(name)
        if value is None:
            value = present[0].new_full((len(part), part.width(column)), column.missing)
        if single:
            values.append(value)
            continue
        if value.size(-1) != part.width(column):
            value = value.expand(len(part), part.width(column))
        left = 0 if column.along == "completion" else joined.prompt_length - part.prompt_length
        right = joined.width(column) - part.width(column) - left
        values.append(torch.nn.functional.pad(value, (left, right), value=padding))
    return values


def _row_column(name: str, part: Rows) -> Any:
    if name in part.columns:
        return part.columns[name]
    if name == "num_images":
        return [0] * len(part)
    if name == "num_tiles":  # TRL leaves it out of a batch in which each image is a single tile
        return _row_column("num_images", part)
    raise _lacking(name)


def _lacking(name: str) -> DataError:
    return DataError(
        f"A group to be put into the batch has no {name}, which the batch has: it was stored under other options, so "
        "continue with those, or start with an empty replay buffer."
    )


def _concatenated(name: str, values: list[torch.Tensor]) -> torch.Tensor:
    if len({value.shape[1:] for value in values}) > 1:
        shapes = " and ".join(str(tuple(value.shape)) for value in values)
        raise DataError(
            f"The batch and a group to be put into it have {name} of the shapes {shapes}: only its first dimension, "
            "the rows, may differ."
        )
    return torch.cat(values)
