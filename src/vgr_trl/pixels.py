"""Assign the pixel inputs of a batch to its rows, by a table of layouts; the columns of token types.

A family of models with another layout needs one more `Layout`.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Literal

import numpy as np
import torch
import xxhash
from torch.nn.functional import pad

from vgr_trl.errors import DataError

IMAGE_INPUTS = (
    *("pixel_values", "image_grid_thw", "pixel_attention_mask"),
    *("image_sizes", "image_position_ids", "spatial_shapes"),
)

ImageInputs = Mapping[str, torch.Tensor]  # pixel inputs by name
Parts = dict[str, list[slice]]  # pixel input -> slice of its first dimension for each row
Unit = Literal["row", "image", "tile", "patch"]


class UnknownParts(DataError):
    """Pixel inputs cannot be assigned to rows with certainty; `reason` is part of a sentence."""

    def __init__(self, reason: str) -> None:
        cure = "give num_images, and num_tiles of images in tiles, one number for each row"
        super().__init__(f"The images of a batch cannot be assigned to its rows ({reason}): {cure}.")
        self.reason = reason


@dataclass(frozen=True)
class Layout:
    """Layout of the pixel inputs of some families of models.

    Attributes:
        units: what the first dimension of each pixel input indexes.
        count: returns the images or tiles of each row, given pixel inputs and image placeholders, (N, S) bool.
    """

    units: Mapping[str, Unit]
    count: Callable[[ImageInputs, torch.Tensor], list[int]]


def image_inputs_of(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the pixel inputs among the inputs of a pass."""
    return {name: inputs[name] for name in IMAGE_INPUTS if inputs.get(name) is not None}


def parts_by_counts(given: ImageInputs, num_images: Sequence[int], num_tiles: Sequence[int] | None = None) -> Parts:
    """Assign pixel inputs to rows by the number of images of each row.

    Args:
        given: pixel inputs by name.
        num_images: (N,) number of images of each row.
        num_tiles: (N,) number of tiles of each row; None: each image is one tile.

    Raises:
        UnknownParts: the inputs do not match the counts.
    """
    images = [int(count) for count in num_images]
    tiles = images if num_tiles is None else [int(count) for count in num_tiles]
    layout = find_layout(given, sum(images))
    return _slice_inputs(given, layout, {"row": [1] * len(images), "image": images, "tile": tiles})


def parts_by_tokens(given: ImageInputs, is_image: torch.Tensor) -> Parts:
    """Assign pixel inputs to rows by image placeholders, (N, S) bool.

    Raises:
        UnknownParts: the assignment is ambiguous.
    """
    layout = find_layout(given)
    return _slice_inputs(given, layout, dict.fromkeys(("row", "image", "tile"), layout.count(given, is_image)))


def tiles_by_tokens(given: ImageInputs, num_images: Sequence[int], is_image: torch.Tensor) -> list[int] | None:
    """Return the number of tiles of each row; None: each image is a tile, or the model has no tiles.

    Args:
        given: pixel inputs by name.
        num_images: (N,) number of images of each row.
        is_image: (N, S) bool, image placeholders.

    Raises:
        UnknownParts: the assignment is ambiguous.
    """
    layout, pixels = find_layout(given, sum(num_images)), given["pixel_values"]
    if layout.units["pixel_values"] != "tile" or not ("spatial_shapes" in given or pixels.ndim == 4):
        return None
    if len(pixels) == sum(num_images):
        return list(num_images) if "spatial_shapes" in given else None  # as TRL has it
    return layout.count(given, is_image)


def on_device(numbers: Sequence[int], device: torch.device | str) -> torch.Tensor:
    """Return numbers as an int64 tensor on a device; unlike `torch.tensor(…, device=…)` it does not block the host."""
    return torch.tensor(numbers, dtype=torch.int64).to(device, non_blocking=True)


def take_entries(columns: Mapping[str, Any], rows: Sequence[int]) -> dict[str, Any]:
    """Take some entries of each tensor and list; numbers, texts and None stay. Consecutive entries are not copied.

    Args:
        columns: by name.
        rows: numbers of the entries, at least one.
    """
    block = slice(rows[0], rows[0] + len(rows))
    consecutive = list(rows) == list(range(block.start, block.stop))
    taken = dict(columns)
    for name, value in columns.items():
        if isinstance(value, torch.Tensor) and value.ndim > 0:
            taken[name] = value[block if consecutive else on_device(rows, value.device)]
        elif isinstance(value, list | tuple):
            taken[name] = [value[row] for row in rows]
    return taken


def find_layout(given: ImageInputs, images: int | None = None) -> Layout:
    """Return the layout of pixel inputs.

    Args:
        given: pixel inputs by name.
        images: number of images of all rows; None: unknown.

    Raises:
        UnknownParts: no layout matches.
    """
    if "pixel_values" not in given or any(not isinstance(value, torch.Tensor) for value in given.values()):
        raise UnknownParts("pixel inputs of an unknown form")
    pixels = given["pixel_values"]
    # Rows are padded to the most images of a row, with a mask. PerceptionLM has tiles in this place, and no mask.
    of_rows = "pixel_attention_mask" in given or len(pixels) != images
    if "image_grid_thw" in given:
        layout = PATCHES
    elif "spatial_shapes" in given:
        layout = UNEQUAL_TILES
    elif pixels.ndim == 5 and "image_sizes" not in given and of_rows:
        layout = PADDED_ROWS
    else:
        layout = UNEQUAL_IMAGES if "image_sizes" in given or "image_position_ids" in given else EQUAL_TILES
    if unknown := given.keys() - layout.units.keys():
        raise UnknownParts(f"the input {min(unknown)} beside pixel_values")
    return layout


def _slice_inputs(given: ImageInputs, layout: Layout, counts: dict[Unit, list[int]]) -> Parts:
    slices = {unit: _make_slices(of_rows) for unit, of_rows in counts.items()}
    if "patch" in layout.units.values():
        patches = given["image_grid_thw"].prod(-1).tolist()
        slices["patch"] = _make_slices([sum(patches[images]) for images in slices["image"]])
    parts = {name: slices[layout.units[name]] for name in given}
    for name, value in given.items():
        if (parts[name][-1].stop if parts[name] else 0) != len(value):
            raise UnknownParts(f"{name} of shape {tuple(value.shape)}")
    return parts


def _make_slices(counts: Sequence[int]) -> list[slice]:
    return [slice(start, stop) for start, stop in pairwise([0, *accumulate(counts)])]


def _count_by(name: str) -> Callable[[ImageInputs, torch.Tensor], list[int]]:
    """Return a counter of images or tiles of patches / merge tokens; the input `name` has their sides in patches."""

    def count(given: ImageInputs, is_image: torch.Tensor) -> list[int]:
        if name not in given:
            raise UnknownParts("image tokens and images that do not match")
        tokens, patches = is_image.sum(1).tolist(), given[name].prod(-1).tolist()  # (N,)
        merge, rest = divmod(sum(patches), sum(tokens)) if any(tokens) else (0, 1)
        ends = [0, *accumulate(patches)]  # patches before each image, and in all
        wanted = [merge * count for count in accumulate(tokens)]  # patches up to the end of each row
        if rest or not set(wanted) <= set(ends):
            raise UnknownParts("image tokens and image sizes that do not match")
        return [stop - start for start, stop in pairwise([0, *map(ends.index, wanted)])]

    return count


def _count_runs(given: ImageInputs, is_image: torch.Tensor) -> list[int]:
    """Count runs of placeholders, or divide by area where families separate the rows of an image by other tokens."""
    starts = is_image & ~pad(is_image, (1, 0))[:, :-1]  # (N, S)
    counts: list[int] = starts.sum(1).tolist()
    return counts if sum(counts) == len(given["pixel_values"]) else _count_by("image_sizes")(given, is_image)


def _count_equal(given: ImageInputs, is_image: torch.Tensor) -> list[int]:
    """Count images or tiles with equally many placeholders each."""
    tokens, tiles = is_image.sum(1).tolist(), len(given["pixel_values"])
    if not tiles or not any(tokens) or sum(tokens) % tiles or any(count % (sum(tokens) // tiles) for count in tokens):
        raise UnknownParts("image tokens and images that do not match")
    return [count * tiles // sum(tokens) for count in tokens]


# Qwen, GLM: patches of all images, concatenated.
PATCHES = Layout({"pixel_values": "patch", "image_grid_thw": "image"}, _count_by("image_grid_thw"))
# LFM2-VL.
UNEQUAL_TILES = Layout(
    dict.fromkeys(("pixel_values", "spatial_shapes", "pixel_attention_mask"), "tile"), _count_by("spatial_shapes")
)
# Idefics, SmolVLM.
PADDED_ROWS = Layout(
    dict.fromkeys(("pixel_values", "pixel_attention_mask"), "row"), lambda given, is_image: [1] * len(is_image)
)
# LLaVA-NeXT and -OneVision, Mistral 3, Gemma 4.
UNEQUAL_IMAGES = Layout(dict.fromkeys(("pixel_values", "image_sizes", "image_position_ids"), "image"), _count_runs)
# LLaVA, Gemma 3, InternVL: images or tiles of one size.
EQUAL_TILES = Layout({"pixel_values": "tile"}, _count_equal)


def counts_by_tokens(given: ImageInputs, is_image: torch.Tensor) -> dict[str, list[int]]:
    """Return `num_images` and `num_tiles` of rows by their image placeholders, (N, S) bool.

    Raises:
        UnknownParts: the assignment is ambiguous.
    """
    counts, has_image = find_layout(given).count(given, is_image), is_image.any(1).tolist()
    return {"num_images": [count * has for count, has in zip(counts, has_image, strict=True)], "num_tiles": counts}


def number_images(given: ImageInputs, num_images: Sequence[int], is_image: torch.Tensor) -> torch.Tensor:
    """Number the image of each placeholder within its row.

    Images with patches, or with equally many placeholders each, can be numbered.

    Args:
        given: pixel inputs by name.
        num_images: (N,) number of images of each row; empty: unknown.
        is_image: (N, S) bool, image placeholders.

    Returns:
        (N, S) int64, from 1; 0 for other tokens and unknown images.
    """
    numbers, count = torch.zeros_like(is_image, dtype=torch.int64), sum(num_images)
    sizes: list[int] = []
    if "image_grid_thw" in given:
        sizes = given["image_grid_thw"].prod(-1).tolist()
    elif given and count and find_layout(given, count) is EQUAL_TILES and len(given["pixel_values"]) == count:
        sizes = [1] * count
    if not sizes:  # a row would have the host wait
        return numbers
    for row, images in enumerate(_make_slices(num_images)):
        tokens, worth = int(is_image[row].sum()), sum(sizes[images])
        if worth and not any(tokens * size % worth for size in sizes[images]):
            counts = [tokens * size // worth for size in sizes[images]]
            each = torch.arange(1, len(counts) + 1).repeat_interleave(torch.tensor(counts))
            numbers[row, is_image[row]] = each.to(numbers.device)
    return numbers


def joined(pixels: list[torch.Tensor] | torch.Tensor) -> torch.Tensor:
    """Concatenate the pixels of rows to the tensor that a model takes."""
    return torch.cat(pixels) if isinstance(pixels, list) else pixels


def image_tensors(fields: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the pixel inputs of a processor as tensors; some processors return lists of arrays."""
    return {
        name: value if isinstance(value, torch.Tensor) else torch.tensor(np.array(value))
        for name, value in image_inputs_of(fields).items()
    }


PERTURBED = "perturbed_pixel_values"  # has the layout of `pixel_values`
ROW_INPUTS = (*IMAGE_INPUTS, PERTURBED)
_PADDING = {"image_position_ids": -1}  # Gemma 4 marks padding by -1; all other inputs are padded with 0

Images = dict[str, torch.Tensor]  # the image inputs of one row, empty for a row without images


def split_images(batch: Mapping[str, Any], count: int) -> tuple[list[Images], bool]:
    """Return the image inputs of each row, and whether rows without an image have an entry, too.

    Args:
        batch: a training batch of TRL; `num_images` and `num_tiles` are lists with one number per row.
        count: N, the number of rows.

    Raises:
        DataError: an input cannot be assigned to rows.
    """
    given = image_inputs_of(batch)
    if not given:
        return [{} for _ in range(count)], False
    num_images = batch.get("num_images") or []
    parts = parts_by_counts(given, num_images, batch.get("num_tiles"))
    if batch.get(PERTURBED) is not None:
        given[PERTURBED], parts[PERTURBED] = batch[PERTURBED], parts["pixel_values"]
    rows = [{name: value[parts[name][row]] for name, value in given.items()} for row in range(count)]
    one_per_row = find_layout(image_inputs_of(batch), sum(num_images)).units["pixel_values"] == "row"
    return [{name: value for name, value in row.items() if len(value)} for row in rows], one_per_row


def stack_images(rows: Sequence[Images], one_per_row: bool) -> Images:
    """Combine the image inputs of rows into a batch; the inverse of `split_images`.

    Rows of different sizes are padded to the largest image, or to the most patches or images.

    Args:
        rows: image inputs of each row.
        one_per_row: whether rows without images get an entry of zeros.
    """
    names = [name for name in ROW_INPUTS if any(name in row for row in rows)]
    return {name: _stack_parts([row.get(name) for row in rows], _PADDING.get(name, 0), one_per_row) for name in names}


def _stack_parts(parts: Sequence[torch.Tensor | None], padding: int, one_per_row: bool) -> torch.Tensor:
    present = [part for part in parts if part is not None]
    shape = [max(sizes) for sizes in zip(*(part.shape[1:] for part in present), strict=True)]
    if one_per_row:
        parts = [present[0].new_zeros((1, *shape)) if part is None else part for part in parts]
    grown = []
    for part in (part for part in parts if part is not None):
        missing = [size - own for size, own in zip(shape, part.shape[1:], strict=True)]
        widths = [width for size in reversed(missing) for width in (0, size)]  # the last dimension first
        grown.append(pad(part, widths, value=padding).to(present[0]) if any(missing) else part.to(present[0]))
    return torch.cat(grown)


def map_shared_tensors(
    rows: Sequence[Images], change: Callable[[Any], Any], key: Callable[[Any], Hashable] = id
) -> list[Images]:
    """Change the image inputs of rows; tensors of the same key, by default one tensor, become one tensor."""
    changed: dict[Hashable, Any] = {}

    def change_once(value: Any) -> Any:
        if (known := key(value)) not in changed:
            changed[known] = change(value)
        return changed[known]

    return [{name: change_once(value) for name, value in row.items()} for row in rows]


def fingerprint(value: torch.Tensor) -> Hashable:
    """Return a hashable key of a tensor: dtype, shape and a hash of its content."""
    data = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
    return value.dtype, value.shape, xxhash.xxh3_128_digest(data)


TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")
# In these families tokens of type 0 attend to all tokens of type 0, also to later ones; completions get another type.
_CAUSAL_TYPE = {"paligemma": 1}


def causal_type(config: Any, name: str) -> int:
    """Return the token type that keeps the tokens of a completion causal.

    Args:
        config: configuration of the model.
        name: `token_type_ids` or `mm_token_type_ids`.
    """
    return _CAUSAL_TYPE.get(config.model_type, 0) if name == "token_type_ids" else 0


def make_completions_causal(inputs: Mapping[str, Any], config: Any, completion_length: int) -> dict[str, Any]:
    """Return the inputs of a pass with causal token types, (N, P + T), in the completions.

    TRL pads token types with 0, by which completions of PaliGemma attend to later tokens.

    Args:
        inputs: by name, with or without token types.
        config: configuration of the model.
        completion_length: T.
    """
    changed = dict(inputs)
    value = changed.get("token_type_ids")
    if value is not None and (kind := causal_type(config, "token_type_ids")):
        completions = value.new_full((len(value), completion_length), kind)
        changed["token_type_ids"] = torch.cat([value[:, :-completion_length], completions], dim=1)
    return changed


def extend_token_types(inputs: Mapping[str, torch.Tensor], config: Any, length: int) -> dict[str, torch.Tensor]:
    """Extend the token types of prompts to completions, which stay causal.

    Args:
        inputs: inputs of a forward pass, with token types (N, P) or (N, P + T), if any.
        config: configuration of the model.
        length: P + T.
    """
    types = {name: inputs[name] for name in TOKEN_TYPES if name in inputs}
    return {
        name: pad(value, (0, length - value.size(1)), value=causal_type(config, name)) for name, value in types.items()
    }
