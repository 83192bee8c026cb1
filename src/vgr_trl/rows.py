"""Rows of a TRL batch: take, trim, join and place them on processes; build the arguments of scoring from them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from PIL import Image
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from vgr_trl.errors import DataError
from vgr_trl.pixels import (
    IMAGE_INPUTS,
    PERTURBED,
    ROW_INPUTS,
    TOKEN_TYPES,
    Images,
    find_layout,
    fingerprint,
    image_inputs_of,
    image_tensors,
    joined,
    map_shared_tensors,
    parts_by_counts,
    split_images,
    stack_images,
    take_entries,
    tiles_by_tokens,
)

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
    *("teacher_logps", "teacher_top_logps", "teacher_top_ids"),
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
                cure = f"give a tensor or a list with an entry for each of {count} rows, or a number"
                raise DataError(f"The batch has {name}, which cannot be assigned to its rows: {cure}.")
        return cls(prompt_length, completion_length, columns, images, one_per_row)

    def width(self, name: str) -> int:
        """Return the width of a column in tokens, 0 if it has no token axis."""
        prompt, completion = self.prompt_length, self.completion_length
        return {None: 0, "prompt": prompt, "completion": completion, "sequence": prompt + completion}[token_axis(name)]

    def take(self, indices: Sequence[int]) -> "Rows":
        """Return the rows with these numbers, in this order; consecutive rows are not copied."""
        images = [self.images[index] for index in indices]
        return replace(self, columns=take_entries(self.columns, indices), images=images)

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
            name: value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else list(value)
            for name, value in self.columns.items()
        }
        images = map_shared_tensors(self.images, lambda value: value.to("cpu", copy=True), fingerprint)
        return replace(self, columns=columns, images=images)

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
    joined.images = map_shared_tensors(kept, lambda value: value.to(device))
    return joined


def _pad_column(name: str, parts: Sequence[Rows], joined: Rows, pad_token_id: int) -> list[Any]:
    """Return the column `name` of each part, padded to the width of `joined` if it has a token axis."""
    along = token_axis(name)
    present = [part.columns[name] for part in parts if name in part.columns]
    if len(present) < len(parts) and name not in _MISSING:
        raise _missing_column_error(name)
    if along is None:
        # TRL omits `num_tiles` if every image is a single tile.
        return [part.columns.get(name, part.columns.get("num_images", [0] * len(part))) for part in parts]
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


def _missing_column_error(name: str) -> DataError:
    cure = "resume with the options that it was stored with, or start with an empty replay buffer"
    return DataError(f"A stored group has no {name}, which the batch has: {cure}.")


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


_SCORED_BY_ROW = ("input_ids", "attention_mask", "tool_mask", "num_images", "num_tiles", *TOKEN_TYPES)
ImagesOfRows = Sequence[Sequence[Image.Image]]


@dataclass
class Prompts:
    """Prompts that N completions are sampled from.

    Attributes:
        ids: tokens of each row's prompt, image tokens included.
        images: images of each row; None if no row has images.
        fields: outputs of the processor beside the tokens.
    """

    ids: Sequence[Sequence[int]]
    images: ImagesOfRows | None
    fields: Mapping[str, Any]


@dataclass(frozen=True)
class Turns:
    """Turns of N completions that may call tools: the policy's tokens, and the images of prompts and tools.

    Attributes:
        own: for each row, 1 per token of the policy and 0 per token of a tool.
        images: images of each row, the prompt's first.
        returned: images of each row that tools returned.
        fields: pixel inputs of all images; empty if no tool returned an image: the prompts' inputs are complete.
        messages: messages of each completion, for records only.
    """

    own: Sequence[Sequence[int]]
    images: ImagesOfRows
    returned: ImagesOfRows
    fields: Mapping[str, torch.Tensor]
    messages: Sequence[Any] = ()

    def take(self, rows: range) -> "Turns":
        """Return the turns of some rows, without pixel inputs."""
        part = slice(rows.start, rows.stop)
        return Turns(self.own[part], self.images[part], self.returned[part], {})


def build_scoring_inputs(
    prompts: Prompts,
    completion_ids: Sequence[Sequence[int]],
    *,
    pad_token_id: int,
    vision_token_ids: Sequence[int] = (),
    valid: Sequence[bool] | None = None,
    own: Sequence[Sequence[int]] | None = None,
    pad_to_multiple_of: int | None = None,
) -> dict[str, Any]:
    """Build the arguments of TRL's scoring on the CPU, except for the model and the size of chunks.

    Args:
        prompts: prompts, with the images and pixel inputs of completions whose tools returned images.
        completion_ids: tokens of each completion.
        pad_token_id: pads tokens.
        vision_token_ids: placeholder tokens of images, which give the tiles of each row.
        valid: whether the tokens of each row count; None: all count.
        own: for each row, 1 per token of the policy and 0 per token of a tool, for `tool_mask`; None without tools.
        pad_to_multiple_of: P and T become multiples of it.

    Returns:
        Inputs with `input_ids` and `attention_mask` (N, P + T).
    """
    prompt_ids, prompt_mask = pad_rows(prompts.ids, pad_token_id, "left", pad_to_multiple_of)
    completions, completion_mask = pad_rows(completion_ids, pad_token_id, "right", pad_to_multiple_of)
    if valid is not None:
        completion_mask = completion_mask * torch.tensor(valid).unsqueeze(1)
    columns = {"prompt_ids": prompt_ids, "prompt_mask": prompt_mask}
    columns |= {"completion_ids": completions, "completion_mask": completion_mask}
    inputs = scoring_inputs(columns) | {"num_images": None, "num_tiles": None}
    if own is not None:
        inputs["tool_mask"], _ = pad_rows(own, 1, "right", pad_to_multiple_of)
    if prompts.images is None:
        return inputs
    inputs["num_images"] = [len(images or ()) for images in prompts.images]
    for name in prompts.fields.keys() & TOKEN_TYPES:
        types, _ = pad_rows(prompts.fields[name], 0, "left", pad_to_multiple_of)
        inputs[name] = pad(types, (prompt_ids.size(1) - types.size(1), completions.size(1)))
    if images := image_tensors(prompts.fields):
        is_image = torch.isin(inputs["input_ids"], torch.tensor(vision_token_ids))  # (N, P + T)
        is_image[:, prompt_ids.size(1) :] &= inputs.get("tool_mask", torch.ones(1)) == 0
        inputs |= images | {"num_tiles": tiles_by_tokens(images, inputs["num_images"], is_image)}
    return inputs


def valid_tokens(batch: Mapping[str, Any]) -> torch.Tensor:
    """Return the mask (N, T) of the tokens of a batch that count in the loss."""
    mask: torch.Tensor = batch["completion_mask"] * batch.get("tool_mask", 1)
    return mask


def scoring_inputs(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Build the arguments of TRL's scoring from its batch, except for the model and the size of chunks."""
    names = ("num_images", "num_tiles", *TOKEN_TYPES, *IMAGE_INPUTS)
    return {
        "input_ids": torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1),
        "attention_mask": torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1),
        "logits_to_keep": batch["completion_ids"].size(1),
        **{name: batch[name] for name in names if batch.get(name) is not None},
    }


def take_scoring_rows(inputs: Mapping[str, Any], rows: range) -> dict[str, Any]:
    """Take consecutive rows of the arguments of a scoring pass; pixel inputs only if these rows have images.

    Raises:
        DataError: an input cannot be assigned to rows.
    """
    given = {name: value for name, value in inputs.items() if value is not None}
    if len(rows) == len(given["input_ids"]):
        return given
    if unknown := given.keys() - {*_SCORED_BY_ROW, "logits_to_keep", *IMAGE_INPUTS}:
        raise DataError(
            f"The input {min(unknown)} cannot be cut into chunks: score all rows at once (batch_size=None)."
        )
    return take_rows(given, rows)


def take_rows(batch: Mapping[str, Any], rows: Sequence[int]) -> dict[str, Any]:
    """Take rows of a micro-batch of TRL, or of the arguments of a scoring pass; batch-level entries are kept.

    Rows without an image get no pixel inputs, unless all rows are taken, in their order.

    Raises:
        DataError: pixel inputs cannot be assigned to rows.
    """
    ids = batch["prompt_ids"] if "prompt_ids" in batch else batch["input_ids"]
    part = take_entries({name: value for name, value in batch.items() if name not in IMAGE_INPUTS}, rows)
    if list(rows) == list(range(len(ids))):
        return part | image_inputs_of(batch)
    if batch.get("pixel_values") is not None and any(part.get("num_images") or [1]):
        images, one_per_row = split_images({**batch, PERTURBED: None}, len(ids))
        part |= stack_images([images[row] for row in rows], one_per_row)
    return part


def text_inputs(batch: Mapping[str, Any], prompts: Prompts, pad_token_id: int) -> dict[str, Any]:
    """Build the arguments of TRL's scoring for the completions of a batch after prompts without images.

    Args:
        batch: a batch of TRL.
        prompts: one prompt without images per row.
        pad_token_id: pads tokens.

    Raises:
        DataError: a prompt is longer than the prompts of the batch.
    """
    rows, width = batch["prompt_ids"].shape
    if (longest := max(map(len, prompts.ids))) > width:
        raise DataError(f"A prompt without its image has {longest} tokens, with it at most {width}: images add some.")
    ids, mask = (each.to(batch["prompt_ids"]) for each in pad_rows(prompts.ids, pad_token_id, "left", width))
    other: dict[str, Any] = {**batch, "prompt_ids": ids, "prompt_mask": mask}
    for name in TOKEN_TYPES:
        if batch.get(name) is not None:
            types, _ = pad_rows(prompts.fields.get(name) or [[0]] * rows, 0, "left", width)
            other[name] = pad(types, (0, batch[name].size(1) - width)).to(batch[name])
    if given := image_inputs_of(batch):
        one_per_row = find_layout(given, sum(batch["num_images"])).units["pixel_values"] == "row"
        other |= {name: torch.zeros_like(value) if one_per_row else value[:0] for name, value in given.items()}
    other |= {name: [0] * rows for name in ("num_images", "num_tiles") if batch.get(name) is not None}
    return scoring_inputs(other)


def stacked_inputs(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Concatenate the rows of batches, or of the arguments of TRL's scoring, with equal P and T."""
    result = dict(parts[0])
    for name, value in parts[0].items() if len(parts) > 1 else ():
        if isinstance(value, torch.Tensor) and value.ndim > 0:
            result[name] = torch.cat([part[name] for part in parts])
        elif isinstance(value, list | tuple):
            result[name] = [entry for part in parts for entry in part[name]]
    return result


def pixels_of_rows(
    fields: Mapping[str, Any], images: Sequence[Sequence[Image.Image]], own: Sequence[int], batch: Mapping[str, Any]
) -> list[torch.Tensor]:
    """Return the perturbed `pixel_values` of each of the N rows of a batch.

    Args:
        fields: outputs of the processor for the distinct perturbed prompts, in order.
        images: images of each distinct prompt.
        own: number of each row's prompt among the distinct prompts.
        batch: a batch of TRL with the unperturbed images.

    Raises:
        DataError: the processor gives perturbed images other shapes than the images.
    """
    like = batch["pixel_values"]
    given = image_tensors(fields)
    pixels = given["pixel_values"].to(like.device, like.dtype)
    tiles = batch.get("num_tiles")
    tiles = None if tiles is None else [tiles[own.index(index)] for index in range(len(images))]
    parts = parts_by_counts(given, [len(of_prompt or ()) for of_prompt in images], tiles)["pixel_values"]
    rows = [pixels[parts[index]] for index in own]
    if joined(rows).shape != like.shape:
        found = f"pixel_values of shape {tuple(joined(rows).shape)}, images {tuple(like.shape)}"
        raise DataError(f"Perturbed images give {found}: switch off options that perturb images for this processor.")
    return rows


def rows_with_images(batch: Mapping[str, Any]) -> torch.Tensor:
    """Return whether each row of a batch has an image, (N,) bool."""
    return torch.tensor(batch.get("num_images") or [0] * len(batch["prompt_ids"])) > 0


def split_perturbed_pixels(batch: dict[str, Any]) -> dict[str, Any]:
    """Split `perturbed_pixel_values` of a batch by row, so that TRL shuffles and splits them."""
    perturbed = batch.get("perturbed_pixel_values")
    if perturbed is None:
        return batch
    parts = parts_by_counts(image_inputs_of(batch), batch["num_images"], batch.get("num_tiles"))["pixel_values"]
    return {**batch, "perturbed_pixel_values": [perturbed[part] for part in parts]}


def pad_rows(
    rows: Sequence[Sequence[int]], value: int, side: Literal["left", "right"], multiple: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad rows of tokens; return tokens and their mask, (N, S) each.

    Args:
        rows: tokens of each row.
        value: pads tokens.
        side: side of the padding.
        multiple: S becomes a multiple of it.
    """
    ids = [torch.tensor(row, dtype=torch.long) for row in rows]
    padded = []
    for tokens, padding in ((ids, value), ([torch.ones_like(row) for row in ids], 0)):
        equal = pad_sequence(tokens, batch_first=True, padding_value=padding, padding_side=side)
        missing = -equal.size(1) % (multiple or 1)
        padded.append(pad(equal, (missing, 0) if side == "left" else (0, missing), value=padding))
    return padded[0], padded[1]
