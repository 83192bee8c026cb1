"""Image tokens and pixel inputs of a forward pass."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from vgr_trl.batch.image_parts import IMAGE_INPUTS, Parts, UnknownParts, image_inputs_of, parts_by_tokens
from vgr_trl.errors import DataError
from vgr_trl.sharing.counts import CannotShare


def image_token_ids(config: Any) -> tuple[int, ...]:
    """Ids of the placeholder tokens of images in a model's config; empty for a text model.

    Batches with videos are not shared, and without a video its placeholder, which can be sampled, is a token like any.
    """
    names = ("image_token_id", "image_token_index")
    return tuple({getattr(config, name) for name in names if isinstance(getattr(config, name, None), int)})


def is_image_token(input_ids: torch.Tensor, config: Any) -> torch.Tensor:
    """Bool, shape of `input_ids` (N, S): placeholder of an image."""
    return torch.isin(input_ids, torch.tensor(image_token_ids(config), device=input_ids.device, dtype=input_ids.dtype))


def has_images(inputs: Mapping[str, Any]) -> bool:
    """Whether the pixel inputs of a pass hold an image; Idefics has an entry of padding for a row without one."""
    pixels, mask = inputs.get("pixel_values"), inputs.get("pixel_attention_mask")
    return pixels is not None and len(pixels) > 0 and (mask is None or bool(mask.any()))


def without_empty_images(inputs: Mapping[str, Any], agree: Callable[[bool], bool] | None = None) -> dict[str, Any]:
    """The inputs, without the pixel inputs if they hold no image.

    TRL cuts the pixels of a batch into chunks; for a chunk whose rows have no image nothing is left, or padding, on
    which models fail.

    Args:
        agree: as `share_prompts` takes it, where parameters are sharded: the vision tower then runs in every process
            or in none.

    Raises:
        DataError: some processes have images and others none, which `agree` tells all of them.
    """
    mine = has_images(inputs)
    if agree is not None and not agree(mine) and not agree(not mine):
        raise DataError(
            f"A batch of this process has {'images' if mine else 'no images'}, unlike that of another process, "
            "and the parameters are sharded: give every row an image, or none, or use ZeRO-2 or DDP."
        )
    empty = inputs.get("pixel_values") is not None and not mine
    return {name: value for name, value in inputs.items() if not (empty and name in IMAGE_INPUTS)}


def images_as_tensors(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs, with sizes and positions of images as tensors where they are lists or arrays of numbers."""
    pixels = inputs.get("pixel_values")
    given = {name: inputs[name] for name in IMAGE_INPUTS[1:] if isinstance(inputs.get(name), list | tuple | np.ndarray)}
    if not isinstance(pixels, torch.Tensor) or not given:
        return dict(inputs)
    try:
        return {
            **inputs,
            **{name: torch.tensor(np.array(value), device=pixels.device) for name, value in given.items()},
        }
    except (TypeError, ValueError):  # uneven, or of tensors on a GPU
        return dict(inputs)


def rows_of_images(inputs: Mapping[str, Any], is_image: torch.Tensor) -> Parts:
    """Per pixel input, the slice of its first dimension that belongs to each row.

    Raises:
        CannotShare: the pixel inputs cannot be assigned to rows with certainty.
    """
    given = image_inputs_of(inputs)
    try:
        return parts_by_tokens(given, is_image) if given else {}
    except UnknownParts as error:
        raise CannotShare(error.reason) from error
