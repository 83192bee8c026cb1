"""Turn TRL's dictionaries into `Batch` and back: its batches and micro-batches, and the arguments of its scoring."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vgr_trl.batch import Batch, join_batches, take_entries
from vgr_trl.errors import DataError
from vgr_trl.pixels import IMAGE_INPUTS, PERTURBED, TOKEN_TYPES, RowImages, image_inputs_of
from vgr_trl.sharing.prefix_split import find_groups, first_rows, is_image_token, sort_by_group

OLD_LOGPS = "old_per_token_logps"
_NAMES = {
    "num_items_in_batch": "num_items",
    "tool_mask": "by_policy",
    OLD_LOGPS: "old_logps",
    "ref_per_token_logps": "reference_logps",
    "sampling_per_token_logps": "engine_logps",
    "importance_sampling_ratio": "engine_ratio",
}
_COUNTS = ("num_images", "num_tiles")


def from_trl(batch: Mapping[str, Any]) -> Batch:
    """Turn a batch or micro-batch of TRL 1.16 into a `Batch`; unknown columns are kept."""
    columns = {_NAMES.get(name, name): value for name, value in batch.items() if value is not None}
    pixels = {name: columns.pop(name) for name in (*IMAGE_INPUTS, PERTURBED) if name in columns}
    pixels = {name: torch.cat(value) if isinstance(value, list) else value for name, value in pixels.items()}
    images = RowImages(pixels, columns.pop("num_images", None), columns.pop("num_tiles", None))
    return Batch.of_columns(columns, images)


def to_trl(batch: Batch) -> dict[str, Any]:
    """Turn a `Batch` into a batch of TRL, without perturbed images."""
    names = {ours: name for name, ours in _NAMES.items()}
    columns = {names.get(name, name): value for name, value in batch.all_columns.items()}
    return columns | image_inputs_of(batch.images.tensors) | _counts_of(batch.images)


def perturbed_by_row(batch: Batch) -> dict[str, list[Tensor]]:
    """Return perturbed pixels as a list by row, which TRL shuffles and splits; {} without any."""
    pixels = batch.images.tensors.get(PERTURBED)
    return {} if pixels is None else {PERTURBED: [pixels[part] for part in batch.images.slices[PERTURBED]]}


def from_scoring(input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, options: Mapping[str, Any]) -> Batch:
    """Turn the arguments of TRL's scoring into a `Batch`.

    Args:
        input_ids: (N, P + T).
        attention_mask: (N, P + T).
        logits_to_keep: T.
        options: further arguments; a pass takes images and token types.

    Raises:
        DataError: an option is a tensor, but neither a pixel input nor a token type.
    """
    tensors = {name for name, value in options.items() if isinstance(value, Tensor)}
    if unknown := tensors - {*IMAGE_INPUTS, *TOKEN_TYPES}:
        output = f"The processor of this model gives {min(unknown)}"
        raise DataError(f"{output}, which no pass takes: use another model, or report its family.")
    prompt, completion = slice(-logits_to_keep), slice(-logits_to_keep, None)
    columns = {"prompt_ids": input_ids[:, prompt], "completion_ids": input_ids[:, completion]}
    columns |= {"prompt_mask": attention_mask[:, prompt], "completion_mask": attention_mask[:, completion]}
    return from_trl({**options, **columns})


def to_scoring(batch: Batch) -> dict[str, Any]:
    """Return the arguments of TRL's scoring, except for the model and the size of chunks."""
    return {**batch.model_inputs, "logits_to_keep": batch.length, **_counts_of(batch.images)}


def _counts_of(images: RowImages) -> dict[str, Any]:
    return {name: value for name in _COUNTS if (value := vars(images)[name]) is not None}


def split_anew(batches: Sequence[Mapping[str, Any]], count: int) -> list[dict[str, Any]]:
    """Redistribute saved rows over `count` micro-batches, if the saving run had more or fewer."""
    whole = join_batches([*map(from_trl, batches)], pad_token_id=0)
    size = len(whole) // count
    parts = (whole.take(range(part * size, (part + 1) * size)) for part in range(count))
    return [to_trl(part) | perturbed_by_row(part) for part in parts]


def shuffle_whole_groups(batch: dict[str, Any], config: Any = None) -> dict[str, Any]:
    """Shuffle a generation batch as TRL's `shuffle_sequence_dict` does, but keep the completions of a prompt together.

    Draws the same random numbers as TRL. Values without an entry per row (numbers, None) are kept. Pixel inputs that
    TRL has cut into rows become one object per group.

    Args:
        batch: `prompt_ids` and `prompt_mask` (N, P), and tensors or lists with one entry per row.
        config: configuration of a model whose completions may hold images; None: only prompts hold images.
    """
    pixels = {name: batch[name] for name in IMAGE_INPUTS if batch.get(name) is not None}
    by_row = list(zip(*pixels.values(), strict=True)) if pixels else None
    groups = find_groups(batch["prompt_ids"], batch["prompt_mask"], by_row)
    batch = batch | {name: _share_pixels(parts, groups) for name, parts in pixels.items() if isinstance(parts, list)}
    if config is not None and isinstance(pixels.get("image_grid_thw"), list):
        groups = find_groups(batch["prompt_ids"], batch["prompt_mask"], _select_prompt_pixels(batch, config))
    order = sort_by_group(torch.randperm(len(groups)).tolist(), groups)
    return take_entries(batch, order)


def _select_prompt_pixels(batch: Mapping[str, Any], config: Any) -> list[list[Tensor]]:
    """Return patches and grids of each row's prompt, whose images precede the images of its completion."""
    names = "prompt_ids", "completion_ids"
    tokens = (is_image_token(batch[name], config).sum(1).tolist() for name in names)  # image tokens, (N,) each
    parts = []
    for values, grids, prompt, completion in zip(batch["pixel_values"], batch["image_grid_thw"], *tokens, strict=True):
        patches = len(values) * prompt // max(prompt + completion, 1)
        parts.append([values[:patches], grids[grids.prod(-1).cumsum(0) <= patches]])
    return parts


def _share_pixels(values: Sequence[Tensor], groups: Sequence[int]) -> list[Tensor]:
    kept = [values[row].detach().clone() for row in first_rows(groups)]
    return [kept[group] for group in groups]
