"""A part of a micro-batch as inputs of TRL's pass, and what the pass returns for all of it."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from vgr_trl.batch.image_parts import IMAGE_INPUTS
from vgr_trl.batch.inputs import TOKEN_TYPES
from vgr_trl.batch.row_images import PERTURBED, split_images, stack_images
from vgr_trl.skipping.live import Window

_PER_TOKEN = ("input_ids", "attention_mask", *TOKEN_TYPES)
_OF_IMAGES = {*IMAGE_INPUTS, "num_images", "num_tiles"}


def narrowed(inputs: Mapping[str, Any], window: Window, live: torch.Tensor | None = None) -> dict[str, Any]:
    """Return the inputs of TRL's `_get_per_token_logps_and_entropies` for a part of its rows and columns.

    Args:
        inputs: its named arguments but for the model: `logits_to_keep` is T; None where there is nothing.
        live: (N, T) bool; behind the last live token of a row there is padding then. None: there is what there is.

    Raises:
        DataError: pixel inputs cannot be assigned to rows, some of which are left out.
    """
    ids = inputs["input_ids"]  # (N, P + T)
    start = ids.size(1) - inputs["logits_to_keep"] - window.prompt
    columns = slice(start, start + window.prompt + window.completion)
    part = dict(inputs) | {"logits_to_keep": window.completion}
    every = len(window.rows) == len(ids)
    for name in _PER_TOKEN:
        if inputs.get(name) is not None:
            part[name] = (inputs[name] if every else inputs[name][window.rows])[:, columns]
    if live is not None:
        read = live[window.rows, : window.completion].flip(1).cumsum(1).flip(1) > 0  # (rows, columns)
        part["attention_mask"] = part["attention_mask"] * torch.nn.functional.pad(read, (window.prompt, 0), value=True)
    if not window.images:
        return {name: value for name, value in part.items() if name not in _OF_IMAGES}
    if every:
        return part
    return _with_images_of(window.rows, inputs, part, len(ids))


def take_rows(batch: Mapping[str, Any], rows: Sequence[int]) -> dict[str, Any]:
    """Return some rows of a micro-batch of TRL; what belongs to no row stays.

    Raises:
        DataError: pixel inputs cannot be assigned to rows.
    """
    part = dict(batch)
    for name, value in batch.items():
        if isinstance(value, list):
            part[name] = [value[row] for row in rows]
        elif isinstance(value, torch.Tensor) and value.ndim > 0 and name not in IMAGE_INPUTS:
            part[name] = value[list(rows)]
    return _with_images_of(
        rows, {name: value for name, value in batch.items() if name != PERTURBED}, part, len(batch["prompt_ids"])
    )


def _with_images_of(rows: Sequence[int], batch: Mapping[str, Any], part: dict[str, Any], count: int) -> dict[str, Any]:
    """Replace in `part` the images of a batch of `count` rows by those of some of them."""
    for name in ("num_images", "num_tiles"):
        if batch.get(name) is not None:
            part[name] = [batch[name][row] for row in rows]
    if batch.get("pixel_values") is not None:
        images, one_per_row = split_images(batch, count)
        part |= dict.fromkeys(IMAGE_INPUTS) | stack_images([images[row] for row in rows], one_per_row)
    return {name: value for name, value in part.items() if name not in IMAGE_INPUTS or value is not None}


def widened(values: torch.Tensor, window: Window, live: torch.Tensor, rest: torch.Tensor | None) -> torch.Tensor:
    """Return what a pass over a part gives for the live tokens of all rows and columns, (N, T).

    Args:
        values: (rows, columns) of the part.
        live: (N, T) bool.
        rest: (N, T), values of the other tokens; None: 0.
    """
    wide = torch.nn.functional.pad(values, (0, live.size(1) - values.size(1)))
    index = torch.tensor(window.rows, device=values.device)
    every = wide.new_zeros(live.shape).index_copy(0, index, wide)
    return torch.where(live, every, every.new_zeros(()) if rest is None else rest.detach().to(every).nan_to_num())
