"""A forward pass in which each prompt is computed once: the prompts first, then all completions behind them.

`find_split` cuts a batch into prompts and the rest of every row. `Prefill` computes the prompts and keeps them;
`CompletionPass` computes rows behind them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_flash_attention_utils import flash_attn_supports_top_left_mask, lazy_import_flash_attention
from transformers.modeling_layers import GradientCheckpointingLayer

from vgr_trl.errors import DataError
from vgr_trl.pixels import (
    IMAGE_INPUTS,
    ImageInputs,
    Parts,
    UnknownParts,
    image_inputs_of,
    on_device,
    parts_by_tokens,
)
from vgr_trl.sharing.model_support import (
    cache_name,
    check_token_types,
    checkpoints_with_graph,
    prefers_cudnn,
    replaced,
    wrap_attention,
)
from vgr_trl.sharing.prefix_cache import (
    PackedKeys,
    PromptsStored,
    ReadPrefix,
    StoredKeys,
    UnsupportedModel,
    WrittenPrefix,
    require,
)
from vgr_trl.token_types import TOKEN_TYPES

PER_TOKEN = ("input_ids", "attention_mask", *TOKEN_TYPES)
_KNOWN = {*PER_TOKEN, *IMAGE_INPUTS, "position_ids"}
_EXTRA_OUTPUTS = ("output_hidden_states", "output_attentions", "output_router_logits")

# Families in which completions may hold images: their positions are those of the whole row by `get_rope_index`.
IMAGES_BEHIND = {"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"}

# What a pass costs beside its tokens, in tokens.
_PASS_COST = {"cpu": 32}
_PASS_COST_ON_GPU = 256
_FEW_SHAPES = 64  # tokens, of which lengths are made multiples where shapes cost


def find_groups(ids: Tensor, mask: Tensor | None = None, pixels: Sequence[Sequence[Tensor]] | None = None) -> list[int]:
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
        equal = {row: first for (first, row), same in zip(pairs, _equal(pixels, pairs), strict=True) if same}
        for row, first in equal.items():
            firsts[row] = first
        others = ([row for row in rows[1:] if row not in equal] for rows in undecided)
        undecided = [rows for rows in others if rows]
    numbers = {first: number for number, first in enumerate(dict.fromkeys(firsts))}
    return [numbers[first] for first in firsts]


def first_rows(groups: Sequence[int]) -> list[int]:
    """The first row of each group, in the order of the groups."""
    return [row for row, group in enumerate(groups) if group not in groups[:row]]


def _equal(pixels: Sequence[Sequence[Tensor]] | None, pairs: Sequence[tuple[int, int]]) -> list[bool]:
    """Whether both rows of each pair have the same pixels; all are compared before the host waits for the answers."""
    if pixels is None or not pairs:
        return [True] * len(pairs)
    found = []
    for row, other in pairs:
        inputs = list(zip(pixels[row], pixels[other], strict=True))
        if all(one.shape == two.shape for one, two in inputs):
            found.append(torch.stack([(one == two).all() for one, two in inputs]).all())
        else:
            found.append(inputs[0][0].new_zeros((), dtype=torch.bool))
    return torch.stack(found).tolist()


def cut_by_length(lengths: Sequence[int], pass_cost: int) -> list[list[int]]:
    """Return the rows of each pass, of which every row is as long as the longest, such that together they cost least.

    Rows stand by length, the longest first, unless one pass is cheapest: it has them as they are.

    Args:
        lengths: (N,) tokens of each row.
        pass_cost: what a pass costs besides its tokens, in tokens.
    """
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    best: dict[int, tuple[int, list[list[int]]]] = {len(order): (0, [])}  # place -> cost and passes of rows from there
    for start in reversed(range(len(order))):
        longest = lengths[order[start]]
        if start and longest == lengths[order[start - 1]]:
            continue
        best[start] = min(
            (pass_cost + (end - start) * longest + cost, [order[start:end], *behind])
            for end, (cost, behind) in best.items()
        )
    passes = best[0][1]
    return passes if len(passes) > 1 else [list(range(len(lengths)))]


def image_token_ids(config: Any) -> tuple[int, ...]:
    """Ids of the placeholder tokens of images in a model's config; empty for a text model.

    Batches with videos are not shared, and without a video its placeholder, which can be sampled, is a token like any.
    """
    ids = (getattr(config, name, None) for name in ("image_token_id", "image_token_index"))
    return tuple({token for token in ids if isinstance(token, int)})


def is_image_token(input_ids: Tensor, config: Any) -> Tensor:
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
        agree: as `SharedForward` takes it, where parameters are sharded: the vision tower then runs in every process
            or in none.

    Raises:
        DataError: some processes have images and others none; `agree` raises it in all of them.
    """
    mine = has_images(inputs)
    if agree is not None and not agree(mine) and not agree(not mine):
        has = f"A batch of this process has {'images' if mine else 'no images'}, unlike that of another process"
        raise DataError(f"{has}, and the parameters are sharded: give every row images, or none, or use ZeRO-2 or DDP.")
    empty = inputs.get("pixel_values") is not None and not mine
    return {name: value for name, value in inputs.items() if not (empty and name in IMAGE_INPUTS)}


@dataclass(frozen=True)
class PrefixSplit:
    """Columns [0, start) are computed once per prompt, columns [start, stop) once per row.

    Attributes:
        start: columns of the prompts that are computed once, at least 1.
        stop: end of the columns that are computed at all.
        groups: (N,) row -> number of its prompt.
        pixels: per pixel input, the slice of it that belongs to the prompt of each row.
        behind: likewise to its completion; empty where no completion has an image.
        copies: completions that `generate` makes of each row.
        lent: a `MicroBatch` where prompts are lent to several micro-batches; None: all run in this pass.
    """

    start: int
    stop: int
    groups: list[int]
    pixels: dict[str, list[slice]]
    copies: int = 1
    lent: Any = None
    behind: dict[str, list[slice]] = field(default_factory=dict)

    @property
    def computed(self) -> int:
        """The number of prompts that run in this pass."""
        return self.prompts if self.lent is None else int(self.lent.computed)

    @property
    def rows(self) -> int:
        """Completions of all rows."""
        return len(self.groups) * self.copies

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
        return chosen | take_pixels(inputs, self.pixels, rows)


def take_pixels(inputs: Mapping[str, Any], parts: Parts, rows: Sequence[int]) -> dict[str, Tensor]:
    """Return the pixel inputs of some rows, given the slices of all; nothing if they have no image."""
    found = {name: torch.cat([inputs[name][slices[row]] for row in rows]) for name, slices in parts.items()}
    return found if any(map(len, found.values())) else {}


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
        parts, behind = _parts_of_prompts(given, is_image, columns[0] if columns else ids.size(1))
    except UnknownParts as error:
        raise UnsupportedModel(error.reason) from error
    rows = range(len(ids))
    pixels = [[given[name][slices[row]] for name, slices in parts.items()] for row in rows] if parts else None
    start, stop = columns or (_best_start(ids, mask, is_image, pixels), ids.size(1))
    require(1 <= start < stop, "no prompt before the completions")
    groups = find_groups(ids[:, :start], mask[:, :start], pixels)
    require(alone or max(groups) + 1 < len(groups), "no prompt occurs twice")
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
    return PrefixSplit(start, stop, groups, parts, behind=behind)


def _parts_of_prompts(given: ImageInputs, is_image: Tensor, start: int) -> tuple[Parts, Parts]:
    """Return which part of each pixel input belongs to the columns of each row before `start`, and to those behind.

    Only where patches tell images apart; elsewhere all are those of prompts.
    """
    if "image_grid_thw" not in given:
        return parts_by_tokens(given, is_image) if given else {}, {}
    before = torch.arange(is_image.size(1), device=is_image.device) < start
    halves = parts_by_tokens(given, torch.stack([is_image & before, is_image & ~before], dim=1).flatten(0, 1))
    behind = {name: slices[1::2] for name, slices in halves.items()}
    has_images = any(each.stop > each.start for slices in behind.values() for each in slices)
    return {name: slices[::2] for name, slices in halves.items()}, behind if has_images else {}


def _best_start(ids: Tensor, mask: Tensor, is_image: Tensor, pixels: Sequence[Sequence[Tensor]] | None) -> int:
    """Return where to split a batch whose prompt lengths are not known, so that the fewest tokens are computed.

    That is the number of columns p, behind padding and images, with the largest p * (N - number of different rows in
    columns [0, p)). Rows with different pixels share nothing.
    """
    columns = torch.arange(ids.size(1), device=ids.device)
    earliest = int(torch.where(is_image | (mask == 0).cumprod(1).bool(), columns, -1).max()) + 2
    require(earliest <= ids.size(1), "a row without a token behind its padding and images")
    seen = mask.bool().all(0).long()  # (S,): columns that are padding in no row
    latest = earliest - 2 + int(seen[earliest - 1 :].cumprod(0).sum())
    row, earlier = torch.tril_indices(len(ids), len(ids), -1, device=ids.device)  # (pairs,) each
    differs = (ids[row] != ids[earlier]) | (mask[row] != mask[earlier])  # (pairs, S)
    common = torch.where(differs.any(-1), differs.int().argmax(-1), ids.size(1)).tolist()
    pairs = [(row, earlier) for row in range(len(ids)) for earlier in range(row)]
    shared = [0] * len(ids)  # columns that a row has in common with some earlier row
    for (number, _), same, equal in zip(pairs, common, _equal(pixels, pairs), strict=True):
        shared[number] = max(shared[number], min(same, latest) if equal else 0)
    splits = {split for split in shared if split >= earliest}
    require(splits, "no prompt occurs twice")
    return max(splits, key=lambda split: split * sum(other >= split for other in shared))


def check_inputs(inputs: Mapping[str, Any], config: Any) -> None:
    """Raise `UnsupportedModel` for inputs that a split would compute otherwise, and for outputs that it lacks."""
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
    known = {*_KNOWN, "labels"} if config.model_type == "gemma3" else _KNOWN  # it leaves labels to the head
    for name, value in inputs.items():
        require(name in known or value is None or _is_constant(value), f"the input {name}")
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
    return isinstance(value, bool | int | float | str) or (isinstance(value, Tensor) and value.ndim == 0)


class Prefill:
    """The U unique prompts of a batch, computed once when this is made.

    Args:
        base: base model (without head) of a transformers model.
        plain: its forward pass.
        inputs: of the pass over the whole batch, by name.
        split: of the batch.
        wants_hidden: whether the last layer has to run, for hidden states of the prompts or because all processes have
            to run it; otherwise the pass ends once completions have all that they read.

    Attributes:
        written: keys, values and states.
        hidden: (U, start, D) last hidden states; None if the pass has ended before.
        deltas: (U, 1), what a Qwen-VL model adds to positions behind images; None for other models, without images.
        skips_padding: whether each prompt has run without its padding.

    Raises:
        UnsupportedModel: the model turns out not to keep its prompts.
    """

    def __init__(
        self, base: Any, plain: Callable[..., Any], inputs: Mapping[str, Any], split: PrefixSplit, wants_hidden: bool
    ) -> None:
        common = {name: value for name, value in inputs.items() if _is_constant(value)}
        common.pop("logits_to_keep", None)  # Gemma 4 would keep that many of each pass
        self.plain, self.split, self.cache_name = plain, split, str(cache_name(base))
        self.common = {**common, "use_cache": False, "return_dict": True}
        self.layers = [module for module in base.modules() if isinstance(module, GradientCheckpointingLayer)]
        self.written = WrittenPrefix(base.config, split.groups)
        self.hidden: Tensor | None = None
        self.skips_padding = False
        if hasattr(base, "rope_deltas"):
            base.rope_deltas = None
        ends_early = [] if wants_hidden else _end_early(base, self.written)
        with suppress(PromptsStored), _cache_through_checkpoints(self.layers, ends_early):
            outputs = plain(**self.common, **split.prompt_inputs(inputs), **{self.cache_name: self.written})
            self.hidden = hidden_states(outputs)
        self.written.check(split.start, self.hidden)
        self.deltas: Tensor | None = getattr(base, "rope_deltas", None)


class CompletionPass:
    """Computes rows of a batch behind the prompts of a `Prefill`.

    Args:
        base: as `Prefill` takes it.
        prefill: of the batch.
        inputs: likewise.
    """

    def __init__(self, base: Any, prefill: Prefill, inputs: Mapping[str, Any]) -> None:
        self.prefill, self.split, self.inputs = prefill, prefill.split, inputs
        self.ids: Tensor = inputs["input_ids"]
        self.mask: Tensor | None = inputs.get("attention_mask")
        self.index = on_device(self.split.groups, self.ids.device)  # (N,)
        deltas = prefill.deltas
        if deltas is not None:
            deltas = deltas.index_select(0, self.index.to(deltas.device))
        self.positions = positions_behind(base, inputs, self.split, deltas)
        if self.positions is None and prefill.skips_padding and self.mask is not None:
            self.positions = self.mask.long().cumsum(-1)[:, self.split.start : self.split.stop] - 1  # (N, columns)

    def lengths(self) -> list[int]:
        """Columns from `start` on that emit a token of each row, at least one."""
        if self.mask is None:
            return [self.split.stop - self.split.start] * len(self.ids)
        emitted = self.mask[:, self.split.start + 1 : self.split.stop + 1].bool().sum(1)  # (N,)
        lengths: list[int] = emitted.clamp(min=1).tolist()
        return lengths

    def padded(self, rows: Sequence[int], length: int) -> Any:
        """Return the outputs of one pass over `length` columns of some rows.

        Raises:
            UnsupportedModel: the model turns out not to read the prompts.
        """
        at = slice(None) if list(rows) == list(range(len(self.ids))) else on_device(rows, self.ids.device)
        stop, positions = self.split.start + length, self.positions
        if positions is not None:
            positions = (positions[..., at, :] if positions.size(-2) == len(self.ids) else positions)[..., :length]
        behind = ReadPrefix(self.prefill.written, self.index[at], rows)
        with _cache_through_checkpoints(self.prefill.layers):
            outputs = self.prefill.plain(
                **self.prefill.common,
                input_ids=self.ids[at, self.split.start : stop],
                attention_mask=None if self.mask is None else self.mask[at, :stop],
                position_ids=positions,
                **take_pixels(self.inputs, self.split.behind, rows),
                **{self.prefill.cache_name: behind},
            )
        behind.check()
        return outputs

    def run_by_length(self, lengths: Sequence[int]) -> Any:
        """Return the outputs of all rows (N, stop - start, D), each pass as wide as the longest of its rows."""
        columns = self.split.stop - self.split.start
        if prefers_cudnn():  # which builds a plan for every new shape, 0.4 to 0.6 s each (FunASR#3704)
            lengths = [min(length + -length % _FEW_SHAPES, columns) for length in lengths]
        passes = cut_by_length(lengths, _PASS_COST.get(self.ids.device.type, _PASS_COST_ON_GPU))
        parts = [self.padded(rows, max(lengths[row] for row in rows)) for rows in passes]
        wide = [torch.nn.functional.pad(part, (0, 0, 0, columns - part.size(1))) for part in map(hidden_states, parts)]
        order = [row for rows in passes for row in rows]
        back = on_device(sorted(range(len(order)), key=order.__getitem__), self.ids.device)
        return type(parts[0])(last_hidden_state=wide[0] if len(wide) == 1 else torch.cat(wide)[back])

    def packed(self, lengths: Sequence[int]) -> Any:
        """Return the outputs of all rows (N, stop - start, D), which pass as one without padding; 0 for padding.

        Raises:
            UnsupportedModel: the model does not pass the bounds of completions on to its attention.
        """
        ids, positions = self.ids[:, self.split.start : self.split.stop], self.positions  # (N, columns)
        if positions is None:
            positions = torch.arange(self.split.start, self.split.stop, device=ids.device).unsqueeze(0)
        positions = positions.expand(*positions.shape[:-2], *ids.shape).flatten(-2)  # (..., N * columns)
        tokens, keys, bounds = find_packing(self.split, lengths, self.mask, ids.device)
        cache = Cache(layers=[PackedKeys(layer, keys) for layer in self.prefill.written.layers])
        reason, attended = "a model that does not tell its attention where packed completions begin", []

        def wrap(attend: Callable[..., Any]) -> Callable[..., Any]:
            def attend_within_bounds(*args: Any, **kwargs: Any) -> Any:
                attended.append(attend)
                require(kwargs.get("cu_seq_lens_k") is bounds["cu_seq_lens_k"], reason)
                return attend(*args, **kwargs)

            return attend_within_bounds

        with wrap_attention(wrap), _cache_through_checkpoints(self.prefill.layers):
            outputs = self.prefill.plain(
                **self.prefill.common,
                **bounds,
                input_ids=ids.flatten()[tokens].unsqueeze(0),
                position_ids=positions[..., tokens].unsqueeze(-2),
                **{self.prefill.cache_name: cache},
            )
        require(len(attended) == len(cache.layers), reason)
        hidden = hidden_states(outputs)[0]  # (Q, D)
        every = hidden.new_zeros(ids.numel(), hidden.size(-1)).index_copy(0, tokens, hidden)
        return type(outputs)(last_hidden_state=every.unflatten(0, ids.shape))


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
        base: base model (without head) of a transformers model.
        plain: its forward pass.
        whole: whether outputs of prompts and of padding are wanted, which are 0 otherwise.
        alike: whether all processes have to make equally many passes.
        packs: whether completions pass as one row without padding, unless outputs of padding are wanted.

    Raises:
        UnsupportedModel: the model turns out not to keep its prompts, or not to read them.
    """
    if split.behind and inputs.get("position_ids") is None:  # those of prompts, too: without images they count padding
        names = ("input_ids", "mm_token_type_ids", "image_grid_thw", "attention_mask")
        positions, _ = base.get_rope_index(**{name: inputs.get(name) for name in names})  # (3, N, S)
        inputs = {**inputs, "position_ids": positions}
    if split.lent is None:
        prefill = Prefill(base, plain, inputs, split, wants_hidden=whole or alike)
    else:
        prefill = split.lent.prefill(base, plain)
    completions = CompletionPass(base, prefill, inputs)
    if packs and not whole and not split.behind:
        outputs = completions.packed(completions.lengths())
    elif whole or alike:
        outputs = completions.padded(range(len(split.groups)), split.stop - split.start)
    else:
        outputs = completions.run_by_length(completions.lengths())
    hidden = hidden_states(outputs)  # (N, stop - start, D)
    if prefill.hidden is not None and whole:
        hidden = torch.cat([prefill.hidden.index_select(0, completions.index), hidden], dim=1)
    missing = split.stop - hidden.size(1)
    hidden = torch.nn.functional.pad(hidden, (0, 0, missing, inputs["input_ids"].size(1) - split.stop))
    return type(outputs)(last_hidden_state=hidden)  # (N, S, D)


def hidden_states(outputs: Any) -> Tensor:
    """Return the last hidden states of a pass, or raise `UnsupportedModel`."""
    require(hasattr(outputs, "last_hidden_state"), "a model that does not return its last hidden states")
    hidden: Tensor = outputs.last_hidden_state
    return hidden


def positions_behind(
    base: Any, inputs: Mapping[str, Any], split: PrefixSplit, deltas: Tensor | None = None
) -> Tensor | None:
    """Position ids of the columns behind prompts; None where the model counts on from its cache, as in a plain pass."""
    given: Tensor | None = inputs.get("position_ids")
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


def _end_early(base: Any, written: WrittenPrefix) -> list[GradientCheckpointingLayer]:
    """Let a pass over prompts end where the last layer has stored its keys and values; return that layer.

    Queries, attention and what comes behind them serve no completion. A layer whose outputs a hook waits for runs.
    """
    modules = dict(base.named_modules())  # of large models thousands, which a pass goes through once
    number = len(written.layers) - 1
    last = [
        (name, layer)
        for name, layer in modules.items()
        if isinstance(layer, GradientCheckpointingLayer)
        and any(getattr(module, "layer_idx", None) == number for module in layer.modules())
    ]
    # Keys and values of the last layer have to be the last thing that completions read of their prompts.
    if len(last) != 1 or type(written.layers[-1]) is not StoredKeys:
        return []
    ((name, layer),) = last
    parents = [module for other, module in modules.items() if other and name.startswith(f"{other}.")]
    if any(module._forward_hooks or hasattr(module, "_hf_hook") for module in (*parents, *layer.modules())):
        return []
    written.layers[-1].ends_pass = True
    return [layer]


def _cache_through_checkpoints(
    layers: Sequence[GradientCheckpointingLayer], left: Iterable[GradientCheckpointingLayer] = ()
) -> AbstractContextManager[None]:
    """Let checkpointed layers use a cache, which is not changed by a recomputation; do not checkpoint those `left`.

    A checkpoint that an exception has left cannot compute its layer again. Reentrant ones would cut prompts off.
    """
    return replaced(
        *checkpoints_with_graph(layers),
        *((layer, "_can_checkpoint_with_cache", True) for layer in layers),
        *((layer, "gradient_checkpointing", False) for layer in left),
    )


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


def find_packing(
    split: PrefixSplit, lengths: Sequence[int], mask: Tensor | None, device: torch.device
) -> tuple[Tensor, Tensor, dict[str, Any]]:
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
