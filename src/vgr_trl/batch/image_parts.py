"""The one map from pixel inputs to rows: which images, tiles and patches belong to which row of a batch.

A family of models whose pixel inputs lie as in none of `LAYOUTS` is one more entry there.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Literal

import torch

from vgr_trl.errors import DataError

IMAGE_INPUTS = (
    "pixel_values",
    "image_grid_thw",
    "pixel_attention_mask",
    "image_sizes",
    "image_position_ids",
    "spatial_shapes",
)

ImageInputs = Mapping[str, torch.Tensor]  # pixel inputs by name
Parts = dict[str, list[slice]]  # pixel input -> the slice of its first dimension that belongs to each row
Unit = Literal["row", "image", "tile", "patch"]


class UnknownParts(DataError):
    """Pixel inputs cannot be assigned to rows with certainty; `reason` names them, for a sentence of the caller."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"The images of a batch cannot be assigned to its rows, because of {reason}.")
        self.reason = reason


@dataclass(frozen=True)
class Layout:
    """How the pixel inputs of some families of models lie.

    Attributes:
        applies: whether inputs lie so, by their names and shapes and the images of all rows, None if not known.
        units: of each input that there may be, what it has an entry for.
        count: the rows' images or tiles, from the inputs and the placeholder tokens of images, (N, S) bool.
    """

    applies: Callable[[ImageInputs, int | None], bool]
    units: Mapping[str, Unit]
    count: Callable[[ImageInputs, torch.Tensor], list[int]]


def image_inputs_of(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the pixel inputs among `inputs`."""
    return {name: inputs[name] for name in IMAGE_INPUTS if inputs.get(name) is not None}


def parts_by_counts(given: ImageInputs, num_images: Sequence[int], num_tiles: Sequence[int] | None = None) -> Parts:
    """Return which part of each pixel input belongs to which row, given what the rows have.

    Args:
        given: pixel inputs by name.
        num_images: (N,) images of each row.
        num_tiles: (N,) tiles of each row; None: an image is a tile.

    Raises:
        UnknownParts: the inputs do not fit the counts.
    """
    images = [int(count) for count in num_images]
    tiles = images if num_tiles is None else [int(count) for count in num_tiles]
    layout = find_layout(given, sum(images))
    return _parts(given, layout, {"row": [1] * len(images), "image": images, "tile": tiles})


def parts_by_tokens(given: ImageInputs, is_image: torch.Tensor) -> Parts:
    """Return which part of each pixel input belongs to which row, given placeholder tokens of images, (N, S) bool.

    Raises:
        UnknownParts: the tokens do not tell with certainty.
    """
    layout = find_layout(given)
    return _parts(given, layout, dict.fromkeys(("row", "image", "tile"), layout.count(given, is_image)))


def tiles_by_tokens(given: ImageInputs, num_images: Sequence[int], is_image: torch.Tensor) -> list[int] | None:
    """Return the tiles of each row, None where there is one to an image or pixel inputs do not lie by tiles.

    Raises:
        UnknownParts: the tokens do not tell with certainty.
    """
    layout, pixels = find_layout(given, sum(num_images)), given["pixel_values"]
    if layout.units["pixel_values"] != "tile" or not ("spatial_shapes" in given or pixels.ndim == 4):
        return None
    if len(pixels) == sum(num_images):
        return list(num_images) if "spatial_shapes" in given else None  # as TRL has it
    return layout.count(given, is_image)


def find_layout(given: ImageInputs, images: int | None = None) -> Layout:
    """Return how the pixel inputs lie; `images` are those of all rows, where they are known."""
    if "pixel_values" not in given or any(not isinstance(value, torch.Tensor) for value in given.values()):
        raise UnknownParts("pixel inputs of an unknown form")
    layout = next(layout for layout in LAYOUTS if layout.applies(given, images))
    if unknown := given.keys() - layout.units.keys():
        raise UnknownParts(f"the input {min(unknown)} beside pixel_values")
    return layout


def _parts(given: ImageInputs, layout: Layout, counts: dict[Unit, list[int]]) -> Parts:
    slices = {unit: _slices(of_rows) for unit, of_rows in counts.items()}
    if "patch" in layout.units.values():
        patches = given["image_grid_thw"].prod(-1).tolist()
        slices["patch"] = _slices([sum(patches[images]) for images in slices["image"]])
    parts = {name: slices[layout.units[name]] for name in given}
    for name, value in given.items():
        if len(parts[name]) != len(counts["row"]) or parts[name][-1].stop != len(value):
            raise UnknownParts(f"{name} of shape {tuple(value.shape)}")
    return parts


def _slices(counts: Sequence[int]) -> list[slice]:
    return [slice(start, stop) for start, stop in pairwise([0, *accumulate(counts)])]


def _one_each(given: ImageInputs, is_image: torch.Tensor) -> list[int]:
    return [1] * len(is_image)


def _count_by(name: str) -> Callable[[ImageInputs, torch.Tensor], list[int]]:
    """Images or tiles in order, each worth patches / merge tokens; the input `name` holds their sides in patches."""

    def count(given: ImageInputs, is_image: torch.Tensor) -> list[int]:
        if name not in given:
            raise UnknownParts("image tokens and images that do not match")
        tokens, patches = is_image.sum(1).tolist(), given[name].prod(-1).tolist()  # (N,)
        merge, rest = divmod(sum(patches), sum(tokens)) if any(tokens) else (0, 1)
        ends = [0, *accumulate(patches)]  # patches in front of each image, and of all
        wanted = [merge * count for count in accumulate(tokens)]  # patches up to the end of each row
        if rest or not set(wanted) <= set(ends):
            raise UnknownParts("image tokens and image sizes that do not match")
        return [stop - start for start, stop in pairwise([0, *map(ends.index, wanted)])]

    return count


def _count_runs(given: ImageInputs, is_image: torch.Tensor) -> list[int]:
    """An image per uninterrupted run of tokens; by area where families mark the rows of an image by other tokens."""
    starts = is_image & ~torch.nn.functional.pad(is_image, (1, 0))[:, :-1]  # (N, S)
    counts: list[int] = starts.sum(1).tolist()
    return counts if sum(counts) == len(given["pixel_values"]) else _count_by("image_sizes")(given, is_image)


def _count_equal(given: ImageInputs, is_image: torch.Tensor) -> list[int]:
    """Images or tiles that are all worth the same number of tokens."""
    tokens, tiles = is_image.sum(1).tolist(), len(given["pixel_values"])
    if not tiles or not any(tokens) or sum(tokens) % tiles or any(count % (sum(tokens) // tiles) for count in tokens):
        raise UnknownParts("image tokens and images that do not match")
    return [count * tiles // sum(tokens) for count in tokens]


LAYOUTS = (  # the first that applies
    # Qwen, GLM: patches of all images one behind the other.
    Layout(
        lambda given, images: "image_grid_thw" in given,
        {"pixel_values": "patch", "image_grid_thw": "image"},
        _count_by("image_grid_thw"),
    ),
    # LFM2-VL: tiles of unequal size.
    Layout(
        lambda given, images: "spatial_shapes" in given,
        {"pixel_values": "tile", "spatial_shapes": "tile", "pixel_attention_mask": "tile"},
        _count_by("spatial_shapes"),
    ),
    # Idefics, SmolVLM: the images of a row together, padded to the most images. PerceptionLM has tiles there, no mask.
    Layout(
        lambda given, images: (
            given["pixel_values"].ndim == 5
            and "image_sizes" not in given
            and ("pixel_attention_mask" in given or len(given["pixel_values"]) != images)
        ),
        {"pixel_values": "row", "pixel_attention_mask": "row"},
        _one_each,
    ),
    # LLaVA-NeXT and -OneVision, Mistral 3, Gemma 4: images of unequal size.
    Layout(
        lambda given, images: "image_sizes" in given or "image_position_ids" in given,
        {"pixel_values": "image", "image_sizes": "image", "image_position_ids": "image"},
        _count_runs,
    ),
    # LLaVA, Gemma 3, InternVL: images or tiles of one size.
    Layout(lambda given, images: True, {"pixel_values": "tile"}, _count_equal),
)
