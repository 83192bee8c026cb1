"""The rollout batch as inputs of TRL's scoring pass, and pixels of perturbed images dealt to its rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from PIL import Image

from vgr_trl.batch.image_parts import IMAGE_INPUTS, find_layout, image_inputs_of, parts_by_counts, tiles_by_tokens
from vgr_trl.errors import DataError

TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")


@dataclass
class Prompts:
    """Prompts of N completions as they are given to generation.

    Attributes:
        ids: per row, the tokens of its prompt, image tokens included.
        images: per row, its images; None if no row has any.
        fields: what the processor made of text and images beside the tokens.
    """

    ids: Sequence[Sequence[int]]
    images: Sequence[Sequence[Image.Image]] | None
    fields: Mapping[str, Any]


@dataclass
class ScoringBatch:
    """Inputs of a scoring pass over N completions of T tokens behind prompts of P tokens.

    Attributes:
        prompt_ids, prompt_mask: (N, P) int64, padded on the left.
        completion_ids, completion_mask: (N, T) int64, padded on the right.
        fields: pixel inputs and token types (N, P + T).
        num_images: images per row; None without images.
        num_tiles: rows of `pixel_values` per row where images are cut into tiles, else None.
    """

    prompt_ids: torch.Tensor
    prompt_mask: torch.Tensor
    completion_ids: torch.Tensor
    completion_mask: torch.Tensor
    fields: dict[str, torch.Tensor] = field(default_factory=dict)
    num_images: list[int] | None = None
    num_tiles: list[int] | None = None

    @property
    def input_ids(self) -> torch.Tensor:
        """(N, P + T)."""
        return torch.cat([self.prompt_ids, self.completion_ids], dim=1)

    @property
    def attention_mask(self) -> torch.Tensor:
        """(N, P + T)."""
        return torch.cat([self.prompt_mask, self.completion_mask], dim=1)

    def inputs(self) -> dict[str, Any]:
        """Keyword arguments of TRL's scoring, but for the model and the size of its chunks."""
        return {
            "input_ids": self.input_ids,
            "attention_mask": self.attention_mask,
            "logits_to_keep": self.completion_ids.size(1),
            "num_images": self.num_images,
            "num_tiles": self.num_tiles,
            **self.fields,
        }


def build_scoring_batch(
    prompts: Prompts,
    completion_ids: Sequence[Sequence[int]],
    *,
    pad_token_id: int,
    vision_token_ids: Sequence[int] = (),
    valid: Sequence[bool] | None = None,
    pad_to_multiple_of: int | None = None,
) -> ScoringBatch:
    """Return the padded tensors of a rollout batch, on the CPU.

    Args:
        vision_token_ids: placeholder tokens of images, from which the tiles of a row are counted.
        valid: per row, whether its tokens count; None: all do.
        pad_to_multiple_of: P and T are made multiples of it.
    """
    prompt_ids, prompt_mask = _padded(prompts.ids, pad_token_id, True, pad_to_multiple_of)
    completions, completion_mask = _padded(completion_ids, pad_token_id, False, pad_to_multiple_of)
    if valid is not None:
        completion_mask = completion_mask * torch.tensor(valid).unsqueeze(1)
    batch = ScoringBatch(prompt_ids, prompt_mask, completions, completion_mask)
    if prompts.images is None:
        return batch
    batch.num_images = [len(images or ()) for images in prompts.images]
    for name, value in prompts.fields.items():
        if name in TOKEN_TYPES:
            types, _ = _padded(value, 0, True, pad_to_multiple_of)
            missing = prompt_ids.size(1) - types.size(1)
            batch.fields[name] = torch.nn.functional.pad(types, (missing, completions.size(1)))
    batch.fields |= image_tensors(prompts.fields)
    if given := image_inputs_of(batch.fields):
        is_image = torch.isin(prompt_ids, torch.tensor(vision_token_ids))  # (N, P)
        batch.num_tiles = tiles_by_tokens(given, batch.num_images, is_image)
    return batch


def valid_tokens(batch: Mapping[str, Any]) -> torch.Tensor:
    """Return the mask (N, T) of the tokens of a batch of TRL that count in the loss."""
    mask: torch.Tensor = batch["completion_mask"] * batch.get("tool_mask", 1)
    return mask


def scoring_inputs(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of TRL's scoring for its batch, but for the model and the size of chunks."""
    names = ("num_images", "num_tiles", *TOKEN_TYPES, *IMAGE_INPUTS)
    return {
        "input_ids": torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1),
        "attention_mask": torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1),
        "logits_to_keep": batch["completion_ids"].size(1),
        **{name: batch[name] for name in names if batch.get(name) is not None},
    }


def text_inputs(batch: Mapping[str, Any], prompts: Prompts, pad_token_id: int) -> dict[str, Any]:
    """Return the arguments of TRL's scoring of the completions of a batch behind other prompts, which have no images.

    Raises:
        DataError: a prompt is longer than those of the batch.
    """
    rows, width = batch["prompt_ids"].shape
    if (longest := max(map(len, prompts.ids))) > width:
        raise DataError(f"A prompt without its image has {longest} tokens, with it at most {width}: images add some.")
    other: dict[str, Any] = dict(batch)
    for name, value in zip(("prompt_ids", "prompt_mask"), _padded(prompts.ids, pad_token_id, True, width), strict=True):
        other[name] = value.to(batch[name])
    for name in TOKEN_TYPES:
        if batch.get(name) is not None:
            types, _ = _padded(prompts.fields.get(name) or [[0]] * rows, 0, True, width)
            missing = batch[name].size(1) - width
            other[name] = torch.nn.functional.pad(types, (0, missing)).to(batch[name])
    if given := image_inputs_of(batch):
        one_per_row = find_layout(given, sum(batch["num_images"])).units["pixel_values"] == "row"
        other |= {name: torch.zeros_like(value) if one_per_row else value[:0] for name, value in given.items()}
    for name in ("num_images", "num_tiles"):
        if batch.get(name) is not None:
            other[name] = [0] * rows
    return scoring_inputs(other)


def stacked_inputs(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return inputs of TRL's scoring, of equally long batches, as those of one batch behind the other."""
    first = parts[0]
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
    """Return the `pixel_values` of each of the N rows of a batch, from those of its different prompts.

    Args:
        fields: what the processor made of the different prompts, in order.
        images: per different prompt, its images.
        own: per row, the index of its prompt.
        batch: a batch of TRL's with the same images, unperturbed.

    Raises:
        DataError: the processor has cut the perturbed images otherwise than the images themselves.
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
            f"The perturbed images give pixel_values of shape {tuple(joined(rows).shape)}, the images themselves "
            f"{tuple(like.shape)}: switch off what depends on perturbed images for this processor."
        )
    return rows


def rows_with_images(batch: Mapping[str, Any]) -> torch.Tensor:
    """Return which rows of a batch of TRL have an image, (N,) bool."""
    counts = batch.get("num_images") or [0] * len(batch["prompt_ids"])
    return torch.tensor(counts) > 0


def with_perturbed_rows(batch: dict[str, Any]) -> dict[str, Any]:
    """Return a batch of TRL with `perturbed_pixel_values` dealt to its rows, so that TRL shuffles and splits them."""
    perturbed = batch.get("perturbed_pixel_values")
    if perturbed is None:
        return batch
    parts = parts_by_counts(image_inputs_of(batch), batch["num_images"], batch.get("num_tiles"))["pixel_values"]
    return {**batch, "perturbed_pixel_values": [perturbed[part] for part in parts]}


def joined(pixels: list[torch.Tensor] | torch.Tensor) -> torch.Tensor:
    """Return pixels of rows as the one tensor that a model takes."""
    return torch.cat(pixels) if isinstance(pixels, list) else pixels


def _padded(
    rows: Sequence[Sequence[int]], value: int, left: bool, multiple: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    length = max(map(len, rows))
    length += -length % (multiple or 1)
    ids = torch.full((len(rows), length), value)
    mask = torch.zeros(len(rows), length, dtype=torch.long)
    for index, row in enumerate(rows):
        columns = slice(length - len(row), length) if left else slice(0, len(row))
        ids[index, columns] = torch.as_tensor(row)
        mask[index, columns] = 1
    return ids, mask


def image_tensors(fields: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the pixel inputs that a processor has made, which may be lists of arrays, as tensors."""
    return {
        name: value if isinstance(value, torch.Tensor) else torch.tensor(np.array(value))
        for name, value in image_inputs_of(fields).items()
    }
