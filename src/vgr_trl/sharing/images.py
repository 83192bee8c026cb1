"""Which part of the pixel inputs belongs to which row of a batch."""

from collections.abc import Callable, Mapping
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch

from vgr_trl.errors import DataError
from vgr_trl.sharing.report import CannotShare

IMAGE_INPUTS = (
    "pixel_values",
    "image_grid_thw",
    "pixel_attention_mask",
    "image_sizes",
    "image_position_ids",
    "spatial_shapes",
)


def image_token_ids(config: Any) -> tuple[int, ...]:
    """Ids of the placeholder tokens of images in a model's config; empty for a text model.

    Batches with videos are not shared, and without a video its placeholder, which can be sampled, is a token like any.
    """
    names = ("image_token_id", "image_token_index")
    return tuple({getattr(config, name) for name in names if isinstance(getattr(config, name, None), int)})


def is_image_token(input_ids: torch.Tensor, config: Any) -> torch.Tensor:
    """Bool, shape of `input_ids` (N, S): placeholder of an image."""
    return torch.isin(input_ids, torch.tensor(image_token_ids(config), device=input_ids.device, dtype=input_ids.dtype))


def without_empty_images(inputs: Mapping[str, Any], agree: Callable[[bool], bool] | None = None) -> dict[str, Any]:
    """The inputs, without the pixel inputs if they hold no image.

    TRL cuts the pixels of a batch into chunks; for a chunk whose rows have no image nothing is left, on which models
    fail.

    Args:
        inputs: of a forward pass, by name.
        agree: as `share_prompts` takes it, where parameters are sharded: the vision tower then runs in every process
            or in none.

    Raises:
        DataError: some processes have images and others none, which `agree` tells all of them.
    """
    pixels = inputs.get("pixel_values")
    empty = isinstance(pixels, torch.Tensor) and pixels.size(0) == 0
    has_images = pixels is not None and not empty
    if agree is not None and not agree(has_images) and not agree(not has_images):
        raise DataError(
            f"A batch of this process has {'images' if has_images else 'no images'}, unlike that of another process, "
            "and the parameters are sharded: give every row an image, or none, or use ZeRO-2 or DDP."
        )
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


def rows_of_images(inputs: Mapping[str, Any], is_image: torch.Tensor) -> dict[str, list[slice]]:
    """Per pixel input, the slice of its first dimension that belongs to each row.

    Args:
        inputs: inputs of a forward pass; the pixel inputs among them are the ones that are not None.
        is_image: (N, S) bool, placeholder tokens.

    Raises:
        CannotShare: the pixel inputs cannot be assigned to rows with certainty.
    """
    given = {name: inputs[name] for name in IMAGE_INPUTS if inputs.get(name) is not None}
    pixels = given.get("pixel_values")
    if not given:
        return {}
    if pixels is None or any(not isinstance(value, torch.Tensor) for value in given.values()):
        raise CannotShare("pixel inputs of an unknown form")
    tokens = is_image.sum(1).tolist()  # (N,)
    if "image_grid_thw" in given:
        patches = given["image_grid_thw"].prod(-1).tolist()
        images = _images_by_tokens(tokens, patches)
        starts = [0, *accumulate(patches)]
        bounds = {
            "pixel_values": [slice(starts[part.start], starts[part.stop]) for part in images],
            "image_grid_thw": images,
        }
        return _all_known(given, bounds)
    if "spatial_shapes" in given:  # one entry per tile, each worth a token per square of patches
        tiles = _images_by_tokens(tokens, given["spatial_shapes"].prod(-1).tolist())
        return _all_known(given, dict.fromkeys(("pixel_values", "spatial_shapes", "pixel_attention_mask"), tiles))
    if pixels.ndim == 5 and "image_sizes" not in given:
        if pixels.size(0) != len(tokens):
            raise CannotShare("pixel inputs of an unknown form")
        rows = [slice(row, row + 1) for row in range(len(tokens))]  # padded to one entry per row, as Idefics has them
        return _all_known(given, {"pixel_values": rows, "pixel_attention_mask": rows})
    if "image_sizes" in given or "image_position_ids" in given:
        images = _images_by_runs(is_image, pixels.size(0)) or _images_by_area(tokens, given.get("image_sizes"))
        return _all_known(given, dict.fromkeys(("pixel_values", "image_sizes", "image_position_ids"), images))
    return _all_known(given, {"pixel_values": _images_of_equal_size(tokens, pixels.size(0))})


def _all_known(given: Mapping[str, Any], bounds: dict[str, list[slice]]) -> dict[str, list[slice]]:
    unknown = set(given) - set(bounds)
    if unknown:
        raise CannotShare(f"the input {min(unknown)} beside pixel_values")
    return {name: bounds[name] for name in given}


def _slices(counts: list[int]) -> list[slice]:
    return [slice(start, end) for start, end in pairwise([0, *accumulate(counts)])]


def _images_by_tokens(tokens: list[int], patches: list[int]) -> list[slice]:
    """Images in order, each worth patches / merge tokens, dealt to rows until their tokens are used up."""
    if not sum(tokens) or sum(patches) % sum(tokens):
        raise CannotShare("image tokens and image sizes that do not match")
    merge = sum(patches) // sum(tokens)
    counts, image = [], 0
    for wanted in tokens:
        first, left = image, wanted * merge
        while left > 0 and image < len(patches):
            left -= patches[image]
            image += 1
        if left != 0:
            raise CannotShare("image tokens and image sizes that do not match")
        counts.append(image - first)
    if image != len(patches):
        raise CannotShare("image tokens and image sizes that do not match")
    return _slices(counts)


def _images_by_runs(is_image: torch.Tensor, images: int) -> list[slice] | None:
    """One image per uninterrupted run of placeholder tokens; None unless there are as many runs as images."""
    starts = is_image & ~torch.nn.functional.pad(is_image, (1, 0))[:, :-1]  # (N, S)
    counts = starts.sum(1).tolist()
    return _slices(counts) if sum(counts) == images else None


def _images_by_area(tokens: list[int], sizes: torch.Tensor | None) -> list[slice]:
    """Images that are worth as many tokens as they have squares of some size, as where rows of patches are marked."""
    if sizes is None:
        raise CannotShare("image tokens and images that do not match")
    return _images_by_tokens(tokens, sizes.prod(-1).tolist())


def _images_of_equal_size(tokens: list[int], images: int) -> list[slice]:
    """Images or tiles that are all worth the same number of tokens."""
    if not sum(tokens) or sum(tokens) % images or any(count % (sum(tokens) // images) for count in tokens):
        raise CannotShare("image tokens and images that do not match")
    return _slices([count * images // sum(tokens) for count in tokens])
