"""The row of a pass: U prompts without padding, then N completions up to their last wanted token, (1, L).

`lay_out` makes it from a batch and its `PrefixSplit`. The base model runs once over it; norms, projections and MLPs see
one long row, and only token mixers read the layout, which reaches them as the keyword argument `ROW`.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from vgr_trl.pixels import on_device
from vgr_trl.sharing.model_support import require
from vgr_trl.sharing.prefix_split import PrefixSplit, first_rows, is_constant, sort_by_group, take_pixels

ROW = "shared_row"  # keyword argument by which attention functions and state mixers get the layout


class Visibility(NamedTuple):
    """The earlier tokens that a layer attends to.

    Attributes:
        window: number of positions, the token's own included; None: all.
        chunk: length of the chunks within which tokens attend; None: there are no chunks.
        sees_images: whether the tokens of an image attend to each other in both directions.
    """

    window: int | None = None
    chunk: int | None = None
    sees_images: bool = False


class Bounds(NamedTuple):
    """Arguments of attention with variable lengths: cumulative lengths, int32, and the longest length."""

    cu_seq_lens_q: Tensor
    cu_seq_lens_k: Tensor
    max_length_q: int
    max_length_k: int


@dataclass(frozen=True, eq=False)
class PackedRow:
    """U prompts, then N completions, as one row of L tokens.

    Padded forms, (U, P) and (N, C), have the prompts and completions at their beginning; a place of padding holds some
    valid number. A completion begins with the last token of its prompt, which emits its first token.

    Attributes:
        tokens: (L,) index of each token among the flattened tokens of the batch, (B, S).
        prompts: (U,) length of each prompt without its last token.
        completions: (N,) length of each completion.
        groups: (N,) number of each completion's prompt.
        batch_rows: (N,) number of each completion's row in the batch.
        shape: B and S of the batch.
        start: column of the batch in which completions begin.
        images: (L,) number of each token's image, -1 for other tokens; None where images do not see themselves.
        read_by: numbers of the layers that have read the layout.
    """

    tokens: Tensor
    prompts: list[int]
    completions: list[int]
    groups: list[int]
    batch_rows: list[int]
    shape: tuple[int, int]
    start: int
    images: Tensor | None = None
    read_by: set[int] = field(default_factory=set)
    _masks: dict[Visibility, tuple[Tensor | None, Tensor]] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        return self.tokens.device

    @property
    def num_prompt_tokens(self) -> int:
        """Number of prompt tokens, which precede the completions."""
        return sum(self.prompts)

    @cached_property
    def longest(self) -> int:
        """Length of the longest prompt with its completion."""
        return max(self.prompts[group] + length for group, length in zip(self.groups, self.completions, strict=True))

    @property
    def is_even(self) -> bool:
        """Whether all prompts, and all completions, have one length, so that no padded form has padding."""
        return len(set(self.prompts)) == len(set(self.completions)) == 1

    @cached_property
    def prompt_places(self) -> Tensor:
        """(U, P) places of the prompts' tokens in the row."""
        return _number_places(_is_valid(self.prompts)).to(self.device, non_blocking=True)

    @cached_property
    def own_places(self) -> Tensor:
        """(N, C) places of the completions' tokens in the row."""
        return self.num_prompt_tokens + _number_places(_is_valid(self.completions)).to(self.device, non_blocking=True)

    @cached_property
    def query_places(self) -> Tensor:
        """(U P + N C,) places of all padded queries, prompts first."""
        return torch.cat([self.prompt_places.flatten(), self.own_places.flatten()])

    @cached_property
    def key_places(self) -> Tensor:
        """(U P + N (P + C),) places of all padded keys: prompts first, then each completion behind its prompt."""
        behind = torch.cat([self.prompt_places[self.group_index], self.own_places], dim=1)
        return torch.cat([self.prompt_places.flatten(), behind.flatten()])

    @cached_property
    def packed_keys(self) -> Tensor:
        """(K,) places of the completions' keys without padding, each completion behind its prompt."""
        is_key = torch.cat([_is_valid(self.prompts)[self.groups], _is_valid(self.completions)], dim=1)  # (N, P + C)
        index = is_key.flatten().nonzero().flatten().to(self.device, non_blocking=True)
        return self.key_places[self.prompt_places.numel() :][index]

    @cached_property
    def back(self) -> Tensor:
        """(L,) place of each token of the row among the padded queries."""
        valid = [_is_valid(self.prompts).flatten(), _is_valid(self.completions).flatten()]
        return torch.cat(valid).nonzero().flatten().to(self.device, non_blocking=True)

    @cached_property
    def left_padded(self) -> tuple[Tensor, Tensor, Tensor]:
        """Prompts padded on the left, all ending in the last column: places (U, P), mask (U, P), tokens among U P."""
        mask = _is_valid(self.prompts).flip(1)
        parts = _number_places(mask), mask, mask.flatten().nonzero().flatten()
        places, mask, back = (part.to(self.device, non_blocking=True) for part in parts)
        return places, mask, back

    @cached_property
    def group_index(self) -> Tensor:
        return on_device(self.groups, self.device)

    @cached_property
    def prompt_bounds(self) -> Bounds:
        return self._bounds(self.prompts, self.prompts)

    @cached_property
    def own_bounds(self) -> Bounds:
        """Bounds with completions as queries, and with prompts and completions as keys."""
        keys = [self.prompts[group] + length for group, length in zip(self.groups, self.completions, strict=True)]
        return self._bounds(self.completions, keys)

    @cached_property
    def bounds_over_prompts(self) -> Bounds:
        """Bounds with all completions of a prompt together as queries, and the prompt as keys."""
        lengths = [0] * len(self.prompts)
        for group, completion in zip(self.groups, self.completions, strict=True):
            lengths[group] += completion
        return self._bounds(lengths, self.prompts)

    @cached_property
    def bounds_over_themselves(self) -> Bounds:
        return self._bounds(self.completions, self.completions)

    def _bounds(self, queries: Sequence[int], keys: Sequence[int]) -> Bounds:
        ends, key_ends = (pad(on_device(counts, self.device).cumsum(0), (1, 0)).int() for counts in (queries, keys))
        return Bounds(ends, key_ends, max(queries), max(keys))

    def masks(self, seen: Visibility) -> tuple[Tensor | None, Tensor]:
        """Return the attention masks of padded prompts and of padded completions.

        Returns:
            (U, 1, P, P) bool, or None where each token sees all earlier ones; (N, 1, C, P + C) bool.
        """
        if seen not in self._masks:  # all layers of a kind read the same
            self._masks[seen] = self._prompt_mask(seen), self._own_mask(seen)
        return self._masks[seen]

    def _prompt_mask(self, seen: Visibility) -> Tensor | None:
        plain = seen.chunk is None and (seen.window is None or max(self.prompts) <= seen.window)
        images = self.images if seen.sees_images else None
        if plain and images is None:
            return None
        place = torch.arange(max(self.prompts), device=self.device)
        visible = (place <= place.unsqueeze(1)).expand(len(self.prompts), -1, -1)  # (U, P, P)
        if images is not None:
            image = images[self.prompt_places]  # (U, P)
            visible = visible | ((image.unsqueeze(1) == image.unsqueeze(2)) & (image >= 0).unsqueeze(1))
        visible = visible & _is_near(place.unsqueeze(1), place, seen)
        is_key = _is_valid(self.prompts).to(self.device, non_blocking=True).unsqueeze(1)
        itself = torch.eye(len(place), dtype=torch.bool, device=self.device)  # padding sees itself, not nothing
        return ((visible & is_key) | itself).unsqueeze(1)

    def _own_mask(self, seen: Visibility) -> Tensor:
        lengths = on_device(self.prompts, self.device)[self.group_index].unsqueeze(1)  # (N, 1)
        before, offsets = (torch.arange(max(sizes), device=self.device) for sizes in (self.prompts, self.completions))
        queries = lengths + offsets  # (N, C) places in prompt and completion
        before = torch.where(before < lengths, before, self.longest)  # (N, P), padding behind all queries
        queries, keys = queries.unsqueeze(-1), torch.cat([before, queries], dim=1).unsqueeze(1)
        return ((keys <= queries) & _is_near(queries, keys, seen)).unsqueeze(1)

    @cached_property
    def row_index(self) -> Tensor:
        return on_device(self.batch_rows, self.device)

    @cached_property
    def numbers(self) -> Tensor:
        """(L,) number of the prompt or completion that each token belongs to."""
        parts = [_is_valid(lengths).nonzero()[:, 0] for lengths in (self.prompts, self.completions)]
        return torch.cat(parts).to(self.device, non_blocking=True)

    @cached_property
    def table(self) -> Tensor:
        """(B, S) place of each batch token in the row; a group shares its prompt's places; -1: none."""
        lengths = on_device(self.prompts, self.device).unsqueeze(1)  # (U, 1)
        to_end = self.start - torch.arange(self.start, device=self.device)  # columns up to the end of the prompts
        of_prompts = torch.where(to_end <= lengths, lengths.cumsum(0) - to_end, -1)  # (U, start)
        index = torch.full(self.shape, -1, device=self.device)
        index[self.row_index, : self.start] = of_prompts[self.group_index]
        first = self.num_prompt_tokens
        index.view(-1)[self.tokens[first:]] = torch.arange(first, len(self.tokens), device=self.device)
        return index

    def predicting_places(self, length: int) -> Tensor:
        """Return where in the row the first `length` tokens of each completion are predicted, (B, T); -1: nowhere."""
        return self.table[:, self.start : self.start + length]

    def alone(self, number: int) -> tuple["PackedRow", Tensor]:
        """Return the layout of one completion and its prompt, and the places of their tokens in this row."""
        group = self.groups[number]
        prompt, completion = self.prompts[group], self.completions[number]
        places = torch.cat([self.prompt_places[group, :prompt], self.own_places[number, :completion]])
        images = None if self.images is None else self.images[places]
        part = replace(
            self,
            tokens=self.tokens[places],
            prompts=[prompt],
            completions=[completion],
            groups=[0],
            batch_rows=[self.batch_rows[number]],
            images=images,
            _masks={},
        )
        return part, places


def _is_valid(lengths: Sequence[int]) -> Tensor:
    """Mark the places of a padded form that hold a token, (rows, longest) bool."""
    return torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1)


def _number_places(is_valid: Tensor) -> Tensor:
    """Number the tokens of padded parts, one part behind the other; padding gets the number of a nearby token."""
    return (is_valid.flatten().cumsum(0) - 1).clamp(min=0).view_as(is_valid)


def _is_near(queries: Tensor, keys: Tensor, seen: Visibility) -> Tensor:
    """Return whether keys are within the window and the chunk of queries; places broadcast."""
    near = torch.ones((), dtype=torch.bool, device=keys.device)
    if seen.window is not None:
        near = near & (queries - keys < seen.window)
    if seen.chunk is not None:
        near = near & (queries // seen.chunk == keys // seen.chunk)
    return near


def lay_out(
    base: Any,
    inputs: Mapping[str, Any],
    split: PrefixSplit,
    lengths: Sequence[int] | None = None,
    *,
    whole: bool = False,
) -> tuple[PackedRow, dict[str, Any]]:
    """Lay out a split batch as one row; return the layout, and the inputs of a pass over the row.

    Args:
        base: base model (without head) of a transformers model.
        inputs: inputs of the pass over the batch by name; tokens are (B, S).
        split: unique prompts and completions of the batch.
        lengths: (B,) columns of each row's completion that run, 0 for rows that do not; None: all that emit a token.
        whole: whether the last token of a completion, which emits none, runs too.
    """
    ids, mask = inputs["input_ids"], inputs.get("attention_mask")
    mask = torch.ones_like(ids) if mask is None else mask
    inputs = {**inputs, "attention_mask": mask}
    before, emit = mask[:, : split.start].bool().sum(1), mask[:, split.start + (not whole) :].bool().sum(1)
    of_prompts, emitted = torch.stack([before, emit]).tolist()  # the host waits once
    lengths = [max(count, 1) for count in emitted] if lengths is None else lengths
    running = [row for row, length in enumerate(lengths) if length]
    rows = sort_by_group(running, split.groups)  # the completions of a prompt stand together
    kept = {group: number for number, group in enumerate(dict.fromkeys(split.groups[row] for row in rows))}
    groups = [kept[split.groups[row]] for row in rows]
    firsts = [rows[row] for row in first_rows(groups)]
    width = ids.size(1)
    parts = [range(row * width + split.start - of_prompts[row], row * width + split.start) for row in firsts]
    parts += [range(row * width + split.start, row * width + split.start + lengths[row]) for row in rows]
    tokens = torch.cat([torch.arange(part.start, part.stop) for part in parts]).to(ids.device, non_blocking=True)
    text = base.config.get_text_config(decoder=True)
    row = PackedRow(
        tokens,
        prompts=[of_prompts[row] for row in firsts],
        completions=[lengths[row] for row in rows],
        groups=groups,
        batch_rows=rows,
        shape=(len(ids), width),
        start=split.start,
        images=_number_images(inputs, text, tokens),
    )
    # Models pass a mask of one element on unchanged, and build none.
    nothing = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=ids.device)
    by_kind = {"full_attention": nothing, "sliding_attention": nothing}  # Gemma builds masks of images otherwise
    call: dict[str, Any] = {
        **{name: value for name, value in inputs.items() if is_constant(value) and name != "logits_to_keep"},
        **_take_images(inputs, split, firsts, rows),
        "input_ids": ids.flatten()[tokens].unsqueeze(0),
        "attention_mask": nothing if row.images is None else by_kind,
        "position_ids": _positions(base, inputs, split, firsts, row),
        "use_cache": False,
        "return_dict": True,
        ROW: row,
    }
    return row, call


def _take_images(
    inputs: Mapping[str, Any], split: PrefixSplit, firsts: Sequence[int], rows: Sequence[int]
) -> dict[str, Tensor]:
    """Concatenate the pixel inputs of prompts and completions; empty if there is no image."""
    taken = take_pixels(inputs, split.pixels, firsts), take_pixels(inputs, split.behind, rows)
    return {name: torch.cat([part[name] for part in taken if name in part]) for name in taken[0] | taken[1]}


# Token types by which images see themselves, by the type of the language model.
_IMAGE_TYPES = {"gemma3_text": ("token_type_ids", (1,)), "gemma4_text": ("mm_token_type_ids", (1, 2))}


def _number_images(inputs: Mapping[str, Any], text: Any, tokens: Tensor) -> Tensor | None:
    """Number the images of a batch; return the number of each token's image, (L,), -1 for others, or None."""
    name, kinds = _IMAGE_TYPES.get(text.model_type, ("", ()))
    types = inputs.get(name)
    if types is None or (text.model_type == "gemma4_text" and text.use_bidirectional_attention != "vision"):
        return None
    require("flash" not in text._attn_implementation, "flash attention to images that see themselves")
    if text.model_type == "gemma4_text":  # from transformers 5.17 on they see themselves in windowed layers alone
        known = dir(sys.modules.get("transformers.models.gemma4.modeling_gemma4"))
        require("create_masks_for_vision_model" in known, "images that see themselves in every layer")
    is_image = torch.isin(types, types.new_tensor(kinds))  # (B, S)
    begins = is_image & ~pad(is_image, (1, 0))[:, :-1]
    return torch.where(is_image, begins.cumsum(1), -1).flatten()[tokens]


def _positions(base: Any, inputs: Mapping[str, Any], split: PrefixSplit, firsts: Sequence[int], row: PackedRow) -> Any:
    """Return each token's position in its row of the batch, (1, L), for Qwen-VL (3, 1, L)."""
    positions: Tensor | None = inputs.get("position_ids")
    if positions is not None:
        return positions.expand(*positions.shape[:-2], *row.shape).flatten(-2)[..., row.tokens].unsqueeze(-2)
    columns = row.tokens % row.shape[1]  # models without `position_ids` count columns
    names = ("input_ids", "mm_token_type_ids", "image_grid_thw", "attention_mask")
    if not hasattr(base, "rope_deltas") or any(inputs.get(name) is None for name in names[:3]):
        return columns.unsqueeze(0)
    if split.behind:
        every, _ = base.get_rope_index(**{name: inputs.get(name) for name in names})  # (3, B, S)
        return every.flatten(-2)[:, row.tokens].unsqueeze(1).to(columns.device)
    prompts = {name: inputs[name][on_device(firsts, columns.device), : split.start] for name in (*names[:2], names[3])}
    prompts |= take_pixels(inputs, {names[2]: split.pixels[names[2]]}, firsts)
    if names[2] not in prompts:  # no prompt has an image
        return columns.unsqueeze(0)
    every, deltas = base.get_rope_index(**prompts)  # (3, U, start), (U, 1)
    first = row.num_prompt_tokens
    before = every.flatten(-2)[:, row.numbers[:first] * split.start + columns[:first]]
    counted = inputs[names[3]].long().cumsum(-1).flatten()[row.tokens[first:]] - 1
    behind = counted + deltas.to(columns.device)[row.group_index, 0][row.numbers[first:]]
    return torch.cat([before, behind.expand(3, -1)], dim=1).unsqueeze(1)


def run_row(plain: Callable[..., Any], base: Any, row: PackedRow, call: Mapping[str, Any]) -> Any:
    """Run a model over a row; return its outputs.

    Args:
        plain: forward pass of a transformers model, or of its base.
        base: base model (without head).
        row: layout.
        call: its arguments, as `lay_out` returns them.

    Raises:
        UnsupportedModel: a layer has not read the layout, so that its tokens saw each other.
    """
    outputs, layers = plain(**call), base.config.get_text_config(decoder=True).num_hidden_layers
    require(len(row.read_by) == layers, "a model that does not hand the layout of a row on to all of its layers")
    return outputs
