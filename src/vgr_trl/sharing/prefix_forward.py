"""A forward pass in which each prompt is computed once: the prompts first, then all completions behind them.

`find_split` cuts a batch into prompts and the rest of every row, `prefix_forward` runs both, and `SharedForward` does
so in place of a model's own forward pass wherever that is exact.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from inspect import signature
from threading import RLock
from typing import Any

import torch
from transformers.cache_utils import DynamicCache
from transformers.modeling_flash_attention_utils import flash_attn_supports_top_left_mask, lazy_import_flash_attention
from transformers.modeling_layers import GradientCheckpointingLayer

from vgr_trl.pixels import IMAGE_INPUTS, UnknownParts, image_inputs_of, on_device, parts_by_tokens
from vgr_trl.rows import TOKEN_TYPES
from vgr_trl.sharing.model_support import (
    check_model,
    check_token_types,
    prefers_cudnn,
    shards_layers,
    wrap_attention,
)
from vgr_trl.sharing.prefix_cache import (
    PackedKeys,
    Prefix,
    PromptsStored,
    SharingReport,
    StoredKeys,
    UnsupportedModel,
    check_read,
    check_written,
    prefix_to_read,
    prefix_to_write,
    require,
)
from vgr_trl.utils import DataError, patched_attribute

# What a pass costs beside its tokens, in tokens.
_PASS_COST = {"cpu": 32}
_PASS_COST_ON_GPU = 256
_FEW_SHAPES = 64  # tokens, of which lengths are made multiples where shapes cost


def find_groups(
    ids: torch.Tensor, mask: torch.Tensor | None = None, pixels: Sequence[Sequence[torch.Tensor]] | None = None
) -> list[int]:
    """Number of the group of each row: rows with equal tokens, mask and pixels; groups in order of first appearance.

    Args:
        ids: (N, P) tokens of the prompts.
    """
    texts = ids.tolist() if mask is None else torch.stack([ids, mask.to(ids.dtype)], dim=1).flatten(1).tolist()
    alike: dict[tuple[int, ...], list[int]] = {}  # text -> its rows
    for row, text in enumerate(texts):
        alike.setdefault(tuple(text), []).append(row)
    firsts, undecided = list(range(len(texts))), list(alike.values())  # the first row of each row's group
    while undecided:
        pairs = [(rows[0], row) for rows in undecided for row in rows[1:]]
        equal = dict(zip(pairs, _equal(pixels, pairs), strict=True))
        for first, row in pairs:
            firsts[row] = first if equal[first, row] else row
        others = ([row for row in rows[1:] if not equal[rows[0], row]] for rows in undecided)
        undecided = [rows for rows in others if rows]
    numbers = {first: number for number, first in enumerate(dict.fromkeys(firsts))}
    return [numbers[first] for first in firsts]


def first_rows(groups: Sequence[int]) -> list[int]:
    """The first row of each group, in the order of the groups."""
    return [row for row, group in enumerate(groups) if group not in groups[:row]]


def _equal(pixels: Sequence[Sequence[torch.Tensor]] | None, pairs: Sequence[tuple[int, int]]) -> list[bool]:
    """Whether both rows of each pair have the same pixels; all are compared before the host waits for the answers."""
    if pixels is None:
        return [True] * len(pairs)
    found = [_compare(pixels[row], pixels[other]) for row, other in pairs]
    asked = [one for one in found if one is not None]
    answers = iter(torch.stack(asked).tolist() if asked else ())
    return [one is not None and next(answers) for one in found]


def _compare(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Whether values are equal, a bool on their device; None where their shapes differ."""
    if any(one.shape != other.shape for one, other in zip(some, others, strict=True)):
        return None
    return torch.stack([(one == other).all() for one, other in zip(some, others, strict=True)]).all()


def best_split(
    ids: torch.Tensor,
    mask: torch.Tensor,
    pixels: Sequence[Sequence[torch.Tensor]] | None,
    earliest: int,
    latest: int,
) -> int | None:
    """Where to split a batch whose prompt lengths are not known, so that the fewest tokens are computed.

    Args:
        pixels: per row, its pixel inputs; rows with different ones share nothing.
        earliest: first column at which the batch may be split, at least 1.
        latest: last such column, below S.

    Returns:
        The number of columns p in [earliest, latest] with the largest p * (N - number of different rows in columns
        [0, p)), or None if no two rows agree up to `earliest`.
    """
    pairs = [(row, earlier) for row in range(1, len(ids)) for earlier in range(row)]
    shared = [0] * (len(ids) - 1)  # per row but the first: columns it has in common with some earlier row
    common = [_columns_in_common(ids[:row], mask[:row], ids[row], mask[row]) for row in range(1, len(ids))]
    columns = torch.cat(common).tolist() if common else []
    for (row, _), same, equal in zip(pairs, columns, _equal(pixels, pairs), strict=True):
        shared[row - 1] = max(shared[row - 1], min(same, latest) if equal else 0)
    splits = {split for split in shared if split >= earliest}
    return max(splits, key=lambda split: split * sum(other >= split for other in shared), default=None)


def _columns_in_common(
    ids: torch.Tensor, mask: torch.Tensor, own_ids: torch.Tensor, own_mask: torch.Tensor
) -> torch.Tensor:
    differs = (ids != own_ids) | (mask != own_mask)  # (rows, S)
    return torch.where(differs.any(-1), differs.int().argmax(-1), ids.size(1))  # (rows,)


def cut_by_length(lengths: Sequence[int], pass_cost: int) -> list[list[int]]:
    """Return the rows of each pass, of which every row is as long as the longest, such that together they cost least.

    Rows stand by length, the longest first, unless one pass is cheapest: it has them as they are.

    Args:
        lengths: (N,) tokens of each row.
        pass_cost: what a pass costs besides its tokens, in tokens.
    """
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    falls = [place for place in range(1, len(order)) if lengths[order[place]] < lengths[order[place - 1]]]
    best = {len(order): (0, 0)}  # place -> cost of the rows from there on, end of the first pass over them
    for start in [*reversed(falls), 0]:
        longest = lengths[order[start]]
        best[start] = min((pass_cost + (end - start) * longest + cost, end) for end, (cost, _) in best.items())
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
    ids = (getattr(config, name, None) for name in ("image_token_id", "image_token_index"))
    return tuple({token for token in ids if isinstance(token, int)})


def is_image_token(input_ids: torch.Tensor, config: Any) -> torch.Tensor:
    """Bool, shape of `input_ids` (N, S): placeholder of an image."""
    return torch.isin(input_ids, on_device(image_token_ids(config), input_ids.device).to(input_ids.dtype))


def has_images(inputs: Mapping[str, Any]) -> bool:
    """Whether the pixel inputs of a pass hold an image; Idefics has an entry of padding for a row without one."""
    pixels, mask = inputs.get("pixel_values"), inputs.get("pixel_attention_mask")
    return pixels is not None and len(pixels) > 0 and (mask is None or bool(mask.any()))


def drop_empty_images(inputs: Mapping[str, Any], agree: Callable[[bool], bool] | None = None) -> dict[str, Any]:
    """The inputs, without the pixel inputs if they hold no image.

    TRL cuts the pixels of a batch into chunks; for a chunk whose rows have no image nothing is left, or padding, on
    which models fail.

    Args:
        agree: as `share_prompts` takes it, where parameters are sharded: the vision tower then runs in every process
            or in none.

    Raises:
        DataError: some processes have images and others none; `agree` raises it in all of them.
    """
    mine = has_images(inputs)
    if agree is not None and not agree(mine) and not agree(not mine):
        raise DataError(
            f"A batch of this process has {'images' if mine else 'no images'}, unlike that of another process, "
            "and the parameters are sharded: give every row an image, or none, or use ZeRO-2 or DDP."
        )
    empty = inputs.get("pixel_values") is not None and not mine
    return {name: value for name, value in inputs.items() if not (empty and name in IMAGE_INPUTS)}


PER_TOKEN = ("input_ids", "attention_mask", *TOKEN_TYPES)
_KNOWN = {*PER_TOKEN, *IMAGE_INPUTS, "position_ids"}
_EXTRA_OUTPUTS = ("output_hidden_states", "output_attentions", "output_router_logits")


@dataclass(frozen=True)
class PrefixSplit:
    """Columns [0, start) are computed once per prompt, columns [start, stop) once per row.

    Attributes:
        start: columns of the prompts that are computed once, at least 1.
        stop: end of the columns that are computed at all.
        groups: (N,) row -> number of its prompt.
        pixels: per pixel input, the slice of it that belongs to each row.
    """

    start: int
    stop: int
    groups: list[int]
    pixels: dict[str, list[slice]]

    @property
    def prompts(self) -> int:
        """U, the number of different prompts."""
        return max(self.groups) + 1

    def prompt_inputs(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The inputs of the unique prompts, (U, start), with their images."""
        rows = first_rows(self.groups)
        index = on_device(rows, inputs["input_ids"].device)  # (U,)
        chosen = {name: inputs[name][index, : self.start] for name in PER_TOKEN if inputs.get(name) is not None}
        positions = inputs.get("position_ids")
        if positions is not None:
            at = index if positions.size(-2) == len(self.groups) else slice(None)  # one row may stand for all
            chosen["position_ids"] = positions[..., at, : self.start]
        for name, parts in self.pixels.items():
            chosen[name] = torch.cat([inputs[name][parts[row]] for row in rows])
        return chosen


def find_split(
    inputs: Mapping[str, Any], config: Any, columns: tuple[int, int] | None = None, *, alone: bool = False
) -> PrefixSplit:
    """Return how a batch is split.

    Args:
        inputs: tokens (N, S), and what else a pass gets for each token and image.
        columns: (start, stop) of a `PrefixSplit`; None: the split that saves most, up to the last column.
        alone: whether a batch in which no prompt occurs twice is split as well, at given columns.

    Raises:
        UnsupportedModel: the batch has no equal prompts, or computing them once would not be exact.
    """
    ids, types = inputs["input_ids"], inputs.get("mm_token_type_ids")  # (N, S)
    mask = torch.ones_like(ids) if inputs.get("attention_mask") is None else inputs["attention_mask"]  # (N, S)
    is_image = is_image_token(ids, config)
    given = image_inputs_of(inputs)
    try:
        parts = parts_by_tokens(given, is_image) if given else {}
    except UnknownParts as error:
        raise UnsupportedModel(error.reason) from error
    rows = range(len(ids))
    pixels = [[given[name][slices[row]] for name, slices in parts.items()] for row in rows] if parts else None
    start, stop = columns or (_best_start(ids, mask, is_image, pixels), ids.size(1))
    require(1 <= start < stop, "no prompt before the completions")
    groups = find_groups(ids[:, :start], mask[:, :start], pixels)
    require(alone or max(groups) + 1 < len(groups), "no prompt occurs twice")
    check_equal_prompts(inputs, groups, start)
    behind = is_image[:, start:] if types is None else is_image[:, start:] | types[:, start:].bool()
    starts = mask[:, start - 1 : start + 1].all()
    checks = torch.stack([behind.any(), starts, (mask[:, start:].bool().long().diff() > 0).any()])
    images_behind, padded_on_the_left, holes = checks.tolist()  # the host waits once
    require(not images_behind, "images in completions")
    require(padded_on_the_left, "prompts that are not padded on the left")
    require(not holes, "holes in the mask of a completion")
    return PrefixSplit(start, stop, groups, parts)


def _best_start(
    ids: torch.Tensor, mask: torch.Tensor, is_image: torch.Tensor, pixels: Sequence[Sequence[torch.Tensor]] | None
) -> int:
    columns = torch.arange(ids.size(1), device=ids.device)
    earliest = int(torch.where(is_image | (mask == 0).cumprod(1).bool(), columns, -1).max()) + 2
    require(earliest <= ids.size(1), "a row without a token behind its padding and images")
    seen = mask.bool().all(0).long()  # (S,): columns that are padding in no row
    start = best_split(ids, mask, pixels, earliest, earliest - 2 + int(seen[earliest - 1 :].cumprod(0).sum()))
    if start is None:
        raise UnsupportedModel("no prompt occurs twice")
    return start


def check_inputs(inputs: Mapping[str, Any], config: Any) -> None:
    """Raise `UnsupportedModel` for inputs that a split would compute otherwise, and for outputs that it lacks."""
    ids, mask, positions = (inputs.get(name) for name in ("input_ids", "attention_mask", "position_ids"))
    if not isinstance(ids, torch.Tensor) or ids.ndim != 2:
        raise UnsupportedModel("inputs without input_ids")
    one_per_token = mask is None or (isinstance(mask, torch.Tensor) and mask.shape == ids.shape)
    require(one_per_token, "an attention mask that is not one number per token")
    restarts = mask is None and positions is not None and (positions.diff() != 1).any()
    require(not restarts, "position_ids that restart, without an attention mask")
    parts = (config, config.get_text_config())
    for name in _EXTRA_OUTPUTS:
        wanted = inputs.get(name)
        if any(getattr(part, name, False) for part in parts) if wanted is None else wanted:
            raise UnsupportedModel(f"{name}=True")
    require(inputs.get("return_dict") is not False, "return_dict=False")
    check_token_types(inputs, config)
    known = {*_KNOWN, "labels"} if config.model_type == "gemma3" else _KNOWN  # it leaves labels to the head
    for name, value in inputs.items():
        if not (name in known or value is None or _is_constant(value)):
            raise UnsupportedModel(f"the input {name}")
    require(inputs.get("pixel_values") is None or image_token_ids(config), "images without image tokens")


def check_equal_prompts(inputs: Mapping[str, Any], groups: list[int], start: int) -> None:
    """Raise `UnsupportedModel` if rows with the same tokens differ in what else is given per token of the prompt."""
    firsts = first_rows(groups)
    leaders = on_device([firsts[group] for group in groups], inputs["input_ids"].device)
    for name in (*TOKEN_TYPES, "position_ids"):
        value = inputs.get(name)
        if value is not None and value.size(-2) == len(groups):
            prompts = value[..., :start]
            require(torch.equal(prompts, prompts[..., leaders, :]), f"equal prompts with different {name}")


def _is_constant(value: object) -> bool:
    """Whether an input is the same for prompts and completions: a number, a flag, a name."""
    return isinstance(value, bool | int | float | str) or (isinstance(value, torch.Tensor) and value.ndim == 0)


def why_not_pack(base: Any) -> str | None:
    """Why completions of a base model cannot be packed; None if they can. Positions have to be relative."""
    attention = str(base.config.get_text_config(decoder=True)._attn_implementation)
    if "flash" not in attention:
        return f"{attention} attention; flash attention packs them"
    try:
        kernel = lazy_import_flash_attention(attention)[0][1]
    except (ImportError, ValueError, AttributeError) as error:
        return f"the kernel of {attention} cannot be imported: {error}"
    if kernel is None or flash_attn_supports_top_left_mask():
        return f"the kernel of {attention} does not take fewer queries than keys"
    kinds = {type(layer).__name__ for layer in DynamicCache(config=base.config).layers}
    unknown = kinds - {"DynamicLayer", "DynamicSlidingWindowLayer"}
    return f"layers of type {min(unknown)}" if unknown else None


Packing = tuple[torch.Tensor, torch.Tensor, dict[str, Any]]


def find_packing(
    split: PrefixSplit, lengths: Sequence[int], mask: torch.Tensor | None, device: torch.device
) -> Packing:
    """Return where the tokens of packed completions, and the keys that they see, come from.

    Args:
        lengths: (N,) tokens of each row behind its prompt.
        mask: attention mask of the batch, (N, S); prompts are padded on the left. None: there is no padding.
        device: of the batch.

    Returns:
        (Q,) index of each token among the N rows of the columns behind the prompts, flattened; (K,) index of each key
        among the U prompts, flattened, and the Q tokens behind these: a row's prompt, without its padding, is followed
        by the row's own tokens; arguments of flash attention: where tokens and keys of each row begin, and the longest.
    """
    columns, width = split.stop - split.start, split.start
    firsts = first_rows(split.groups)
    padding = [0] * len(firsts) if mask is None else (mask[firsts, :width] == 0).sum(1).tolist()  # (U,)
    tokens, keys, written = [], [], split.prompts * width
    for row, (group, length) in enumerate(zip(split.groups, lengths, strict=True)):
        tokens.append(torch.arange(row * columns, row * columns + length))
        keys.append(torch.arange(group * width + padding[group], (group + 1) * width))
        keys.append(torch.arange(written, written + length))
        written += length
    seen = [width - padding[group] + length for group, length in zip(split.groups, lengths, strict=True)]
    bounds: dict[str, Any] = {"max_length_q": max(lengths), "max_length_k": max(seen)}
    for name, counts in (("cu_seq_lens_q", lengths), ("cu_seq_lens_k", seen)):
        bounds[name] = torch.tensor([0, *counts], device=device).cumsum(0).int()
    return torch.cat(tokens).to(device), torch.cat(keys).to(device), bounds


def packed_pass(
    plain: Callable[..., Any], ids: torch.Tensor, split: PrefixSplit, packing: Packing, written: Prefix, **options: Any
) -> Any:
    """Return outputs with the last hidden states of the columns behind prompts, (N, columns, D); 0 for padding.

    Args:
        plain: forward pass of the base model.
        ids: of the batch, (N, S).
        written: keys and values of its prompts.
        options: of the pass, what is the same for all tokens; `position_ids`, (..., N or 1, columns), None where they
            count on from the prompts.

    Raises:
        UnsupportedModel: the model does not pass the bounds of completions on to its attention.
    """
    ids = ids[:, split.start : split.stop]  # (N, columns)
    positions = options.pop("position_ids")
    if positions is None:
        positions = torch.arange(split.start, split.stop, device=ids.device).unsqueeze(0)
    positions = positions.expand(*positions.shape[:-2], *ids.shape).flatten(-2)  # (..., N * columns)
    tokens, keys, bounds = packing
    cache = Prefix(layers=[PackedKeys(layer, keys) for layer in written.layers])
    reason = "a model that does not tell its attention where packed completions begin"
    attended = 0

    def wrap(attend: Callable[..., Any]) -> Callable[..., Any]:
        def attend_within_bounds(*args: Any, **kwargs: Any) -> Any:
            nonlocal attended
            attended += 1
            require(kwargs.get("cu_seq_lens_k") is bounds["cu_seq_lens_k"], reason)
            return attend(*args, **kwargs)

        return attend_within_bounds

    with wrap_attention(wrap):
        outputs = plain(
            input_ids=ids.flatten()[tokens].unsqueeze(0),
            position_ids=positions[..., tokens].unsqueeze(-2),
            past_key_values=cache,
            **bounds,
            **options,
        )
    require(attended == len(cache.layers), reason)
    hidden = outputs.last_hidden_state[0]  # (Q, D)
    every = hidden.new_zeros(ids.numel(), hidden.size(-1)).index_copy(0, tokens, hidden)
    outputs.last_hidden_state = every.unflatten(0, ids.shape)
    return outputs


def prefix_forward(
    base: Any,
    plain: Callable[..., Any],
    inputs: dict[str, Any],
    split: PrefixSplit,
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
    index = on_device(split.groups, ids.device)  # (N,)
    common = {name: value for name, value in inputs.items() if _is_constant(value)}
    common |= {"use_cache": False, "return_dict": True}
    common.pop("logits_to_keep", None)  # Gemma 4 would keep that many of each pass
    prefix = prefix_to_write(base.config)
    prefix.groups = split.groups
    modules = dict(base.named_modules())  # of large models thousands, which a pass goes through once
    layers = {name: module for name, module in modules.items() if isinstance(module, GradientCheckpointingLayer)}
    with _cache_through_checkpoints(layers.values()), own_rope_deltas(base) as deltas:
        prompts = None
        with nullcontext() if whole or alike else _early_exit(modules, layers, prefix):
            prompts = plain(**common, **split.prompt_inputs(inputs), past_key_values=prefix)
        check_written(prefix, split.start, None if prompts is None else _hidden(prompts))
        if getattr(base, "rope_deltas", None) is not None:
            deltas.append(base.rope_deltas.index_select(0, index.to(base.rope_deltas.device)))  # (N, 1)
        positions = positions_behind(base, inputs, split, *deltas)
        if packs and not whole:
            packing = find_packing(split, _lengths(inputs, split), inputs.get("attention_mask"), ids.device)
            part = packed_pass(plain, ids, split, packing, prefix, position_ids=positions, **common)
            hidden = part.last_hidden_state  # (N, stop - start, D)
        else:
            lengths = [split.stop - split.start] * len(ids) if whole or alike else _lengths(inputs, split)
            hidden, part = _padded_passes(partial(plain, **common), inputs, split, prefix, positions, lengths)
    if prompts is not None and whole:
        hidden = torch.cat([_hidden(prompts).index_select(0, index), hidden], dim=1)
    missing = split.stop - hidden.size(1)
    hidden = torch.nn.functional.pad(hidden, (0, 0, missing, ids.size(1) - split.stop))
    return type(part)(last_hidden_state=hidden)  # (N, S, D)


def _padded_passes(
    plain: Callable[..., Any],
    inputs: dict[str, Any],
    split: PrefixSplit,
    prefix: Prefix,
    positions: torch.Tensor | None,
    lengths: list[int],
) -> tuple[torch.Tensor, Any]:
    """Completions behind the prompts, each pass as wide as its longest: hidden states, and the outputs of one pass."""
    ids, mask = inputs["input_ids"], inputs.get("attention_mask")
    index = on_device(split.groups, ids.device)  # (N,)
    if prefers_cudnn():  # which builds a plan for every new shape, 0.4 to 0.6 s each (FunASR#3704)
        lengths = [min(length + -length % _FEW_SHAPES, split.stop - split.start) for length in lengths]
    passes = cut_by_length(lengths, _PASS_COST.get(ids.device.type, _PASS_COST_ON_GPU))
    parts = []
    for rows in passes:
        at = slice(None) if len(passes) == 1 else on_device(rows, ids.device)
        behind = prefix_to_read(prefix, index[at])
        behind.rows = rows
        stop = split.start + max(lengths[row] for row in rows)
        of_rows = positions
        if of_rows is not None:
            of_rows = of_rows[..., at, :] if of_rows.size(-2) == len(ids) else of_rows
            of_rows = of_rows[..., : stop - split.start]
        part = plain(
            input_ids=ids[at, split.start : stop],
            attention_mask=None if mask is None else mask[at, :stop],
            position_ids=of_rows,
            past_key_values=behind,
        )
        check_read(behind)
        parts.append(torch.nn.functional.pad(_hidden(part), (0, 0, 0, split.stop - stop)))
    if len(passes) == 1:
        return parts[0], part
    order = [row for rows in passes for row in rows]
    return torch.cat(parts)[on_device(sorted(range(len(order)), key=order.__getitem__), ids.device)], part


def _hidden(outputs: Any) -> torch.Tensor:
    require(hasattr(outputs, "last_hidden_state"), "a model that does not return its last hidden states")
    hidden: torch.Tensor = outputs.last_hidden_state
    return hidden


def _lengths(inputs: dict[str, Any], split: PrefixSplit) -> list[int]:
    """Columns from `start` on that emit a token of each row, at least one."""
    if inputs.get("attention_mask") is None:
        return [split.stop - split.start] * len(split.groups)
    emitted = inputs["attention_mask"][:, split.start + 1 : split.stop + 1].bool().sum(1)  # (N,)
    lengths: list[int] = emitted.clamp(min=1).tolist()
    return lengths


@contextmanager
def own_rope_deltas(base: Any) -> Iterator[list[torch.Tensor]]:
    """Make a Qwen-VL model recompute what it adds to positions behind images, and leave it with that of all rows.

    Yields:
        a list for it, (N, 1), empty for other models and without images.
    """
    deltas: list[torch.Tensor] = []
    with nullcontext() if not hasattr(base, "rope_deltas") else patched_attribute(base, "rope_deltas", None):
        yield deltas
    if deltas:
        base.rope_deltas = deltas[0]


def positions_behind(
    base: Any, inputs: dict[str, Any], split: PrefixSplit, deltas: torch.Tensor | None = None
) -> torch.Tensor | None:
    """Position ids of the columns behind prompts; None where the model counts on from its cache, as in a plain pass."""
    given: torch.Tensor | None = inputs.get("position_ids")
    if given is not None:
        return given[..., split.start : split.stop]
    if not hasattr(base, "rope_deltas"):
        return None
    ids, mask = inputs["input_ids"], inputs.get("attention_mask")
    if deltas is None:  # the plain pass of these models does not skip padding unless there are images
        return torch.arange(split.start, split.stop, device=ids.device).expand(len(ids), -1)  # (N, T)
    mask = torch.ones_like(ids) if mask is None else mask
    positions = mask.long().cumsum(-1)[:, split.start : split.stop] - 1 + deltas.to(ids.device)
    return positions.expand(3, -1, -1)  # (3, N, T): time, height, width


@contextmanager
def _early_exit(modules: Mapping[str, Any], layers: Mapping[str, Any], prefix: Prefix) -> Iterator[None]:
    """End a pass over prompts where the last layer has stored its keys and values, unless a hook waits for its outputs.

    Queries, attention and what comes behind them serve no completion. The layer is not computed again in the backward
    pass, which a checkpoint that has been left cannot do.

    Args:
        modules: of the base model, by name.
        layers: those among them that can be checkpointed.
    """
    number = len(prefix.layers) - 1
    attention = [name for name, module in modules.items() if getattr(module, "layer_idx", None) == number]
    last = [layer for layer in layers if any(_within(name, layer) for name in attention)]
    hooked = len(last) == 1 and any(
        module._forward_hooks or hasattr(module, "_hf_hook")
        for name, module in modules.items()
        if _within(name, last[0]) or _within(last[0], name)
    )
    # Keys and values of the last layer have to be the last thing that completions read of their prompts.
    if len(last) != 1 or hooked or type(prefix.layers[-1]) is not StoredKeys:
        yield
        return
    prefix.layers[-1].ends_pass = True
    with suppress(PromptsStored), patched_attribute(layers[last[0]], "gradient_checkpointing", False):
        yield


def _within(name: str, other: str) -> bool:
    """Whether a module of that name is another, or a part of it; the whole model has the empty name."""
    return not other or name == other or name.startswith(f"{other}.")


@contextmanager
def _cache_through_checkpoints(layers: Iterable[Any]) -> Iterator[None]:
    """Let checkpointed layers use a cache: ours is not changed by a recomputation."""
    with ExitStack() as stack:
        for layer in layers:
            stack.enter_context(patched_attribute(layer, "_can_checkpoint_with_cache", True))
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
        self.paused = False  # `generate` makes its own arrangements
        self.lock = RLock()  # the model keeps the offsets of one batch at a time
        self.refused: dict[bool, str] = {}  # with gradients -> why the model turned out to be unsupported

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.plain(*args, **kwargs)
        with self.lock:
            return self.plain(*args, **kwargs) if self.paused else self._call(*args, **kwargs)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        inputs = drop_empty_images(dict(zip(self.names, args, strict=False)) | kwargs, self.agree_on_images)
        if inputs.get("use_cache") or inputs.get("past_key_values") is not None:
            return self.plain(**inputs)
        gradients = torch.is_grad_enabled()
        split, reason = None, self.refused.get(gradients, "")
        if not reason:
            try:
                check_model(self.base, gradients)
                check_inputs(inputs, self.base.config)
                stop, width = inputs["input_ids"].size(1) - 1, self.completion_length
                columns = None if width is None else (stop - width, stop)  # the last column emits nothing
                split = find_split(inputs, self.base.config, columns, alone=self.agree is not None)
            except UnsupportedModel as error:
                reason = str(error)
        if not self.all_agree(split is not None) and split is not None:
            split, reason = None, "another process cannot share this batch"
        if split is not None and self.agree is not None and self.agree(split.prompts == len(split.groups)):
            split, reason = None, "no prompt occurs twice"
        if split is not None:
            # FSDP2 gathers a layer's weights for the backward pass when a gradient reaches the layer's output.
            whole = self.completion_length is None or (gradients and shards_layers(self.base))
            modes = {"whole": whole, "alike": self.alike, "packs": self.packs}
            try:
                outputs = prefix_forward(self.base, self.plain, inputs, split, **modes)
            except UnsupportedModel as error:
                self.refused[gradients] = reason = str(error)
            else:
                self.report.add_shared(len(split.groups), split.prompts)
                return outputs
        ids = inputs.get("input_ids")
        rows = inputs.get("inputs_embeds") if ids is None else ids
        self.report.add_plain(len(rows) if isinstance(rows, torch.Tensor) else 0, reason)
        return self.plain(**inputs)

    def all_agree(self, mine: bool) -> bool:
        """Whether this process, or where that matters every process, would share the batch."""
        return mine if self.agree is None else self.agree(mine)
