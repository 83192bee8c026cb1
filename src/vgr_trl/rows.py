"""Rows of a TRL batch: take, trim, join and place them on processes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.nn.functional import pad

from vgr_trl.errors import DataError
from vgr_trl.pixels import (
    ROW_INPUTS,
    Images,
    clone_to,
    move_images,
    split_images,
    stack_images,
    store_images,
)
from vgr_trl.token_types import TOKEN_TYPES

OLD_LOGPS = "old_per_token_logps"
VIEWS = "signals.views."  # prefix of the names of perturbations
EXTRA = "signals.extra."  # prefix of the names of named signals (N, T)
LAYERED = ("signals.attention.vision", "signals.attention.instruction", "signals.attention.region")  # (N, L, T)
# Columns of TRL 1.16's batches by their token axis: P tokens of the prompt, padded on the left, T tokens of the
# completion, padded on the right, or both.
_PROMPT_COLUMNS = {"prompt_ids", "prompt_mask"}
_COMPLETION_COLUMNS = {
    *("completion_ids", "completion_mask", "tool_mask", "importance_sampling_ratio", "reference_hidden"),
    *("old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps"),
    *("token_advantages", "values", "returns"),
}
_MAY_BE_SINGLE = "importance_sampling_ratio"  # (N, T), or (N, 1) with one value per row
_PAD_VALUES = {"tool_mask": 1.0, _MAY_BE_SINGLE: 1.0}  # other columns: 0, ids: the tokenizer's
# Values for rows from a batch without the column.
_MISSING = {"tool_mask": 1.0, **dict.fromkeys((*TOKEN_TYPES, "num_images", "num_tiles"), 0.0)}


def token_axis(name: str) -> Literal["prompt", "completion", "sequence"] | None:
    """Return the token axis of a column: the tokens along its last dimension, None if it has no such dimension."""
    if name in _COMPLETION_COLUMNS or (name.startswith("signals.") and ".num_" not in name):
        return "completion"
    if name in _PROMPT_COLUMNS:
        return "prompt"
    return "sequence" if name in TOKEN_TYPES else None


@dataclass(eq=False)  # tensors do not compare to a bool
class Rows:
    """n completions with all columns that TRL's loss reads, and their signals.

    Attributes:
        prompt_length: P.
        completion_length: T.
        columns: tensors and lists with one entry per row.
        images: image inputs of each row; rows known to have equal inputs share their tensors.
        one_per_row: whether rows without images have image inputs too.
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
        """Bytes of the tensors; shared image inputs count once."""
        inputs = {id(value): value for images in self.images for value in images.values()}
        columns = [value for value in self.columns.values() if isinstance(value, torch.Tensor)]
        return sum(value.nbytes for value in [*columns, *inputs.values()])

    @classmethod
    def from_batch(cls, batch: Mapping[str, Any]) -> "Rows":
        """Split a batch of TRL into rows, without copying; unknown columns are kept.

        Args:
            batch: batch of `_generate_and_score_completions`, with `signals_to_columns`.

        Raises:
            DataError: an entry of the batch cannot be assigned to rows.
        """
        count, prompt_length = batch["prompt_ids"].shape
        completion_length = batch["completion_ids"].size(1)
        images, one_per_row = split_images(batch, count)
        entries = {name: value for name, value in batch.items() if name not in ROW_INPUTS}
        columns = {name: value for name, value in entries.items() if not _is_per_batch(value)}
        for name, value in columns.items():
            if not isinstance(value, torch.Tensor | list | tuple) or len(value) != count:
                raise DataError(
                    f"The batch has {name}, which cannot be assigned to its {count} rows: give a tensor or a list with "
                    "one entry per row, or a single number."
                )
        return cls(prompt_length, completion_length, columns, images, one_per_row)

    def width(self, name: str) -> int:
        """Return the width of a column in tokens, 0 if it has no token axis."""
        along = token_axis(name)
        if along is None:
            return 0
        return (along != "completion") * self.prompt_length + (along != "prompt") * self.completion_length

    def take(self, indices: Sequence[int]) -> "Rows":
        """Return the rows with these numbers, in this order; consecutive rows are not copied."""
        first, last = indices[0], indices[0] + len(indices)
        rows = slice(first, last) if list(indices) == list(range(first, last)) else list(indices)
        columns = {
            name: value[rows] if isinstance(value, torch.Tensor) else [value[index] for index in indices]
            for name, value in self.columns.items()
        }
        images = [self.images[index] for index in indices]
        return Rows(self.prompt_length, self.completion_length, columns, images, self.one_per_row)

    def trim(self, prompt_length: int, completion_length: int) -> "Rows":
        """Trim the rows to the last `prompt_length` and the first `completion_length` tokens."""
        narrow = Rows(prompt_length, completion_length, {}, self.images, self.one_per_row)
        for name, value in self.columns.items():
            width = narrow.width(name)
            if width and value.size(-1) == self.width(name):
                start = 0 if token_axis(name) == "completion" else self.prompt_length - prompt_length
                value = value[..., start : start + width]
            narrow.columns[name] = value
        return narrow

    def stored(self) -> "Rows":
        """Copy the rows to the CPU, equal image inputs once; no batch is kept in memory."""
        columns = {
            name: clone_to(value, "cpu") if isinstance(value, torch.Tensor) else list(value)
            for name, value in self.columns.items()
        }
        return Rows(self.prompt_length, self.completion_length, columns, store_images(self.images), self.one_per_row)

    def into_batch(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Build a batch of TRL from these rows and the batch-level entries of `batch`, in its order."""
        images = stack_images(self.images, self.one_per_row)
        columns = {name: value for name, value in self.columns.items() if not name.startswith("signals.")}
        kept = {name: value for name, value in batch.items() if _is_per_batch(value) and name not in ROW_INPUTS}
        found = {**kept, **columns, **images}
        return {name: found[name] for name in [*batch, *found] if name in found}


def _is_per_batch(value: object) -> bool:
    return value is None or isinstance(value, int | float | str) or getattr(value, "ndim", 1) == 0


def join_rows(parts: Sequence[Rows], *, pad_token_id: int, pad_to_multiple_of: int | None = None) -> Rows:
    """Join rows, padded to the longest prompt and the longest completion.

    The first part, the rows of the batch to train on, decides about columns that not all parts have: columns that it
    lacks are filled in from `_MISSING`, or dropped, because the loss does not read them.

    Args:
        parts: at least one part; the result is on the device of the first.
        pad_token_id: pads tokens.
        pad_to_multiple_of: P and T become multiples of it.

    Raises:
        DataError: a part lacks a column of the first part, without a value in `_MISSING`.
    """
    multiple = pad_to_multiple_of or 1
    longest = max(part.prompt_length for part in parts), max(part.completion_length for part in parts)
    prompt, completion = (length + -length % multiple for length in longest)
    joined = Rows(prompt, completion, {}, [], any(part.one_per_row for part in parts))
    device = parts[0].columns["prompt_ids"].device
    known = parts[0].columns.keys() | _MISSING.keys()
    for name in dict.fromkeys(name for part in parts for name in part.columns if name in known):
        values = _pad_column(name, parts, joined, pad_token_id)
        if isinstance(values[0], torch.Tensor):
            joined.columns[name] = torch.cat([value.to(device, values[0].dtype) for value in values])
        else:
            joined.columns[name] = [entry for value in values for entry in value]
    wanted = {name for row in parts[0].images for name in row}
    rows = [row for part in parts for row in part.images]
    for row in rows:
        if row and not wanted <= row.keys():
            raise _missing_column_error(min(wanted - row.keys()))
    kept = [{name: row[name] for name in row if name in wanted or not wanted} for row in rows]
    joined.images = move_images(kept, device)
    return joined


def _pad_column(name: str, parts: Sequence[Rows], joined: Rows, pad_token_id: int) -> list[Any]:
    """Return the column `name` of each part, padded to the width of `joined` if it has a token axis."""
    along = token_axis(name)
    present = [part.columns[name] for part in parts if name in part.columns]
    if len(present) < len(parts) and name not in _MISSING:
        raise _missing_column_error(name)
    if along is None:
        return [part.columns[name] if name in part.columns else _missing_counts(name, part) for part in parts]
    if name == _MAY_BE_SINGLE and all(value.size(-1) == 1 for value in present):
        return present
    undefined = float("nan") if name.startswith((VIEWS, EXTRA)) else 0
    padding = pad_token_id if name in ("prompt_ids", "completion_ids") else _PAD_VALUES.get(name, undefined)
    values = []
    for part in parts:
        width, left = part.width(name), 0 if along == "completion" else joined.prompt_length - part.prompt_length
        value = part.columns.get(name, present[0].new_full((len(part), 1), _MISSING.get(name, 0)))
        value = value if value.size(-1) == width else value.expand(len(part), width)
        values.append(pad(value, (left, joined.width(name) - width - left), value=padding))
    return values


def _missing_counts(name: str, part: Rows) -> list[int]:
    none: list[int] = [0] * len(part)
    # TRL omits `num_tiles` if every image is a single tile.
    return part.columns.get("num_images", none) if name == "num_tiles" else none


def _missing_column_error(name: str) -> DataError:
    return DataError(
        f"A stored group has no {name}, which the batch has: it was stored with other options, so "
        "continue with the options of that run, or start with an empty replay buffer."
    )


@dataclass(frozen=True)
class Placement:
    """Placement of the completions of a rollout batch on the processes.

    The rows of all processes in order are the completions of all prompts in order. A group is spread over several
    processes if their number of rows is no multiple of G.

    Attributes:
        rows: completions on each process, N.
        num_generations: completions per prompt, G.
        process_index: this process.
        num_processes: number of processes with `rows` completions each.
    """

    rows: int
    num_generations: int
    process_index: int = 0
    num_processes: int = 1

    @property
    def num_groups(self) -> int:
        """Groups on all processes together."""
        return self.rows * self.num_processes // self.num_generations

    def holders(self, group: int) -> range:
        """Return the processes with completions of `group`."""
        first = group * self.num_generations
        return range(first // self.rows, (first + self.num_generations - 1) // self.rows + 1)

    def here(self, group: int) -> list[tuple[int, int]]:
        """Return the completions of `group` on this process as pairs (row of this process, completion of the group)."""
        offset = group * self.num_generations - self.process_index * self.rows
        return [(offset + index, index) for index in range(self.num_generations) if 0 <= offset + index < self.rows]

    def holder(self, group: int) -> int:
        """Return the process that stores the whole `group`: the process with its first completion."""
        return self.holders(group)[0]
