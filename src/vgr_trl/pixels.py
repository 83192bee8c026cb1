"""Assign images to the rows of a batch by a table of layouts (`RowImages`), and extend token types.

A family of models with another layout needs one more `Layout`.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, pairwise
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

PERTURBED = "perturbed_pixel_values"  # has the layout of `pixel_values`
_PADDING = {"image_position_ids": -1}  # Gemma 4 marks padding by -1; all other inputs are padded with 0

ImageInputs = Mapping[str, torch.Tensor]  # pixel inputs by name
Images = dict[str, torch.Tensor]  # likewise, of one row or of all
Parts = dict[str, list[slice]]  # pixel input -> slice of its first dimension for each row
Unit = Literal["row", "image", "tile", "patch"]


class UnknownParts(DataError):
    """Pixel inputs cannot be assigned to rows with certainty; `reason` is part of a sentence."""

    def __init__(self, reason: str, cure: str = "") -> None:
        cure = cure or "give num_images, and num_tiles of images in tiles, one number for each row"
        super().__init__(f"The images of a batch cannot be assigned to its rows ({reason}): {cure}.")
        self.reason = reason


@dataclass(frozen=True)
class Layout:
    """How some model families lay out pixel inputs.

    Attributes:
        units: what the first dimension of each pixel input indexes.
        count: returns the images or tiles of each row, given pixel inputs and image placeholders, (N, S) bool.
    """

    units: Mapping[str, Unit]
    count: Callable[[ImageInputs, torch.Tensor], list[int]]


def image_inputs_of(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the pixel inputs among the inputs of a pass."""
    return {name: inputs[name] for name in IMAGE_INPUTS if inputs.get(name) is not None}


def has_images(inputs: Mapping[str, Any]) -> bool:
    """Whether the pixel inputs of a pass hold an image; Idefics pads rows without an image."""
    pixels, mask = inputs.get("pixel_values"), inputs.get("pixel_attention_mask")
    return pixels is not None and len(pixels) > 0 and (mask is None or bool(mask.any()))


def drop_empty_images(inputs: Mapping[str, Any], agree: Callable[[bool], bool] | None = None) -> dict[str, Any]:
    """Return the inputs of a pass, without pixel inputs that hold no image.

    TRL cuts a batch into chunks. A chunk of rows without images has empty pixels, or padding, on which models fail.

    Args:
        inputs: inputs of the pass by name.
        agree: returns whether an answer is True in all processes, where parameters are sharded: the vision tower then
            runs in every process or in none. None: each process decides alone.

    Raises:
        DataError: only some processes have images; it is raised in all processes.
    """
    mine = has_images(inputs)
    if agree is not None and not agree(mine) and not agree(not mine):
        has = f"A batch of this process has {'images' if mine else 'no images'}, unlike a batch of another process"
        raise DataError(f"{has}, and the parameters are sharded: give every row images, or none, or use ZeRO-2 or DDP.")
    empty = inputs.get("pixel_values") is not None and not mine
    return {name: value for name, value in inputs.items() if not (empty and name in IMAGE_INPUTS)}


def parts_by_tokens(inputs: ImageInputs, is_image: torch.Tensor) -> Parts:
    """Assign pixel inputs to rows by image placeholders, (N, S) bool.

    Raises:
        UnknownParts: the assignment is ambiguous.
    """
    layout = find_layout(inputs)
    return _slice_inputs(inputs, layout, dict.fromkeys(("row", "image", "tile"), layout.count(inputs, is_image)))


def on_device(numbers: Sequence[int], device: torch.device | str) -> torch.Tensor:
    """Return numbers as an int64 tensor on a device; unlike `torch.tensor(…, device=…)` it does not block the host."""
    return torch.tensor(numbers, dtype=torch.int64).to(device, non_blocking=True)


def find_layout(inputs: ImageInputs, images: int | None = None) -> Layout:
    """Return the layout of pixel inputs.

    Args:
        inputs: pixel inputs by name.
        images: number of images of all rows; None: unknown.

    Raises:
        UnknownParts: no layout matches.
    """
    if "pixel_values" not in inputs or any(not isinstance(value, torch.Tensor) for value in inputs.values()):
        raise UnknownParts("pixel inputs of an unknown form")
    pixels = inputs["pixel_values"]
    # Rows are padded to the most images of a row, with a mask. PerceptionLM has tiles in this place, and no mask.
    of_rows = "pixel_attention_mask" in inputs or len(pixels) != images
    if "image_grid_thw" in inputs:
        layout = PATCHES
    elif "spatial_shapes" in inputs:
        layout = UNEQUAL_TILES
    elif pixels.ndim == 5 and "image_sizes" not in inputs and of_rows:
        layout = PADDED_ROWS
    else:
        layout = UNEQUAL_IMAGES if "image_sizes" in inputs or "image_position_ids" in inputs else EQUAL_TILES
    if unknown := inputs.keys() - layout.units.keys():
        raise UnknownParts(f"the input {min(unknown)} beside pixel_values", "score all rows at once (batch_size=None)")
    return layout


def _slice_inputs(inputs: ImageInputs, layout: Layout, counts: dict[Unit, list[int]]) -> Parts:
    slices = {unit: _make_slices(of_rows) for unit, of_rows in counts.items()}
    if "patch" in layout.units.values():
        patches = inputs["image_grid_thw"].prod(-1).tolist()
        slices["patch"] = _make_slices([sum(patches[images]) for images in slices["image"]])
    parts = {name: slices[layout.units[name]] for name in inputs}
    for name, value in inputs.items():
        if (parts[name][-1].stop if parts[name] else 0) != len(value):
            raise UnknownParts(f"{name} of shape {tuple(value.shape)}")
    return parts


def _make_slices(counts: Sequence[int]) -> list[slice]:
    return [slice(start, stop) for start, stop in pairwise([0, *accumulate(counts)])]


def _count_by(name: str) -> Callable[[ImageInputs, torch.Tensor], list[int]]:
    """Return a counter of images or tiles of patches / merge tokens; the input `name` has their sides in patches."""

    def count(inputs: ImageInputs, is_image: torch.Tensor) -> list[int]:
        if name not in inputs:
            raise UnknownParts("image tokens and images that do not match")
        tokens, patches = is_image.sum(1).tolist(), inputs[name].prod(-1).tolist()  # (N,)
        merge, rest = divmod(sum(patches), sum(tokens)) if any(tokens) else (0, 1)
        ends = [0, *accumulate(patches)]  # patches before each image, and in all
        wanted = [merge * count for count in accumulate(tokens)]  # patches up to the end of each row
        if rest or not set(wanted) <= set(ends):
            raise UnknownParts("image tokens and image sizes that do not match")
        return [stop - start for start, stop in pairwise([0, *map(ends.index, wanted)])]

    return count


def _count_runs(inputs: ImageInputs, is_image: torch.Tensor) -> list[int]:
    """Count runs of placeholders, or divide by area where families separate the rows of an image by other tokens."""
    starts = is_image & ~pad(is_image, (1, 0))[:, :-1]  # (N, S)
    counts: list[int] = starts.sum(1).tolist()
    return counts if sum(counts) == len(inputs["pixel_values"]) else _count_by("image_sizes")(inputs, is_image)


def _count_equal(inputs: ImageInputs, is_image: torch.Tensor) -> list[int]:
    """Count images or tiles with equally many placeholders each."""
    tokens, tiles = is_image.sum(1).tolist(), len(inputs["pixel_values"])
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
    dict.fromkeys(("pixel_values", "pixel_attention_mask"), "row"), lambda inputs, is_image: [1] * len(is_image)
)
# LLaVA-NeXT and -OneVision, Mistral 3, Gemma 4.
UNEQUAL_IMAGES = Layout(dict.fromkeys(("pixel_values", "image_sizes", "image_position_ids"), "image"), _count_runs)
# LLaVA, Gemma 3, InternVL: images or tiles of one size.
EQUAL_TILES = Layout({"pixel_values": "tile"}, _count_equal)


@dataclass(eq=False)  # tensors do not compare to a bool
class RowImages:
    """Pixel inputs of N rows, as tensors of all rows or row by row; reading one form makes it.

    Attributes:
        whole: pixel inputs of all rows by name, also others than `IMAGE_INPUTS`; None: they are in `parts`.
        num_images: (N,) number of images of each row; None: unknown, or no row has an image.
        num_tiles: (N,) number of entries of `pixel_values` of each row; None: each image is one, or has patches.
        parts: pixel inputs of each row, none of a row without an image; None: they are in `whole`.
        one_per_row: whether `whole` has entries of zeros for rows without an image, if other rows have images.
    """

    whole: Images | None = field(default_factory=dict)
    num_images: Sequence[int] | None = None
    num_tiles: Sequence[int] | None = None
    parts: list[Images] | None = None
    one_per_row: bool = False

    @classmethod
    def count(cls, tensors: Images, is_image: torch.Tensor, num_images: Sequence[int] | None = None) -> "RowImages":
        """Count the images and tiles of each row by its image placeholders.

        Args:
            tensors: pixel inputs of all rows by name.
            is_image: (N, S) bool, image placeholders.
            num_images: (N,) number of images of each row, so that tiles alone are counted; None: unknown.

        Raises:
            UnknownParts: the assignment is ambiguous.
        """
        if not tensors:
            return cls(tensors, num_images)
        if num_images is None:
            tiles, has_image = find_layout(tensors).count(tensors, is_image), is_image.any(1).tolist()
            return cls(tensors, [count * has for count, has in zip(tiles, has_image, strict=True)], tiles)
        layout, pixels = find_layout(tensors, sum(num_images)), tensors["pixel_values"]
        if layout.units["pixel_values"] != "tile" or not ("spatial_shapes" in tensors or pixels.ndim == 4):
            return cls(tensors, num_images)
        if len(pixels) == sum(num_images):  # as TRL has it
            return cls(tensors, num_images, list(num_images) if "spatial_shapes" in tensors else None)
        return cls(tensors, num_images, layout.count(tensors, is_image))

    @property
    def tensors(self) -> Images:
        """Pixel inputs of all rows by name; rows are padded to the largest image, or to the most patches or images."""
        if self.whole is None:
            parts = self.parts or []
            names = [name for name in (*IMAGE_INPUTS, PERTURBED) if any(name in row for row in parts)]
            self.whole = {name: self._stack([row.get(name) for row in parts], name) for name in names}
            self.parts = None  # they would keep other batches in memory
        return self.whole

    @property
    def rows(self) -> list[Images]:
        """Pixel inputs of each row, none of a row without an image; rows known to have equal ones share tensors.

        Raises:
            UnknownParts: the pixel inputs do not match the numbers of images.
        """
        if self.parts is None:
            counts, whole, slices = self.num_images or (), self.tensors, self.slices
            self.parts = [
                {name: value[slices[name][row]] for name, value in whole.items()} if count else {}
                for row, count in enumerate(counts)
            ]
        return self.parts

    @property
    def slices(self) -> Parts:
        """The slice of each row in the first dimension of each pixel input; as `rows`."""
        inputs = {name: value for name, value in self.tensors.items() if name != PERTURBED}
        if not inputs:
            return {}
        images = [int(count) for count in self.num_images or ()]
        tiles = images if self.num_tiles is None else [int(count) for count in self.num_tiles]
        layout = find_layout(inputs, sum(images))
        self.one_per_row = layout.units["pixel_values"] == "row"
        slices = _slice_inputs(inputs, layout, {"row": [1] * len(images), "image": images, "tile": tiles})
        if PERTURBED in self.tensors:
            slices[PERTURBED] = slices["pixel_values"]
        return slices

    def take(self, rows: Sequence[int]) -> "RowImages":
        """Return the images of the rows with these numbers, in this order."""
        if self.num_images is None and not self.tensors:
            return self
        images, tiles = (values and [values[row] for row in rows] for values in (self.num_images, self.num_tiles))
        return RowImages(None, images, tiles, [self.rows[row] for row in rows], self.one_per_row)

    @classmethod
    def join(cls, images: Sequence["RowImages"], lengths: Sequence[int]) -> "RowImages":
        """Join images of several batches, with the pixel inputs that the first batch has, if it has images.

        Args:
            images: images of each batch.
            lengths: number of rows of each batch.

        Raises:
            DataError: a row with images lacks a pixel input of the first batch.
        """
        pairs = [*zip(images, lengths, strict=True)]
        rows = [row for batch, count in pairs for row in batch.rows or [{} for _ in range(count)]]
        wanted = {name for row in images[0].rows for name in row}
        for row in rows:
            if row and not wanted <= row.keys():
                raise missing_column_error(min(wanted - row.keys()))
        kept = [{name: row[name] for name in row if name in wanted or not wanted} for row in rows]
        counts = [batch.num_images or [0] * count for batch, count in pairs]
        tiles = [batch.num_tiles or counts_of_batch for batch, counts_of_batch in zip(images, counts, strict=True)]
        return cls(
            None,
            [*chain(*counts)] if any(batch.num_images for batch in images) else None,
            [*chain(*tiles)] if any(batch.num_tiles for batch in images) else None,
            kept,
            any(batch.one_per_row for batch in images),
        )

    def map(self, change: Callable[[Any], Any], key: Callable[[Any], Hashable] | None = None) -> "RowImages":
        """Change every tensor; tensors of the same key become one tensor.

        Args:
            change: returns the changed tensor.
            key: returns what equal tensors of rows have in common; None: every tensor is changed by itself.
        """
        if self.whole is not None and key is None:
            return replace(self, whole={name: change(value) for name, value in self.whole.items()}, parts=None)
        changed: dict[Hashable, Any] = {}

        def change_once(value: Any) -> Any:
            if (identity := (key or id)(value)) not in changed:
                changed[identity] = change(value)
            return changed[identity]

        parts = [{name: change_once(value) for name, value in row.items()} for row in self.rows]
        return replace(self, whole=None, parts=parts)

    def with_pixels(self, pixels: torch.Tensor, name: str = "pixel_values") -> "RowImages":
        """Replace `pixel_values`, or add another input of their layout.

        Raises:
            DataError: `pixels` has another shape than `pixel_values`.
        """
        like = self.tensors["pixel_values"]
        if pixels.shape != like.shape:
            shapes = f"pixel_values of shape {tuple(pixels.shape)}, images {tuple(like.shape)}"
            raise DataError(f"Perturbed images give {shapes}: switch off the options that perturb images.")
        return replace(self, whole={**self.tensors, name: pixels.to(like.device, like.dtype)}, parts=None)

    def without(self, name: str) -> "RowImages":
        """Return the images without the input `name`."""
        if self.whole is not None:
            rest = {key: value for key, value in self.whole.items() if key != name}
            return replace(self, whole=rest, parts=None) if name in self.whole else self
        parts = [{key: value for key, value in row.items() if key != name} for row in self.parts or ()]
        return replace(self, parts=parts)

    def with_pixels_of(self, perturbed: "RowImages") -> "RowImages":
        """Take `pixel_values` from perturbed images of the same sizes, which may have less padding.

        Raises:
            DataError: the perturbed images have other sizes.
        """
        shown, pixels = self.without(PERTURBED).tensors, perturbed.tensors["pixel_values"]
        if pixels.shape != shown["pixel_values"].shape and perturbed.tensors.keys() == shown.keys():
            grown = {name: _grow(value, shown[name].shape, name) for name, value in perturbed.tensors.items()}
            sizes = shown.keys() - {"pixel_values"}
            if sizes and all(torch.equal(grown[name].to(shown[name]), shown[name]) for name in sizes):
                pixels = grown["pixel_values"]
        return self.with_pixels(pixels)

    def number(self, is_image: torch.Tensor) -> torch.Tensor:
        """Number the image of each placeholder within its row.

        Images with patches, or with equally many placeholders each, can be numbered.

        Args:
            is_image: (N, S) bool, image placeholders.

        Returns:
            (N, S) int64, from 1; 0 for other tokens and unknown images.
        """
        inputs, num_images = image_inputs_of(self.tensors), self.num_images or []
        numbers, count = torch.zeros_like(is_image, dtype=torch.int64), sum(num_images)
        sizes: list[int] = []
        if "image_grid_thw" in inputs:
            sizes = inputs["image_grid_thw"].prod(-1).tolist()
        elif inputs and count and find_layout(inputs, count) is EQUAL_TILES and len(inputs["pixel_values"]) == count:
            sizes = [1] * count
        if not sizes:  # a row would have the host wait
            return numbers
        for row, images in enumerate(_make_slices(num_images)):
            tokens, worth = int(is_image[row].sum()), sum(sizes[images])
            if worth and not any(tokens * size % worth for size in sizes[images]):
                counts = [tokens * size // worth for size in sizes[images]]
                image_numbers = torch.arange(1, len(counts) + 1).repeat_interleave(torch.tensor(counts))
                numbers[row, is_image[row]] = image_numbers.to(numbers.device)
        return numbers

    def _stack(self, parts: Sequence[torch.Tensor | None], name: str) -> torch.Tensor:
        present = [part for part in parts if part is not None]
        shape = [max(sizes) for sizes in zip(*(part.shape[1:] for part in present), strict=True)]
        if self.one_per_row:
            parts = [present[0].new_zeros((1, *shape)) if part is None else part for part in parts]
        return torch.cat([_grow(part, (0, *shape), name).to(present[0]) for part in parts if part is not None])


def _grow(value: torch.Tensor, shape: Sequence[int], name: str) -> torch.Tensor:
    """Pad an input to at least a shape, but for its first dimension."""
    missing = [max(size - length, 0) for size, length in zip(shape[1:], value.shape[1:], strict=True)]
    widths = [width for size in reversed(missing) for width in (0, size)]  # the last dimension first
    return pad(value, widths, value=_PADDING.get(name, 0)) if any(missing) else value


def missing_column_error(name: str) -> DataError:
    """Return the error for rows that lack a column of the batch they are joined to."""
    cure = "resume with the options that it was stored with, or start with an empty replay buffer"
    return DataError(f"A stored group has no {name}, which the batch has: {cure}.")


def image_tensors(fields: Mapping[str, Any]) -> Images:
    """Return the pixel inputs of a processor as tensors; some processors return lists of arrays."""
    return {
        name: value if isinstance(value, torch.Tensor) else torch.tensor(np.array(value))
        for name, value in image_inputs_of(fields).items()
    }


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
