"""Where a batch is cut into prompts, computed once each, and the rest of every row."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from vgr_trl.batch.image_parts import IMAGE_INPUTS
from vgr_trl.batch.inputs import TOKEN_TYPES
from vgr_trl.sharing.counts import CannotShare
from vgr_trl.sharing.fitness import refuse_token_types
from vgr_trl.sharing.grouping import best_split, find_groups, first_rows, inputs_of_rows
from vgr_trl.sharing.image_inputs import image_token_ids, is_image_token, rows_of_images

PER_TOKEN = ("input_ids", "attention_mask", *TOKEN_TYPES)
_KNOWN = {*PER_TOKEN, *IMAGE_INPUTS, "position_ids"}
_EXTRA_OUTPUTS = ("output_hidden_states", "output_attentions", "output_router_logits")


@dataclass(frozen=True)
class Cut:
    """Columns [0, split) are computed once per prompt, columns [split, stop) once per row.

    Attributes:
        split: columns of the prompts that are computed once, at least 1.
        stop: end of the columns that are computed at all.
        groups: (N,) row -> number of its prompt.
        pixels: per pixel input, the slice of it that belongs to each row.
    """

    split: int
    stop: int
    groups: list[int]
    pixels: dict[str, list[slice]]

    @property
    def prompts(self) -> int:
        """U, the number of different prompts."""
        return max(self.groups) + 1

    def prompt_inputs(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The inputs of the unique prompts, (U, split), with their images."""
        rows = first_rows(self.groups)
        chosen = {name: inputs[name][rows, : self.split] for name in PER_TOKEN if inputs.get(name) is not None}
        positions = inputs.get("position_ids")
        if positions is not None:
            at = rows if positions.size(-2) == len(self.groups) else slice(None)  # one row may stand for all
            chosen["position_ids"] = positions[..., at, : self.split]
        for name, parts in self.pixels.items():
            chosen[name] = torch.cat([inputs[name][parts[row]] for row in rows])
        return chosen


def find_cut(inputs: Mapping[str, Any], config: Any, completion_length: int | None, *, alone: bool = False) -> Cut:
    """The cut of a batch; its last column is left out if the completion length is given.

    Args:
        completion_length: T, or None to find the cut that saves most.
        alone: whether a batch in which no prompt occurs twice is cut as well, if T is given.

    Raises:
        CannotShare: the batch has no equal prompts, or computing them once would not be exact.
    """
    _refuse_unfit_inputs(inputs, config)
    ids = inputs["input_ids"]  # (N, S)
    mask = torch.ones_like(ids) if inputs.get("attention_mask") is None else inputs["attention_mask"]  # (N, S)
    is_image = is_image_token(ids, config)
    pixels = rows_of_images(inputs, is_image)
    per_row = [inputs_of_rows(inputs, pixels, row) for row in range(len(ids))] if pixels else None

    stop = ids.size(1)
    if completion_length is None:
        columns = torch.arange(stop, device=ids.device)
        earliest = int(torch.where(is_image | (mask == 0).cumprod(1).bool(), columns, -1).max()) + 2
        if earliest > stop:
            raise CannotShare("a row without a token behind its padding and images")
        seen = mask.bool().all(0).long()  # (S,): columns that are padding in no row
        latest = earliest - 2 + int(seen[earliest - 1 :].cumprod(0).sum())
        split = best_split(ids, mask, per_row, earliest, latest)
    else:
        stop -= 1
        split = stop - completion_length
    if split is None:
        raise CannotShare("no prompt occurs twice")
    if split < 1 or completion_length == 0:
        raise CannotShare("no prompt before the completions")
    groups = find_groups(ids[:, :split], mask[:, :split], per_row)
    if max(groups) + 1 == len(groups) and not alone:
        raise CannotShare("no prompt occurs twice")
    refuse_uneven_prompts(inputs, groups, split)
    types = inputs.get("mm_token_type_ids")
    if bool(is_image[:, split:].any()) or (types is not None and bool(types[:, split:].any())):
        raise CannotShare("images in completions")
    if not bool(mask[:, split - 1 : split + 1].all()):
        raise CannotShare("prompts that are not padded on the left")
    if bool((mask[:, split:].bool().long().diff() > 0).any()):
        raise CannotShare("holes in the mask of a completion")
    return Cut(split, stop, groups, pixels)


def refuse_uneven_prompts(inputs: Mapping[str, Any], groups: list[int], split: int) -> None:
    """Raise `CannotShare` if rows with the same tokens differ in what else is given per token of the prompt."""
    firsts = first_rows(groups)
    leaders = [firsts[group] for group in groups]
    for name in ("token_type_ids", "mm_token_type_ids", "position_ids"):
        value = inputs.get(name)
        if value is None or value.size(-2) != len(groups):
            continue
        prompts = value[..., :split]
        if not torch.equal(prompts, prompts[..., leaders, :]):
            raise CannotShare(f"equal prompts with different {name}")


def constants(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs that are the same for prompts and completions: numbers, flags, names."""
    return {name: value for name, value in inputs.items() if _is_constant(value)}


def _is_constant(value: object) -> bool:
    return isinstance(value, bool | int | float | str) or (isinstance(value, torch.Tensor) and value.ndim == 0)


def _refuse_unfit_inputs(inputs: Mapping[str, Any], config: Any) -> None:
    ids, mask = inputs.get("input_ids"), inputs.get("attention_mask")
    if not isinstance(ids, torch.Tensor) or ids.ndim != 2:
        raise CannotShare("inputs without input_ids")
    if mask is not None and (not isinstance(mask, torch.Tensor) or mask.shape != ids.shape):
        raise CannotShare("an attention mask that is not one number per token")
    positions = inputs.get("position_ids")
    if mask is None and positions is not None and bool((positions.diff() != 1).any()):
        raise CannotShare("position_ids that start anew, without an attention mask")
    for name in _EXTRA_OUTPUTS:
        wanted = inputs.get(name)
        if wanted is None:
            wanted = any(getattr(part, name, False) for part in (config, config.get_text_config()))
        if wanted:
            raise CannotShare(f"{name}=True")
    if inputs.get("return_dict") is False:
        raise CannotShare("return_dict=False")
    refuse_token_types(inputs, config)
    for name, value in inputs.items():
        ignored = name == "labels" and config.model_type == "gemma3"  # takes them, and leaves them to the head
        if name not in _KNOWN and value is not None and not _is_constant(value) and not ignored:
            raise CannotShare(f"the input {name}")
    if inputs.get("pixel_values") is not None and not image_token_ids(config):
        raise CannotShare("images without image tokens")
