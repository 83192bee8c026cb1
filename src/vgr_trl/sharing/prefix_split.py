"""Split a batch into unique prompts and the columns behind them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vgr_trl.pixels import (
    IMAGE_INPUTS,
    TOKEN_TYPES,
    ImageInputs,
    Parts,
    UnknownParts,
    image_inputs_of,
    on_device,
    parts_by_tokens,
)
from vgr_trl.sharing.model_support import (
    UnsupportedModel,
    check_token_types,
    require,
)

PER_TOKEN = ("input_ids", "attention_mask", *TOKEN_TYPES)
_KNOWN = {*PER_TOKEN, *IMAGE_INPUTS, "position_ids"}
NOT_TWICE = "no prompt occurs twice"
_EXTRA_OUTPUTS = ("output_hidden_states", "output_attentions", "output_router_logits")
# Families whose completions may hold images: `get_rope_index` gives the positions of whole rows.
IMAGES_BEHIND = {"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"}


def find_groups(ids: Tensor, mask: Tensor | None = None, pixels: Sequence[Sequence[Tensor]] | None = None) -> list[int]:
    """Group rows with equal tokens, mask and pixels.

    Args:
        ids: (N, P) tokens of the prompts.
        mask: (N, P) attention mask; None: there is no padding.
        pixels: pixel inputs of each row, empty of a row without an image; None: no row has an image.

    Returns:
        (N,) number of the group of each row, in order of first appearance.
    """
    texts = ids.tolist() if mask is None else torch.stack([ids, mask.to(ids.dtype)], dim=1).flatten(1).tolist()
    alike: dict[tuple[int, ...], list[int]] = {}  # text -> its rows
    for row, text in enumerate(texts):
        alike.setdefault(tuple(text), []).append(row)
    firsts, undecided = list(range(len(texts))), list(alike.values())  # the first row of each row's group
    while undecided:
        pairs = [(rows[0], row) for rows in undecided for row in rows[1:]]
        equal = {row: first for (first, row), same in zip(pairs, _compare_pixels(pixels, pairs), strict=True) if same}
        for row, first in equal.items():
            firsts[row] = first
        remaining = ([row for row in rows[1:] if row not in equal] for rows in undecided)
        undecided = [rows for rows in remaining if rows]
    numbers = {first: number for number, first in enumerate(dict.fromkeys(firsts))}
    return [numbers[first] for first in firsts]


def first_rows(groups: Sequence[int]) -> list[int]:
    """Return the first row of each group, in the order of the groups."""
    return [row for row, group in enumerate(groups) if group not in groups[:row]]


def sort_by_group(permutation: Sequence[int], groups: Sequence[int]) -> list[int]:
    """Move each group's rows to the place of its first row in a permutation; keep their order.

    Args:
        permutation: numbers of all rows, in any order.
        groups: group of each row.
    """
    position = {group: place for place, group in enumerate(dict.fromkeys(groups[row] for row in permutation))}
    return sorted(permutation, key=lambda row: position[groups[row]])


def round_up_to_groups(batch_size: int, num_generations: int) -> int:
    """Round a batch size up to a multiple of `num_generations`, for passes without gradients."""
    return -(-batch_size // num_generations) * num_generations


def _compare_pixels(pixels: Sequence[Sequence[Tensor]] | None, pairs: Sequence[tuple[int, int]]) -> list[bool]:
    """Compare the pixels of each pair of rows; the host waits once, after all comparisons."""
    if pixels is None or not pairs:
        return [True] * len(pairs)
    results: list[Tensor | bool] = []
    for first, second in pairs:
        inputs = list(zip(pixels[first], pixels[second], strict=True))
        alike = all(left.shape == right.shape for left, right in inputs)
        equal = [(left == right).all() for left, right in inputs if alike]
        results.append(torch.stack(equal).all() if equal else alike)
    compared = [result for result in results if isinstance(result, Tensor)]
    values = iter(torch.stack(compared).tolist() if compared else ())
    return [next(values) if isinstance(result, Tensor) else result for result in results]


def image_token_ids(config: Any) -> tuple[int, ...]:
    """Return the ids of a model's image placeholders; empty for a text model.

    Video placeholders are left out: batches with videos are not shared, and without a video they are ordinary tokens.
    """
    ids = (getattr(config, name, None) for name in ("image_token_id", "image_token_index"))
    return tuple({token for token in ids if isinstance(token, int)})


def is_image_token(input_ids: Tensor, config: Any) -> Tensor:
    """Mark the image placeholders among tokens (N, S), (N, S) bool."""
    return torch.isin(input_ids, on_device(image_token_ids(config), input_ids.device).to(input_ids.dtype))


@dataclass(frozen=True)
class PrefixSplit:
    """A batch whose columns before `start` run once per prompt, and the others once per row.

    Attributes:
        start: number of columns that run once per prompt, at least 1.
        groups: (N,) number of the prompt of each row.
        pixels: pixel input -> slice of each row's prompt in it.
        behind: pixel input -> slice of each row's completion in it; empty where no completion has an image.
        copies: number of completions that `generate` samples for each row.
    """

    start: int
    groups: list[int]
    pixels: dict[str, list[slice]]
    copies: int = 1
    behind: dict[str, list[slice]] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """Number of completions of all rows."""
        return len(self.groups) * self.copies

    @property
    def prompts(self) -> int:
        """U, the number of unique prompts."""
        return max(self.groups) + 1

    def prompt_inputs(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the inputs of the unique prompts, (U, start), with their images."""
        rows = first_rows(self.groups)
        index = on_device(rows, inputs["input_ids"].device)  # (U,)
        chosen = {name: inputs[name][index, : self.start] for name in PER_TOKEN if inputs.get(name) is not None}
        positions = inputs.get("position_ids")
        if positions is not None:
            at = index if positions.size(-2) == len(self.groups) else slice(None)  # one row may stand for all
            chosen["position_ids"] = positions[..., at, : self.start]
        return chosen | take_pixels(inputs, self.pixels, rows)


def take_pixels(inputs: Mapping[str, Any], parts: Parts, rows: Sequence[int]) -> dict[str, Tensor]:
    """Return the pixel inputs of some rows; empty if they have no image.

    Args:
        inputs: inputs of the pass by name.
        parts: pixel input -> slice of each row of the batch.
        rows: numbers of the rows.
    """
    pixels = {name: torch.cat([inputs[name][slices[row]] for row in rows]) for name, slices in parts.items()}
    return pixels if any(map(len, pixels.values())) else {}


def find_split(inputs: Mapping[str, Any], config: Any, start: int | None = None) -> PrefixSplit:
    """Split a batch into unique prompts and the columns behind them.

    Args:
        inputs: inputs of the pass by name; tokens are (N, S).
        config: configuration of the model.
        start: number of columns of the prompts; None: the split that saves most.

    Raises:
        UnsupportedModel: a split without a given start saves nothing, or computing prompts once would not be exact.
    """
    ids, types = inputs["input_ids"], inputs.get("mm_token_type_ids")  # (N, S)
    mask = torch.ones_like(ids) if inputs.get("attention_mask") is None else inputs["attention_mask"]  # (N, S)
    is_image = is_image_token(ids, config)
    pixel_inputs = image_inputs_of(inputs)
    try:
        parts, behind = _separate_prompt_parts(pixel_inputs, is_image, ids.size(1) if start is None else start)
    except UnknownParts as error:
        raise UnsupportedModel(error.reason) from error
    rows = range(len(ids))
    pixels = [[pixel_inputs[name][slices[row]] for name, slices in parts.items()] for row in rows] if parts else None
    start = _find_best_start(ids, mask, is_image, pixels) if start is None else start
    require(start >= 1, "no prompt before the completions")
    groups = find_groups(ids[:, :start], mask[:, :start], pixels)
    check_equal_prompts(inputs, groups, start)
    unfit = is_image[:, start:] if types is None else is_image[:, start:] | types[:, start:].bool()
    if behind and types is not None and config.model_type in IMAGES_BEHIND:
        followed = torch.nn.functional.pad(mask[:, start + 1 :], (0, 1)).bool()  # the last token of a row does not run
        unfit = (types[:, start:] != is_image[:, start:]) | (is_image[:, start:] & ~followed)
    starts = mask[:, start - 1 : start + 1].all()
    checks = torch.stack([unfit.any(), starts, (mask[:, start:].bool().long().diff() > 0).any()])
    images_behind, padded_on_the_left, holes = checks.tolist()  # the host waits once
    require(not images_behind, "images in completions")
    require(padded_on_the_left, "prompts that are not padded on the left")
    require(not holes, "holes in the mask of a completion")
    return PrefixSplit(start, groups, parts, behind=behind)


def _separate_prompt_parts(pixel_inputs: ImageInputs, is_image: Tensor, start: int) -> tuple[Parts, Parts]:
    """Split the slices of each pixel input into images before column `start` and images behind it.

    Only patches can be assigned to columns. Other pixel inputs belong to prompts.
    """
    if "image_grid_thw" not in pixel_inputs:
        return parts_by_tokens(pixel_inputs, is_image) if pixel_inputs else {}, {}
    before = torch.arange(is_image.size(1), device=is_image.device) < start
    halves = parts_by_tokens(pixel_inputs, torch.stack([is_image & before, is_image & ~before], dim=1).flatten(0, 1))
    behind = {name: slices[1::2] for name, slices in halves.items()}
    has_images = any(part.stop > part.start for slices in behind.values() for part in slices)
    return {name: slices[::2] for name, slices in halves.items()}, behind if has_images else {}


def _find_best_start(ids: Tensor, mask: Tensor, is_image: Tensor, pixels: Sequence[Sequence[Tensor]] | None) -> int:
    """Return the split that computes the fewest tokens, for a batch with unknown prompt lengths.

    The split is the number of columns p, behind padding and images, with the largest p * (N - number of different rows
    in columns [0, p)). Rows with different pixels share nothing.
    """
    columns = torch.arange(ids.size(1), device=ids.device)
    earliest = int(torch.where(is_image | (mask == 0).cumprod(1).bool(), columns, -1).max()) + 2
    require(earliest <= ids.size(1), "a row without a token behind its padding and images")
    seen = mask.bool().all(0).long()  # (S,): columns that are padding in no row
    latest = earliest - 2 + int(seen[earliest - 1 :].cumprod(0).sum())
    groups = on_device(find_groups(ids[:, :0], pixels=pixels), ids.device)
    differs = (ids.unsqueeze(1) != ids) | (mask.unsqueeze(1) != mask)  # (N, N, S)
    common = torch.where(differs.any(-1), differs.byte().argmax(-1), ids.size(1)).clamp(max=latest)
    is_earlier = (groups.unsqueeze(1) == groups).tril(-1)  # (N, N), among rows with the same pixels
    shared: list[int] = (common * is_earlier).amax(1).tolist()  # columns that a row has in common with some earlier row
    splits = {split for split in shared if split >= earliest}
    require(splits, NOT_TWICE)
    return max(splits, key=lambda split: split * sum(common_columns >= split for common_columns in shared))


def check_inputs(inputs: Mapping[str, Any], config: Any) -> None:
    """Raise `UnsupportedModel` for inputs that sharing would change, or outputs that it cannot return."""
    ids, mask, positions = (inputs.get(name) for name in ("input_ids", "attention_mask", "position_ids"))
    if not isinstance(ids, Tensor) or ids.ndim != 2:
        raise UnsupportedModel("inputs without input_ids")
    one_per_token = mask is None or (isinstance(mask, Tensor) and mask.shape == ids.shape)
    require(one_per_token, "an attention mask that is not one number per token")
    restarts = mask is None and positions is not None and (positions.diff() != 1).any()
    require(not restarts, "position_ids that restart, without an attention mask")
    parts = (config, config.get_text_config())
    for name in _EXTRA_OUTPUTS:
        wanted = inputs.get(name)
        wanted = any(getattr(part, name, False) for part in parts) if wanted is None else wanted
        require(not wanted, f"{name}=True")
    require(inputs.get("return_dict") is not False, "return_dict=False")
    check_token_types(inputs, config)
    accepted = {*_KNOWN, "labels"} if config.model_type == "gemma3" else _KNOWN  # it passes labels on to its head
    for name, value in inputs.items():
        require(name in accepted or value is None or is_constant(value), f"the input {name}")
    require(inputs.get("pixel_values") is None or image_token_ids(config), "images without image tokens")


def check_equal_prompts(inputs: Mapping[str, Any], groups: list[int], start: int) -> None:
    """Raise `UnsupportedModel` if equal prompts differ in their token types or positions.

    Args:
        inputs: inputs of the pass by name.
        groups: (N,) number of the prompt of each row.
        start: number of columns of the prompts.
    """
    firsts = first_rows(groups)
    leaders = on_device([firsts[group] for group in groups], inputs["input_ids"].device)
    for name in (*TOKEN_TYPES, "position_ids"):
        value = inputs.get(name)
        if value is not None and value.size(-2) == len(groups):
            prompts = value[..., :start]
            require(torch.equal(prompts, prompts[..., leaders, :]), f"equal prompts with different {name}")


def is_constant(value: object) -> bool:
    """Whether an input is the same for prompts and completions: a number, a flag or a name."""
    return isinstance(value, bool | int | float | str) or (isinstance(value, Tensor) and value.ndim == 0)
