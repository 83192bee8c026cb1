"""A forward pass in which each prompt is computed once: the prompts first, then all completions behind them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from inspect import signature
from threading import RLock
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import DynamicCache
from transformers.modeling_flash_attention_utils import flash_attn_supports_top_left_mask, lazy_import_flash_attention
from transformers.modeling_layers import GradientCheckpointingLayer

from vgr_trl.batch import IMAGE_INPUTS, TOKEN_TYPES, Parts, UnknownParts, image_inputs_of, parts_by_tokens
from vgr_trl.sharing.model_support import (
    attention_wrapped,
    is_tracing,
    refuse_token_types,
    refuse_unfit_model,
    shards_layers,
)
from vgr_trl.sharing.prefix_cache import (
    Prefix,
    PromptsStored,
    SharingReport,
    UnsupportedModel,
    check_read,
    check_written,
    ends_with_keys,
    packed_prefix,
    prefix_to_read,
    prefix_to_write,
)
from vgr_trl.utils import DataError, replaced

# Tokens that a device computes in the time that a pass of its own takes more than a part of one.
_OF_A_PASS = {"cpu": 32}
_ON_OTHERS = 256


def find_groups(
    ids: torch.Tensor, mask: torch.Tensor | None = None, pixels: Sequence[Sequence[torch.Tensor]] | None = None
) -> list[int]:
    """Number of the group of each row: rows with equal tokens, mask and pixels; groups in order of first appearance.

    Args:
        ids: (N, P) tokens of the prompts.
    """
    texts = ids.tolist() if mask is None else torch.stack([ids, mask.to(ids.dtype)], dim=1).flatten(1).tolist()
    candidates: dict[tuple[int, ...], list[tuple[int, int]]] = {}  # text -> (group, its first row)
    groups: list[int] = []
    count = 0
    for row, text in enumerate(texts):
        known = candidates.setdefault(tuple(text), [])
        group = next((group for group, first in known if pixels is None or _equal(pixels[first], pixels[row])), None)
        if group is None:
            group, count = count, count + 1
            known.append((group, row))
        groups.append(group)
    return groups


def first_rows(groups: Sequence[int]) -> list[int]:
    """The first row of each group, in the order of the groups."""
    return [row for row, group in enumerate(groups) if group not in groups[:row]]


def _equal(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    return all(one.shape == other.shape and torch.equal(one, other) for one, other in zip(some, others, strict=True))


def best_split(
    ids: torch.Tensor,
    mask: torch.Tensor,
    pixels: Sequence[Sequence[torch.Tensor]] | None,
    earliest: int,
    latest: int | None = None,
) -> int | None:
    """Where to cut a batch whose prompt lengths are not known, so that the fewest tokens are computed.

    Args:
        pixels: per row, its pixel inputs; rows with different ones share nothing.
        earliest: first column at which the batch may be cut, at least 1.
        latest: last such column, below S. None: S - 1.

    Returns:
        The number of columns p in [earliest, latest] with the largest p * (N - number of different rows in columns
        [0, p)), or None if no two rows agree up to `earliest`.
    """
    length = ids.size(1)
    latest = length - 1 if latest is None else latest
    shared = []  # per row but the first: columns it has in common with some earlier row
    for row in range(1, len(ids)):
        differs = (ids[:row] != ids[row]) | (mask[:row] != mask[row])  # (row, S)
        common = torch.where(differs.any(-1), differs.int().argmax(-1), length).tolist()  # (row,)
        agreeing = [
            columns for earlier, columns in enumerate(common) if pixels is None or _equal(pixels[earlier], pixels[row])
        ]
        shared.append(min(max(agreeing, default=0), latest))
    cuts = {cut for cut in shared if cut >= earliest}
    return max(cuts, key=lambda cut: cut * sum(other >= cut for other in shared), default=None)


def inputs_of_rows(inputs: Mapping[str, Any], parts: Mapping[str, Sequence[slice]], row: int) -> list[torch.Tensor]:
    """The pixel inputs of one row; `parts` as `rows_of_images` returns it."""
    return [inputs[name][slices[row]] for name, slices in parts.items()]


def tokens_of_a_pass(device: str) -> int:
    """Return what a further pass costs on a type of device, in tokens."""
    return _OF_A_PASS.get(device, _ON_OTHERS)


def cut_by_length(lengths: Sequence[int], of_a_pass: int) -> list[list[int]]:
    """Return the rows of each pass, of which every row is as long as the longest, such that together they cost least.

    Rows stand by length, the longest first, unless one pass is cheapest: it has them as they are.

    Args:
        lengths: (N,) tokens of each row.
        of_a_pass: what a pass costs besides its tokens, in tokens.
    """
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    falls = [place for place in range(1, len(order)) if lengths[order[place]] < lengths[order[place - 1]]]
    best = {len(order): (0, 0)}  # place -> cost of the rows from there on, end of the first pass over them
    for start in [*reversed(falls), 0]:
        longest = lengths[order[start]]
        best[start] = min((of_a_pass + (end - start) * longest + cost, end) for end, (cost, _) in best.items())
    passes, start = [], 0
    while start < len(order):
        end = best[start][1]
        passes.append(order[start:end])
        start = end
    return passes if len(passes) > 1 else [list(range(len(lengths)))]


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
        UnsupportedModel: the pixel inputs cannot be assigned to rows with certainty.
    """
    given = image_inputs_of(inputs)
    try:
        return parts_by_tokens(given, is_image) if given else {}
    except UnknownParts as error:
        raise UnsupportedModel(error.reason) from error


PER_TOKEN = ("input_ids", "attention_mask", *TOKEN_TYPES)
_KNOWN = {*PER_TOKEN, *IMAGE_INPUTS, "position_ids"}
_EXTRA_OUTPUTS = ("output_hidden_states", "output_attentions", "output_router_logits")


@dataclass(frozen=True)
class PrefixSplit:
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


def find_split(
    inputs: Mapping[str, Any], config: Any, completion_length: int | None, alone: bool = False
) -> PrefixSplit:
    """The cut of a batch; its last column is left out if the completion length is given.

    Args:
        completion_length: T, or None to find the cut that saves most.
        alone: whether a batch in which no prompt occurs twice is cut as well, if T is given.

    Raises:
        UnsupportedModel: the batch has no equal prompts, or computing them once would not be exact.
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
            raise UnsupportedModel("a row without a token behind its padding and images")
        seen = mask.bool().all(0).long()  # (S,): columns that are padding in no row
        latest = earliest - 2 + int(seen[earliest - 1 :].cumprod(0).sum())
        split = best_split(ids, mask, per_row, earliest, latest)
    else:
        stop -= 1
        split = stop - completion_length
    if split is None:
        raise UnsupportedModel("no prompt occurs twice")
    if split < 1 or completion_length == 0:
        raise UnsupportedModel("no prompt before the completions")
    groups = find_groups(ids[:, :split], mask[:, :split], per_row)
    if max(groups) + 1 == len(groups) and not alone:
        raise UnsupportedModel("no prompt occurs twice")
    refuse_uneven_prompts(inputs, groups, split)
    types = inputs.get("mm_token_type_ids")
    if bool(is_image[:, split:].any()) or (types is not None and bool(types[:, split:].any())):
        raise UnsupportedModel("images in completions")
    if not bool(mask[:, split - 1 : split + 1].all()):
        raise UnsupportedModel("prompts that are not padded on the left")
    if bool((mask[:, split:].bool().long().diff() > 0).any()):
        raise UnsupportedModel("holes in the mask of a completion")
    return PrefixSplit(split, stop, groups, pixels)


def refuse_uneven_prompts(inputs: Mapping[str, Any], groups: list[int], split: int) -> None:
    """Raise `UnsupportedModel` if rows with the same tokens differ in what else is given per token of the prompt."""
    firsts = first_rows(groups)
    leaders = [firsts[group] for group in groups]
    for name in ("token_type_ids", "mm_token_type_ids", "position_ids"):
        value = inputs.get(name)
        if value is None or value.size(-2) != len(groups):
            continue
        prompts = value[..., :split]
        if not torch.equal(prompts, prompts[..., leaders, :]):
            raise UnsupportedModel(f"equal prompts with different {name}")


def constants(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs that are the same for prompts and completions: numbers, flags, names."""
    return {name: value for name, value in inputs.items() if _is_constant(value)}


def _is_constant(value: object) -> bool:
    return isinstance(value, bool | int | float | str) or (isinstance(value, torch.Tensor) and value.ndim == 0)


def _refuse_unfit_inputs(inputs: Mapping[str, Any], config: Any) -> None:
    ids, mask = inputs.get("input_ids"), inputs.get("attention_mask")
    if not isinstance(ids, torch.Tensor) or ids.ndim != 2:
        raise UnsupportedModel("inputs without input_ids")
    if mask is not None and (not isinstance(mask, torch.Tensor) or mask.shape != ids.shape):
        raise UnsupportedModel("an attention mask that is not one number per token")
    positions = inputs.get("position_ids")
    if mask is None and positions is not None and bool((positions.diff() != 1).any()):
        raise UnsupportedModel("position_ids that start anew, without an attention mask")
    for name in _EXTRA_OUTPUTS:
        wanted = inputs.get(name)
        if wanted is None:
            wanted = any(getattr(part, name, False) for part in (config, config.get_text_config()))
        if wanted:
            raise UnsupportedModel(f"{name}=True")
    if inputs.get("return_dict") is False:
        raise UnsupportedModel("return_dict=False")
    refuse_token_types(inputs, config)
    for name, value in inputs.items():
        ignored = name == "labels" and config.model_type == "gemma3"  # takes them, and leaves them to the head
        if name not in _KNOWN and value is not None and not _is_constant(value) and not ignored:
            raise UnsupportedModel(f"the input {name}")
    if inputs.get("pixel_values") is not None and not image_token_ids(config):
        raise UnsupportedModel("images without image tokens")


_LAYERS = {"DynamicLayer", "DynamicSlidingWindowLayer"}
_UNTOLD = "a model that does not tell its attention where packed completions begin"


@dataclass(frozen=True)
class Packing:
    """Where the tokens of packed completions, and the keys that they see, come from.

    Attributes:
        tokens: (Q,) place of each token among the N rows of the columns behind the prompts, flattened.
        keys: (K,) place of each key among the U prompts, flattened, and the Q tokens behind these; a row's prompt,
            without its padding, is followed by the row's own tokens.
        bounds: what flash attention is told: where tokens and keys of each row begin, and the longest.
    """

    tokens: torch.Tensor
    keys: torch.Tensor
    bounds: dict[str, Any]


def why_not_pack(base: Any) -> str | None:
    """Why completions of a model cannot be packed; None if they can. Positions have to be relative.

    Args:
        base: base model.
    """
    attention = str(base.config.get_text_config(decoder=True)._attn_implementation)
    if "flash" not in attention:
        return f"{attention} attention; flash attention packs them"
    try:
        kernel = lazy_import_flash_attention(attention)[0][1]
    except (ImportError, ValueError, AttributeError) as error:
        return f"the kernel of {attention} cannot be imported: {error}"
    if kernel is None or flash_attn_supports_top_left_mask():
        return f"the kernel of {attention} does not take fewer queries than keys"
    if kinds := {type(layer).__name__ for layer in DynamicCache(config=base.config).layers} - _LAYERS:
        return f"layers of type {min(kinds)}"
    return None


def find_packing(cut: PrefixSplit, lengths: Sequence[int], mask: torch.Tensor | None, device: torch.device) -> Packing:
    """Return how the completions of a batch are packed.

    Args:
        cut: where the batch is cut.
        lengths: (N,) tokens of each row behind its prompt.
        mask: attention mask of the batch, (N, S); prompts are padded on the left. None: there is no padding.
        device: of the batch.
    """
    columns = cut.stop - cut.split
    firsts = first_rows(cut.groups)
    starts = [0] * len(firsts) if mask is None else (mask[firsts, : cut.split] == 0).sum(1).tolist()  # (U,)
    tokens, keys, written = [], [], cut.prompts * cut.split
    for row, (group, length) in enumerate(zip(cut.groups, lengths, strict=True)):
        tokens.append(torch.arange(row * columns, row * columns + length))
        keys.append(torch.arange(group * cut.split + starts[group], (group + 1) * cut.split))
        keys.append(torch.arange(written, written + length))
        written += length
    behind = [cut.split - starts[group] + length for group, length in zip(cut.groups, lengths, strict=True)]
    bounds = {
        "cu_seq_lens_q": _ends(lengths, device),
        "cu_seq_lens_k": _ends(behind, device),
        "max_length_q": max(lengths),
        "max_length_k": max(behind),
    }
    return Packing(torch.cat(tokens).to(device), torch.cat(keys).to(device), bounds)


def _ends(lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor([0, *lengths], device=device).cumsum(0).int()


def packed_pass(
    plain: Callable[..., Any], ids: torch.Tensor, cut: PrefixSplit, packing: Packing, written: Prefix, **options: Any
) -> Any:
    """Return outputs with the last hidden states of the columns behind prompts, (N, columns, D); 0 for padding.

    Args:
        plain: forward pass of the base model.
        ids: of the batch, (N, S).
        cut: where the batch is cut.
        packing: how its completions are packed.
        written: keys and values of its prompts.
        options: of the pass, what is the same for all tokens; `position_ids`, (..., N or 1, columns), None where they
            count on from the prompts.

    Raises:
        UnsupportedModel: the model does not tell its attention where completions begin.
    """
    ids = ids[:, cut.split : cut.stop]  # (N, columns)
    positions = options.pop("position_ids")
    if positions is None:
        positions = torch.arange(cut.split, cut.stop, device=ids.device).unsqueeze(0)
    positions = positions.expand(*positions.shape[:-2], *ids.shape).flatten(-2)  # (..., N * columns)
    cache = packed_prefix(written, packing.keys)
    with _told(packing.bounds["cu_seq_lens_k"]) as told:
        outputs = plain(
            input_ids=ids.flatten()[packing.tokens].unsqueeze(0),
            position_ids=positions[..., packing.tokens].unsqueeze(-2),
            past_key_values=cache,
            **packing.bounds,
            **options,
        )
    if len(told) != len(cache.layers):
        raise UnsupportedModel(_UNTOLD)
    hidden = outputs.last_hidden_state[0]  # (Q, D)
    every = hidden.new_zeros(ids.numel(), hidden.size(-1)).index_copy(0, packing.tokens, hidden)
    outputs.last_hidden_state = every.unflatten(0, ids.shape)
    return outputs


@contextmanager
def _told(bounds: torch.Tensor) -> Iterator[list[None]]:
    """An entry for each attention of this block, which has to be told these bounds."""
    calls: list[None] = []

    def wrap(attend: Callable[..., Any]) -> Callable[..., Any]:
        def told(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("cu_seq_lens_k") is not bounds:
                raise UnsupportedModel(_UNTOLD)
            calls.append(None)
            return attend(*args, **kwargs)

        return told

    with attention_wrapped(wrap):
        yield calls


def prefix_forward(
    base: Any,
    plain: Callable[..., Any],
    inputs: dict[str, Any],
    cut: PrefixSplit,
    *,
    whole: bool,
    alike: bool,
    packs: bool = False,
) -> Any:
    """Return the outputs of a base model for all rows and columns; those of padding behind completions are 0.

    Args:
        whole: whether outputs of prompts and of padding are wanted, which are 0 otherwise.
        alike: whether all processes have to make equally many passes.
        packs: whether completions pass as one row without padding, unless outputs of padding are wanted.

    Raises:
        UnsupportedModel: the model turns out not to keep its prompts, or not to read them.
    """
    ids = inputs["input_ids"]
    index = torch.tensor(cut.groups, device=ids.device)  # (N,)
    common = {**constants(inputs), "use_cache": False, "return_dict": True}
    common.pop("logits_to_keep", None)  # Gemma 4 would keep that many of each stage
    prefix = prefix_to_write(base.config)
    prefix.groups = cut.groups
    with _cache_through_checkpoints(base), _own_offsets(base) as offsets:
        prompts = None
        with nullcontext() if whole or alike else _ended_early(base, prefix):
            prompts = plain(**common, **cut.prompt_inputs(inputs), past_key_values=prefix)
        check_written(prefix, cut.split, None if prompts is None else _hidden(prompts))
        offsets.expand(index)
        positions = _positions(inputs, cut, offsets)
        if packs and not whole:
            packing = find_packing(cut, _lengths(inputs, cut), inputs.get("attention_mask"), ids.device)
            part = packed_pass(plain, ids, cut, packing, prefix, position_ids=positions, **common)
            hidden = part.last_hidden_state  # (N, stop - split, D)
        else:
            lengths = [cut.stop - cut.split] * len(ids) if whole or alike else _lengths(inputs, cut)
            hidden, part = _padded_passes(partial(plain, **common), inputs, cut, prefix, positions, lengths)
    if whole:
        assert prompts is not None
        hidden = torch.cat([_hidden(prompts).index_select(0, index), hidden], dim=1)
    missing = cut.stop - hidden.size(1)
    hidden = torch.nn.functional.pad(hidden, (0, 0, missing, ids.size(1) - cut.stop))
    return type(part)(last_hidden_state=hidden)  # (N, S, D)


def _padded_passes(
    plain: Callable[..., Any],
    inputs: dict[str, Any],
    cut: PrefixSplit,
    prefix: Prefix,
    positions: torch.Tensor | None,
    lengths: list[int],
) -> tuple[torch.Tensor, Any]:
    """Completions behind the prompts, each pass as wide as its longest: hidden states, and the outputs of one pass."""
    ids = inputs["input_ids"]
    index = torch.tensor(cut.groups, device=ids.device)  # (N,)
    passes = cut_by_length(lengths, tokens_of_a_pass(ids.device.type))
    parts = []
    for rows in passes:
        behind = prefix_to_read(prefix, index if len(passes) == 1 else index[rows])
        behind.rows = None if len(passes) == 1 else rows
        stop = cut.split + max(lengths[row] for row in rows)
        part = plain(**_columns(inputs, cut, rows, stop, positions), past_key_values=behind)
        check_read(behind)
        missing = cut.stop - stop
        parts.append(torch.nn.functional.pad(_hidden(part), (0, 0, 0, missing)))
    return parts[0] if len(passes) == 1 else torch.cat(parts)[_places(passes)], part


def _hidden(outputs: Any) -> torch.Tensor:
    if not hasattr(outputs, "last_hidden_state"):
        raise UnsupportedModel("a model that does not return its last hidden states")
    hidden: torch.Tensor = outputs.last_hidden_state
    return hidden


def _lengths(inputs: dict[str, Any], cut: PrefixSplit) -> list[int]:
    """Columns from `split` on that emit a token of each row, at least one."""
    if inputs.get("attention_mask") is None:
        return [cut.stop - cut.split] * len(cut.groups)
    emitted = inputs["attention_mask"][:, cut.split + 1 : cut.stop + 1].bool().sum(1)  # (N,)
    lengths: list[int] = emitted.clamp(min=1).tolist()
    return lengths


def _columns(
    inputs: dict[str, Any], cut: PrefixSplit, rows: list[int], stop: int, positions: torch.Tensor | None
) -> dict[str, Any]:
    """Inputs of the second stage, of some rows and of columns [split, stop)."""
    mask = inputs.get("attention_mask")
    if positions is not None:
        of_each = positions.size(-2) == len(cut.groups)
        positions = (positions[..., rows, :] if of_each else positions)[..., : stop - cut.split]
    return {
        "input_ids": inputs["input_ids"][rows, cut.split : stop],
        "attention_mask": None if mask is None else mask[rows, :stop],
        "position_ids": positions,
    }


def _places(passes: list[list[int]]) -> list[int]:
    """Where the rows of a batch stand among those of its passes."""
    order = [row for rows in passes for row in rows]
    return sorted(range(len(order)), key=order.__getitem__)


class _Offsets:
    """What a Qwen-VL model adds to the positions of the tokens behind its images; nothing for other models."""

    def __init__(self, base: Any) -> None:
        self.base = base
        self.exist = hasattr(base, "rope_deltas")
        self.per_row: torch.Tensor | None = None  # (N, 1)

    def expand(self, index: torch.Tensor) -> None:
        """Take over what the pass over the prompts has found, for rows whose prompts are `index`."""
        if self.exist and self.base.rope_deltas is not None:
            self.per_row = self.base.rope_deltas.index_select(0, index.to(self.base.rope_deltas.device))


@contextmanager
def _own_offsets(base: Any) -> Iterator[_Offsets]:
    """Make the model find its offsets anew, and leave it with those of all rows, as a plain pass does."""
    offsets = _Offsets(base)
    before = getattr(base, "rope_deltas", None)
    if offsets.exist:
        base.rope_deltas = None
    try:
        yield offsets
    except BaseException:
        offsets.per_row = None
        raise
    finally:
        if offsets.exist:
            base.rope_deltas = before if offsets.per_row is None else offsets.per_row


def _positions(inputs: dict[str, Any], cut: PrefixSplit, offsets: _Offsets) -> torch.Tensor | None:
    """Position ids of the second stage; None where the model counts on from its cache, as in its plain pass."""
    given: torch.Tensor | None = inputs.get("position_ids")
    if given is not None:
        return given[..., cut.split : cut.stop]
    if not offsets.exist:
        return None
    ids, mask = inputs["input_ids"], inputs.get("attention_mask")
    if offsets.per_row is None:  # the plain pass of these models does not skip padding unless there are images
        return torch.arange(cut.split, cut.stop, device=ids.device).expand(len(ids), -1)  # (N, T)
    mask = torch.ones_like(ids) if mask is None else mask
    positions = mask.long().cumsum(-1)[:, cut.split : cut.stop] - 1 + offsets.per_row.to(ids.device)
    return positions.expand(3, -1, -1)  # (3, N, T): time, height, width


@contextmanager
def _ended_early(base: torch.nn.Module, prefix: Prefix) -> Iterator[None]:
    """End a pass over prompts where the last layer has stored its keys and values, unless a hook waits for its outputs.

    Queries, attention and what comes behind them serve no completion. The layer is not computed again in the backward
    pass, which a checkpoint that has been left cannot do.
    """
    last = [name for name, layer in _checkpoints(base).items() if _has_number(layer, len(prefix.layers) - 1)]
    if len(last) != 1 or not ends_with_keys(prefix) or _has_hooks(base, last[0]):
        yield
        return
    prefix.layers[-1].ends_pass = True
    with suppress(PromptsStored), replaced(base.get_submodule(last[0]), "gradient_checkpointing", False):
        yield


def _checkpoints(base: torch.nn.Module) -> dict[str, Any]:
    """Layers by name."""
    return {name: module for name, module in base.named_modules() if isinstance(module, GradientCheckpointingLayer)}


def _has_number(layer: torch.nn.Module, number: int) -> bool:
    return any(getattr(module, "layer_idx", None) == number for module in layer.modules())


def _has_hooks(base: torch.nn.Module, name: str) -> bool:
    """Whether a hook waits for the outputs of a module, of one within it or of one around it."""
    return any(
        module._forward_hooks or hasattr(module, "_hf_hook")
        for other, module in base.named_modules()
        if f"{other}.".startswith(f"{name}.") or f"{name}.".startswith(f"{other}." if other else "")
    )


@contextmanager
def _cache_through_checkpoints(base: torch.nn.Module) -> Iterator[None]:
    """Let checkpointed layers use a cache: ours is not changed by a recomputation."""
    with ExitStack() as stack:
        for layer in _checkpoints(base).values():
            stack.enter_context(replaced(layer, "_can_checkpoint_with_cache", True))
        yield


class SharedForward:
    """A base model's forward pass that computes equal prompts once, and runs plainly where that is not exact.

    Args:
        base: base model (without head) of a transformers model.
        plain: its forward pass.
        report: where calls are counted.
        completion_length: T, if every batch is P + T columns of prompt and completion; None finds the longest common
            beginnings of the rows itself.
        agree: given an answer of this process, says whether it is that of all; where passes have to be alike in all.
        sharded: whether they have to be alike in their images, too.
        packs: whether completions pass behind their prompts without padding; the model has to be one that can.
    """

    def __init__(
        self,
        base: Any,
        plain: Callable[..., Any],
        report: SharingReport,
        completion_length: int | None,
        agree: Callable[[bool], bool] | None,
        sharded: bool = True,
        packs: bool = False,
    ) -> None:
        self.base, self.plain, self.report, self.packs = base, plain, report, packs
        self.completion_length, self.agree = completion_length, agree
        self.alike = sharded and agree is not None
        self.names = list(signature(plain).parameters)
        self.agree_on_images = agree if sharded and "pixel_values" in self.names else None
        self.calls = 0
        self.paused = False
        self.lock = RLock()  # the model keeps the offsets of the batch at hand: one batch at a time
        self.refused: dict[bool, str] = {}  # with gradients -> why the model has been found unfit

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_tracing():
            return self.plain(*args, **kwargs)
        self.calls += 1
        with self.lock:
            return self.plain(*args, **kwargs) if self.paused else self._call(*args, **kwargs)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        inputs = without_empty_images(dict(zip(self.names, args, strict=False)) | kwargs, self.agree_on_images)
        if inputs.get("use_cache") or inputs.get("past_key_values") is not None:
            return self.plain(**inputs)
        cut, reason = None, ""
        try:
            self._refuse_what_was_found_unfit()
            self.refuse_unfit_model(torch.is_grad_enabled())
            given = images_as_tensors(inputs)
            cut = find_split(given, self.base.config, self.completion_length, alone=self.agree is not None)
        except UnsupportedModel as error:
            reason = str(error)
        all_can = self.all_agree(cut is not None)
        if cut is not None and not all_can:
            cut, reason = None, "another process cannot share this batch"
        elif cut is not None and self.agree is not None and self.agree(cut.prompts == len(cut.groups)):
            cut, reason = None, "no prompt occurs twice"
        if cut is not None:
            try:
                passes = {"whole": self._wants_whole(), "alike": self.alike, "packs": self.packs}
                outputs = prefix_forward(self.base, self.plain, given, cut, **passes)
            except UnsupportedModel as error:
                self.refused[torch.is_grad_enabled()] = reason = str(error)
            else:
                self.report.add_shared(len(cut.groups), cut.prompts)
                return outputs
        ids = inputs.get("input_ids")
        rows = inputs.get("inputs_embeds") if ids is None else ids
        self.report.add_plain(len(rows) if isinstance(rows, torch.Tensor) else 0, reason)
        return self.plain(**inputs)

    def all_agree(self, mine: bool) -> bool:
        """Whether this process, or where that matters every process, would share the batch at hand."""
        return mine if self.agree is None else self.agree(mine)

    def pause(self) -> AbstractContextManager[None]:
        """Run plainly for the duration, uncounted: `generate` makes its own arrangements."""
        return replaced(self, "paused", True)

    def refuse_unfit_model(self, gradients: bool) -> None:
        """Raise `UnsupportedModel` if the model, in its present state, cannot go on from a prompt computed before."""
        if "past_key_values" not in self.names:
            raise UnsupportedModel("a model without a cache of keys and values")
        refuse_unfit_model(self.base, gradients)

    def _refuse_what_was_found_unfit(self) -> None:
        if (gradients := torch.is_grad_enabled()) in self.refused:
            raise UnsupportedModel(self.refused[gradients])

    def _wants_whole(self) -> bool:
        """Whether outputs of prompts are wanted; FSDP2 gathers a layer's weights when a gradient reaches its output."""
        return self.completion_length is None or (torch.is_grad_enabled() and shards_layers(self.base))
