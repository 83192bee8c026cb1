"""Rows of a batch: which pixels belong to which row; rows taken, joined, padded and placed on processes.

`LAYOUTS` is the one map from pixel inputs to rows: a family of models whose pixel inputs lie otherwise is one more
entry. `Rows` are completions with everything that TRL's loss reads for each of them.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Literal, TypeVar

import numpy as np
import torch
import xxhash
from PIL import Image
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from vgr_trl.utils import DataError

IMAGE_INPUTS = (
    *("pixel_values", "image_grid_thw", "pixel_attention_mask"),
    *("image_sizes", "image_position_ids", "spatial_shapes"),
)

ImageInputs = Mapping[str, torch.Tensor]  # pixel inputs by name
Parts = dict[str, list[slice]]  # pixel input -> the slice of its first dimension that belongs to each row
Unit = Literal["row", "image", "tile", "patch"]


class UnknownParts(DataError):
    """Pixel inputs cannot be assigned to rows with certainty; `reason` names them, for a sentence of the caller."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"The images of a batch cannot be assigned to its rows ({reason}): give num_images, and num_tiles where "
            "images are cut into tiles, one number for each row."
        )
        self.reason = reason


@dataclass(frozen=True)
class Layout:
    """How the pixel inputs of some families of models lie.

    Attributes:
        units: of each input that there may be, what it has an entry for.
        count: the rows' images or tiles, from the inputs and the placeholder tokens of images, (N, S) bool.
    """

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


def on_device(numbers: Sequence[int], device: torch.device | str) -> torch.Tensor:
    """Return numbers as int64 on a device, without making the host wait for it as `torch.tensor(…, device=…)` does."""
    return torch.tensor(numbers, dtype=torch.int64).to(device, non_blocking=True)


def find_layout(given: ImageInputs, images: int | None = None) -> Layout:
    """Return how the pixel inputs lie; `images` are those of all rows, where they are known."""
    if "pixel_values" not in given or any(not isinstance(value, torch.Tensor) for value in given.values()):
        raise UnknownParts("pixel inputs of an unknown form")
    pixels = given["pixel_values"]
    # Images of a row lie together, padded to the most images, with a mask. PerceptionLM has tiles there, and no mask.
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


def _parts(given: ImageInputs, layout: Layout, counts: dict[Unit, list[int]]) -> Parts:
    slices = {unit: _slices(of_rows) for unit, of_rows in counts.items()}
    if "patch" in layout.units.values():
        patches = given["image_grid_thw"].prod(-1).tolist()
        slices["patch"] = _slices([sum(patches[images]) for images in slices["image"]])
    parts = {name: slices[layout.units[name]] for name in given}
    for name, value in given.items():
        if (parts[name][-1].stop if parts[name] else 0) != len(value):
            raise UnknownParts(f"{name} of shape {tuple(value.shape)}")
    return parts


def _slices(counts: Sequence[int]) -> list[slice]:
    return [slice(start, stop) for start, stop in pairwise([0, *accumulate(counts)])]


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
    starts = is_image & ~pad(is_image, (1, 0))[:, :-1]  # (N, S)
    counts: list[int] = starts.sum(1).tolist()
    return counts if sum(counts) == len(given["pixel_values"]) else _count_by("image_sizes")(given, is_image)


def _count_equal(given: ImageInputs, is_image: torch.Tensor) -> list[int]:
    """Images or tiles that are all worth the same number of tokens."""
    tokens, tiles = is_image.sum(1).tolist(), len(given["pixel_values"])
    if not tiles or not any(tokens) or sum(tokens) % tiles or any(count % (sum(tokens) // tiles) for count in tokens):
        raise UnknownParts("image tokens and images that do not match")
    return [count * tiles // sum(tokens) for count in tokens]


# Qwen, GLM: patches of all images one behind the other.
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


TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")
_SCORED_BY_ROW = ("input_ids", "attention_mask", "num_images", "num_tiles", *TOKEN_TYPES)


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


def build_scoring_inputs(
    prompts: Prompts,
    completion_ids: Sequence[Sequence[int]],
    *,
    pad_token_id: int,
    vision_token_ids: Sequence[int] = (),
    valid: Sequence[bool] | None = None,
    pad_to_multiple_of: int | None = None,
) -> dict[str, Any]:
    """Return the arguments of TRL's scoring, but for the model and the size of chunks, of completions on the CPU.

    Args:
        vision_token_ids: placeholder tokens of images, from which the tiles of a row are counted.
        valid: per row, whether its tokens count; None: all do.
        pad_to_multiple_of: P and T are made multiples of it.
    """
    prompt_ids, prompt_mask = _padded(prompts.ids, pad_token_id, "left", pad_to_multiple_of)
    completions, completion_mask = _padded(completion_ids, pad_token_id, "right", pad_to_multiple_of)
    if valid is not None:
        completion_mask = completion_mask * torch.tensor(valid).unsqueeze(1)
    inputs: dict[str, Any] = {
        "input_ids": torch.cat([prompt_ids, completions], dim=1),
        "attention_mask": torch.cat([prompt_mask, completion_mask], dim=1),
        "logits_to_keep": completions.size(1),
        "num_images": None,
        "num_tiles": None,
    }
    if prompts.images is None:
        return inputs
    inputs["num_images"] = [len(images or ()) for images in prompts.images]
    for name in prompts.fields.keys() & TOKEN_TYPES:
        types, _ = _padded(prompts.fields[name], 0, "left", pad_to_multiple_of)
        padding = (prompt_ids.size(1) - types.size(1), completions.size(1))
        inputs[name] = pad(types, padding)
    if images := image_tensors(prompts.fields):
        is_image = torch.isin(prompt_ids, torch.tensor(vision_token_ids))  # (N, P)
        inputs |= images | {"num_tiles": tiles_by_tokens(images, inputs["num_images"], is_image)}
    return inputs


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


def counts_by_tokens(given: ImageInputs, is_image: torch.Tensor) -> dict[str, list[int]]:
    """Return `num_images` and `num_tiles` of rows by their placeholder tokens of images, (N, S) bool.

    Raises:
        UnknownParts: the tokens do not tell with certainty.
    """
    counts, has_image = find_layout(given).count(given, is_image), is_image.any(1).tolist()
    return {"num_images": [count * has for count, has in zip(counts, has_image, strict=True)], "num_tiles": counts}


def take_scoring_rows(inputs: Mapping[str, Any], rows: range) -> dict[str, Any]:
    """Return consecutive rows of the arguments of a scoring pass; pixel inputs only where these rows have an image.

    Raises:
        DataError: an input cannot be assigned to rows.
    """
    given = {name: value for name, value in inputs.items() if value is not None}
    count, images = len(given["input_ids"]), image_inputs_of(given)
    if len(rows) == count:
        return given
    chosen = slice(rows.start, rows.stop)
    part: dict[str, Any] = {"logits_to_keep": given.pop("logits_to_keep")}
    for name in given.keys() - images.keys():
        if len(given[name]) != count or name not in _SCORED_BY_ROW:
            raise DataError(f"The input {name} cannot be cut into chunks: score all rows at once (batch_size=None).")
        part[name] = given[name][chosen]
    if images and any(part.get("num_images", [1])):
        parts = parts_by_counts(images, given.get("num_images", ()), given.get("num_tiles"))
        for name, value in images.items():
            of_rows = parts[name][chosen]
            part[name] = value[of_rows[0].start : of_rows[-1].stop]
    return part


def text_inputs(batch: Mapping[str, Any], prompts: Prompts, pad_token_id: int) -> dict[str, Any]:
    """Return the arguments of TRL's scoring of the completions of a batch behind other prompts, which have no images.

    Raises:
        DataError: a prompt is longer than those of the batch.
    """
    rows, width = batch["prompt_ids"].shape
    if (longest := max(map(len, prompts.ids))) > width:
        raise DataError(f"A prompt without its image has {longest} tokens, with it at most {width}: images add some.")
    other: dict[str, Any] = dict(batch)
    ids, mask = _padded(prompts.ids, pad_token_id, "left", width)
    other |= {"prompt_ids": ids.to(batch["prompt_ids"]), "prompt_mask": mask.to(batch["prompt_mask"])}
    for name in TOKEN_TYPES:
        if batch.get(name) is not None:
            types, _ = _padded(prompts.fields.get(name) or [[0]] * rows, 0, "left", width)
            missing = batch[name].size(1) - width
            other[name] = pad(types, (0, missing)).to(batch[name])
    if given := image_inputs_of(batch):
        one_per_row = find_layout(given, sum(batch["num_images"])).units["pixel_values"] == "row"
        other |= {name: torch.zeros_like(value) if one_per_row else value[:0] for name, value in given.items()}
    other |= {name: [0] * rows for name in ("num_images", "num_tiles") if batch.get(name) is not None}
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
    return torch.tensor(batch.get("num_images") or [0] * len(batch["prompt_ids"])) > 0


def with_perturbed_rows(batch: dict[str, Any]) -> dict[str, Any]:
    """Return a batch of TRL with `perturbed_pixel_values` split by row, so that TRL shuffles and splits them."""
    perturbed = batch.get("perturbed_pixel_values")
    if perturbed is None:
        return batch
    parts = parts_by_counts(image_inputs_of(batch), batch["num_images"], batch.get("num_tiles"))["pixel_values"]
    return {**batch, "perturbed_pixel_values": [perturbed[part] for part in parts]}


def joined(pixels: list[torch.Tensor] | torch.Tensor) -> torch.Tensor:
    """Return pixels of rows as the one tensor that a model takes."""
    return torch.cat(pixels) if isinstance(pixels, list) else pixels


def _padded(
    rows: Sequence[Sequence[int]], value: int, side: Literal["left", "right"], multiple: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and their mask, (N, S) each, S a multiple of `multiple`."""
    ids = [torch.tensor(row, dtype=torch.long) for row in rows]
    padded = []
    for tokens, padding in ((ids, value), ([torch.ones_like(row) for row in ids], 0)):
        equal = pad_sequence(tokens, batch_first=True, padding_value=padding, padding_side=side)
        missing = -equal.size(1) % (multiple or 1)
        padded.append(pad(equal, (missing, 0) if side == "left" else (0, missing), value=padding))
    return padded[0], padded[1]


def image_tensors(fields: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the pixel inputs that a processor has made, which may be lists of arrays, as tensors."""
    return {
        name: value if isinstance(value, torch.Tensor) else torch.tensor(np.array(value))
        for name, value in image_inputs_of(fields).items()
    }


PERTURBED = "perturbed_pixel_values"  # lie as `pixel_values` do
ROW_INPUTS = (*IMAGE_INPUTS, PERTURBED)
_PADDING = {"image_position_ids": -1}  # Gemma 4's mark of a patch that is none; everything else is padded with zeros

Images = dict[str, torch.Tensor]  # the image inputs of one row, empty for a row without images


def split_images(batch: Mapping[str, Any], count: int) -> tuple[list[Images], bool]:
    """Return the image inputs of each row, and whether every row has an entry of its own even without an image.

    Args:
        batch: as TRL trains on it; `num_images` and `num_tiles` are lists with one number per row.

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
    """Return the image inputs of a batch of these rows; the inverse of `split_images`.

    Sizes that differ between rows (padding to the largest image, the most patches or the most images) are padded.

    Args:
        one_per_row: rows without images get an entry of zeros.
    """
    names = [name for name in ROW_INPUTS if any(name in row for row in rows)]
    return {name: _stack([row.get(name) for row in rows], _PADDING.get(name, 0), one_per_row) for name in names}


def _stack(parts: Sequence[torch.Tensor | None], padding: int, one_per_row: bool) -> torch.Tensor:
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


def move_images(rows: Sequence[Images], device: torch.device | str) -> list[Images]:
    """Return the rows on `device`; rows that shared a tensor share it again."""
    return _once_each(rows, lambda value: value.to(device))


def store_images(rows: Sequence[Images]) -> list[Images]:
    """Return copies on the CPU that keep no batch in memory; equal tensors become one object."""
    return _once_each(rows, lambda value: owned(value, "cpu"), fingerprint)


def _once_each(
    rows: Sequence[Images], change: Callable[[Any], Any], key: Callable[[Any], Hashable] = id
) -> list[Images]:
    changed: dict[Hashable, Any] = {}
    keys = [{name: key(value) for name, value in row.items()} for row in rows]
    for row, of_row in zip(rows, keys, strict=True):
        for name, value in row.items():
            if of_row[name] not in changed:
                changed[of_row[name]] = change(value)
    return [{name: changed[one] for name, one in of_row.items()} for of_row in keys]


def fingerprint(value: torch.Tensor) -> Hashable:
    """Return what tells a tensor from others: its form and a hash of its bytes."""
    data = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
    return value.dtype, value.shape, xxhash.xxh3_128_digest(data)


def owned(value: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Return a copy of `value` on `device` that shares no memory with it and keeps nothing but its elements."""
    return torch.empty(value.shape, dtype=value.dtype, device=device).copy_(value.detach())


# In these families 0 opens a token to everything of that type, before and behind it; what is generated gets this one.
_CAUSAL_TYPE = {"paligemma": 1}
VIEWS = "signals.views."  # before the names of perturbations
EXTRA = "signals.extra."  # before the names of signals (N, T) that were asked for by name
LAYERED = ("signals.attention.vision", "signals.attention.instruction", "signals.attention.region")  # (N, L, T)

# What TRL 1.16 trains on, by the tokens that it lies along: P of the prompt, padded on the left, T of the completion,
# padded on the right, or both.
_OF_PROMPTS = {"prompt_ids", "prompt_mask"}
_OF_COMPLETIONS = {
    *("completion_ids", "completion_mask", "tool_mask", "importance_sampling_ratio", "reference_hidden"),
    *("old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps"),
    *("token_advantages", "values", "returns"),
}
_MAY_BE_SINGLE = "importance_sampling_ratio"  # (N, T) or, one value per row, (N, 1)
_PAD_VALUES = {"tool_mask": 1.0, _MAY_BE_SINGLE: 1.0}  # of the others: 0, of ids the tokenizer's
# For rows from a batch without the column.
_MISSING = {"tool_mask": 1.0, **dict.fromkeys((*TOKEN_TYPES, "num_images", "num_tiles"), 0.0)}


def tokens_along(name: str) -> Literal["prompt", "completion", "sequence"] | None:
    """Return which tokens of a row the last dimension of the column of that name lies along, None if it does not."""
    if name in _OF_COMPLETIONS or (name.startswith("signals.") and ".num_" not in name):
        return "completion"
    if name in _OF_PROMPTS:
        return "prompt"
    return "sequence" if name in TOKEN_TYPES else None


def causal_type(config: Any, name: str) -> int:
    """Return the token type under which the tokens of a completion see only what comes before them.

    Args:
        name: `token_type_ids` or `mm_token_type_ids`.
    """
    return _CAUSAL_TYPE.get(config.model_type, 0) if name == "token_type_ids" else 0


def with_completion_types(inputs: Mapping[str, torch.Tensor], config: Any, length: int) -> dict[str, torch.Tensor]:
    """Return token types of so many columns, P + T; where only prompts have some, completions stay causal."""
    types = {name: inputs[name] for name in TOKEN_TYPES if name in inputs}
    return {
        name: pad(value, (0, length - value.size(1)), value=causal_type(config, name)) for name, value in types.items()
    }


@dataclass(eq=False)  # tensors do not compare to a bool
class Rows:
    """n completions with everything that TRL's loss reads for each of them, and their signals.

    Attributes:
        prompt_length: P.
        completion_length: T.
        columns: tensors and lists with one entry per row.
        images: image inputs of each row; tensors are one object where they are known to be equal.
        one_per_row: whether a row without images has an entry among the image inputs too.
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
        """Bytes of the tensors, image inputs that rows share counted once."""
        inputs = {id(value): value for images in self.images for value in images.values()}
        columns = [value for value in self.columns.values() if isinstance(value, torch.Tensor)]
        return sum(value.nbytes for value in [*columns, *inputs.values()])

    @classmethod
    def of_batch(cls, batch: Mapping[str, Any]) -> "Rows":
        """Return the rows of a batch of TRL; nothing is copied.

        Columns of unknown names are kept with their rows.

        Args:
            batch: what `_generate_and_score_completions` returns, with `columns_of_signals`.

        Raises:
            DataError: an entry of the batch cannot be assigned to rows.
        """
        count, prompt_length = batch["prompt_ids"].shape
        completion_length = batch["completion_ids"].size(1)
        images, one_per_row = split_images(batch, count)
        entries = {name: value for name, value in batch.items() if name not in ROW_INPUTS}
        columns = {name: value for name, value in entries.items() if not _of_whole_batch(value)}
        for name, value in columns.items():
            if not isinstance(value, torch.Tensor | list | tuple) or len(value) != count:
                raise DataError(
                    f"The batch has {name}, which cannot be assigned to its {count} rows: give a tensor or a list with "
                    "one entry per row, or a single number."
                )
        return cls(prompt_length, completion_length, columns, images, one_per_row)

    def width(self, name: str) -> int:
        """Return the tokens that a column has an entry for, 0 if it does not lie along tokens."""
        along = tokens_along(name)
        if along is None:
            return 0
        return (along != "completion") * self.prompt_length + (along != "prompt") * self.completion_length

    def take(self, indices: Sequence[int]) -> "Rows":
        """Return the rows with these numbers, in this order; rows that follow each other are not copied."""
        first, last = indices[0], indices[0] + len(indices)
        rows = slice(first, last) if list(indices) == list(range(first, last)) else list(indices)
        columns = {
            name: value[rows] if isinstance(value, torch.Tensor) else [value[index] for index in indices]
            for name, value in self.columns.items()
        }
        images = [self.images[index] for index in indices]
        return Rows(self.prompt_length, self.completion_length, columns, images, self.one_per_row)

    def trim(self, prompt_length: int, completion_length: int) -> "Rows":
        """Return the rows with only the last `prompt_length` and the first `completion_length` columns of tokens."""
        narrow = Rows(prompt_length, completion_length, {}, self.images, self.one_per_row)
        for name, value in self.columns.items():
            width = narrow.width(name)
            if width and value.size(-1) == self.width(name):
                start = 0 if tokens_along(name) == "completion" else self.prompt_length - prompt_length
                value = value[..., start : start + width]
            narrow.columns[name] = value
        return narrow

    def stored(self) -> "Rows":
        """Return copies on the CPU that keep no batch in memory, with equal image inputs only once."""
        columns = {
            name: owned(value, "cpu") if isinstance(value, torch.Tensor) else list(value)
            for name, value in self.columns.items()
        }
        return Rows(self.prompt_length, self.completion_length, columns, store_images(self.images), self.one_per_row)

    def into_batch(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return these rows as a batch of TRL, with the entries of `batch` that belong to no row, in its order."""
        images = stack_images(self.images, self.one_per_row)
        columns = {name: value for name, value in self.columns.items() if not name.startswith("signals.")}
        kept = {name: value for name, value in batch.items() if _of_whole_batch(value) and name not in ROW_INPUTS}
        found = {**kept, **columns, **images}
        return {name: found[name] for name in [*batch, *found] if name in found}


def _of_whole_batch(value: object) -> bool:
    return value is None or isinstance(value, int | float | str) or getattr(value, "ndim", 1) == 0


def join_rows(parts: Sequence[Rows], *, pad_token_id: int, pad_to_multiple_of: int | None = None) -> Rows:
    """Return all rows of `parts` as one, padded to the longest prompt and the longest completion.

    The first part, the rows of the batch to be trained on, decides about columns that not all parts have: what it
    lacks and no value of `_MISSING` fills in is dropped, because the loss does not read it.

    Args:
        parts: at least one; tensors of the result lie where those of the first part do.
        pad_to_multiple_of: P and T become multiples of it.

    Raises:
        DataError: a part lacks a column that the first part has and that cannot be filled in.
    """
    multiple = pad_to_multiple_of or 1
    longest = max(part.prompt_length for part in parts), max(part.completion_length for part in parts)
    prompt, completion = (length + -length % multiple for length in longest)
    joined = Rows(prompt, completion, {}, [], any(part.one_per_row for part in parts))
    device = parts[0].columns["prompt_ids"].device
    known = parts[0].columns.keys() | _MISSING.keys()
    for name in dict.fromkeys(name for part in parts for name in part.columns if name in known):
        values = _column(name, parts, joined, pad_token_id)
        if isinstance(values[0], torch.Tensor):
            joined.columns[name] = torch.cat([value.to(device, values[0].dtype) for value in values])
        else:
            joined.columns[name] = [entry for value in values for entry in value]
    wanted = {name for row in parts[0].images for name in row}
    rows = [row for part in parts for row in part.images]
    for row in rows:
        if row and not wanted <= row.keys():
            raise _lacking(min(wanted - row.keys()))
    kept = [{name: row[name] for name in row if name in wanted or not wanted} for row in rows]
    joined.images = move_images(kept, device)
    return joined


def _column(name: str, parts: Sequence[Rows], joined: Rows, pad_token_id: int) -> list[Any]:
    """The column `name` of each part, at the width of `joined` if it lies along tokens."""
    along = tokens_along(name)
    present = [part.columns[name] for part in parts if name in part.columns]
    if len(present) < len(parts) and name not in _MISSING:
        raise _lacking(name)
    if along is None:
        return [part.columns[name] if name in part.columns else _missing_counts(name, part) for part in parts]
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


def _missing_counts(name: str, part: Rows) -> list[int]:
    none: list[int] = [0] * len(part)
    # TRL leaves `num_tiles` out of a batch in which each image is a single tile.
    return part.columns.get("num_images", none) if name == "num_tiles" else none


def _lacking(name: str) -> DataError:
    return DataError(
        f"A group to be put into the batch has no {name}, which the batch has: it was stored under other options, so "
        "continue with those, or start with an empty replay buffer."
    )


Gather = Callable[[list[Any]], list[Any]]  # a list per process -> their concatenation, in their order, everywhere
Piece = TypeVar("Piece")


@dataclass(frozen=True)
class Placement:
    """How the completions of a rollout batch lie on the processes.

    All rows of all processes, one process after the other, are the completions of one prompt after the other. A group
    is spread over several processes where their rows are no multiple of G.

    Attributes:
        rows: completions on each process, N.
        num_generations: completions per prompt, G.
        process_index: this process.
        num_processes: how many hold `rows` completions each.
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
        """The processes that hold completions of `group`."""
        first = group * self.num_generations
        return range(first // self.rows, (first + self.num_generations - 1) // self.rows + 1)

    def here(self, group: int) -> list[tuple[int, int]]:
        """The completions of `group` on this process, as (row of this process, completion of the group) pairs."""
        offset = group * self.num_generations - self.process_index * self.rows
        return [(offset + index, index) for index in range(self.num_generations) if 0 <= offset + index < self.rows]

    def holder(self, group: int) -> int:
        """The process that keeps `group` whole: that of its first completion."""
        return self.holders(group)[0]

    def bring_to_holders(
        self, pieces: Mapping[int, Piece], holders: Mapping[int, int], gather: Gather | None
    ) -> dict[int, list[Piece]]:
        """Return the pieces of the groups that this process is the holder of, in the order of their completions.

        If any of the groups has completions on other processes than its holder, all of them call `gather` once.

        Args:
            pieces: of each group that has completions here, what to bring.
            holders: group -> process that keeps it whole; the same on every process.
            gather: over the processes; None if there is one.
        """
        here = self.process_index
        found = {group: {here: piece} for group, piece in pieces.items() if holders[group] == here}
        travelling = [group for group, holder in holders.items() if list(self.holders(group)) != [holder]]
        if travelling:
            sent = [(group, here, pieces[group]) for group in travelling if group in pieces and group not in found]
            assert gather is not None
            for group, process, piece in gather(sent):
                if holders[group] == here:
                    found.setdefault(group, {})[process] = piece
        return {group: [parts[process] for process in sorted(parts)] for group, parts in found.items()}
