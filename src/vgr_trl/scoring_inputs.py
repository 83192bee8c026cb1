"""Build the arguments of TRL's scoring from prompts and completions; take, join and pad their rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from PIL import Image
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from vgr_trl.errors import DataError
from vgr_trl.pixels import (
    IMAGE_INPUTS,
    PERTURBED,
    find_layout,
    image_inputs_of,
    image_tensors,
    joined,
    parts_by_counts,
    split_images,
    stack_images,
    tiles_by_tokens,
)
from vgr_trl.token_types import TOKEN_TYPES

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
    inputs: dict[str, Any] = {
        "input_ids": torch.cat([prompt_ids, completions], dim=1),
        "attention_mask": torch.cat([prompt_mask, completion_mask], dim=1),
        "logits_to_keep": completions.size(1),
        "num_images": None,
        "num_tiles": None,
    }
    if own is not None:
        inputs["tool_mask"], _ = pad_rows(own, 1, "right", pad_to_multiple_of)
    if prompts.images is None:
        return inputs
    inputs["num_images"] = [len(images or ()) for images in prompts.images]
    for name in prompts.fields.keys() & TOKEN_TYPES:
        types, _ = pad_rows(prompts.fields[name], 0, "left", pad_to_multiple_of)
        padding = (prompt_ids.size(1) - types.size(1), completions.size(1))
        inputs[name] = pad(types, padding)
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

    Raises:
        DataError: pixel inputs cannot be assigned to rows.
    """
    part, index = dict(batch), slice(rows.start, rows.stop) if isinstance(rows, range) else list(rows)
    for name, value in batch.items():
        if isinstance(value, list | tuple):
            part[name] = [value[row] for row in rows]
        elif isinstance(value, torch.Tensor) and value.ndim > 0 and name not in IMAGE_INPUTS:
            part[name] = value[index]
    ids = batch["prompt_ids"] if "prompt_ids" in batch else batch["input_ids"]
    return take_images(rows, {**batch, PERTURBED: None}, part, len(ids))


def take_images(rows: Sequence[int], batch: Mapping[str, Any], part: dict[str, Any], count: int) -> dict[str, Any]:
    """Add the image inputs of some rows to `part`; none if the rows have no images.

    Args:
        rows: numbers of the rows.
        batch: the batch, with its image inputs.
        part: the other columns of the rows.
        count: rows of the batch.

    Raises:
        DataError: pixel inputs cannot be assigned to rows.
    """
    part = {name: value for name, value in part.items() if name not in IMAGE_INPUTS}
    counts = [name for name in ("num_images", "num_tiles") if batch.get(name) is not None]
    part |= {name: [batch[name][row] for row in rows] for name in counts}
    if batch.get("pixel_values") is not None and any(part.get("num_images", [1])):
        images, one_per_row = split_images(batch, count)
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
    other: dict[str, Any] = dict(batch)
    ids, mask = pad_rows(prompts.ids, pad_token_id, "left", width)
    other |= {"prompt_ids": ids.to(batch["prompt_ids"]), "prompt_mask": mask.to(batch["prompt_mask"])}
    for name in TOKEN_TYPES:
        if batch.get(name) is not None:
            types, _ = pad_rows(prompts.fields.get(name) or [[0]] * rows, 0, "left", width)
            missing = batch[name].size(1) - width
            other[name] = pad(types, (0, missing)).to(batch[name])
    if given := image_inputs_of(batch):
        one_per_row = find_layout(given, sum(batch["num_images"])).units["pixel_values"] == "row"
        other |= {name: torch.zeros_like(value) if one_per_row else value[:0] for name, value in given.items()}
    other |= {name: [0] * rows for name in ("num_images", "num_tiles") if batch.get(name) is not None}
    return scoring_inputs(other)


def stacked_inputs(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Concatenate the arguments of TRL's scoring of batches with equal P and T."""
    first = parts[0]
    if len(parts) == 1:
        return dict(first)
    result = dict(first)
    for name, value in first.items():
        if isinstance(value, torch.Tensor):
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
        raise DataError(
            f"Perturbed images give pixel_values of shape {tuple(joined(rows).shape)}, images {tuple(like.shape)}: "
            "switch off options that perturb images for this processor."
        )
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
