"""A forward pass in which each prompt is computed once: prompts first, then all completions behind them.

`Prefill` computes the prompts and keeps them; `CompletionPass` computes rows behind them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_flash_attention_utils import flash_attn_supports_top_left_mask, lazy_import_flash_attention
from transformers.modeling_layers import GradientCheckpointingLayer

from vgr_trl.patching import patched_attribute
from vgr_trl.pixels import on_device
from vgr_trl.sharing.attention import prefers_cudnn, wrap_attention
from vgr_trl.sharing.model_support import cache_name, has_rope_deltas, indexed_modules, is_reentrant
from vgr_trl.sharing.prefix_cache import PackedKeys, PromptsStored, ReadPrefix, StoredKeys, WrittenPrefix
from vgr_trl.sharing.prefix_split import PrefixSplit, is_constant, take_pixels
from vgr_trl.sharing.report import require

# Fixed cost of a pass, in tokens.
_PASS_COST = {"cpu": 32}
_PASS_COST_ON_GPU = 256
_FEW_SHAPES = 64  # lengths become multiples of so many tokens where each new shape costs time


def cut_by_length(lengths: Sequence[int], pass_cost: int) -> list[list[int]]:
    """Divide rows among passes so that the passes cost least; each is as wide as its longest row.

    Rows are sorted by length, the longest first. A single pass keeps their order.

    Args:
        lengths: (N,) tokens of each row.
        pass_cost: fixed cost of a pass, in tokens.

    Returns:
        The rows of each pass.
    """
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    best: dict[int, tuple[int, list[list[int]]]] = {len(order): (0, [])}  # place -> cost and passes from there on
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


class Prefill:
    """Runs the U unique prompts of a batch and keeps their cache.

    Args:
        base: base model (without head) of a transformers model.
        plain: its forward pass.
        inputs: of the pass over the whole batch, by name.
        split: of the batch.
        wants_hidden: whether the last layer has to run to its end, for hidden states of the prompts or because all
            processes have to run it; otherwise the pass stops once it has stored everything that completions read.

    Attributes:
        written: keys, values and states.
        hidden: (U, start, D) last hidden states; None: the pass stopped early.
        deltas: (U, 1) offset of Qwen-VL's positions behind images; None: other models, or no images.
        skips_padding: whether each prompt ran without its padding.

    Raises:
        UnsupportedModel: the model does not cache its prompts.
    """

    def __init__(
        self, base: Any, plain: Callable[..., Any], inputs: Mapping[str, Any], split: PrefixSplit, wants_hidden: bool
    ) -> None:
        # Gemma 4 would keep `logits_to_keep` outputs of each pass.
        common = {name: value for name, value in inputs.items() if is_constant(value) and name != "logits_to_keep"}
        self.plain, self.split, self.cache_name = plain, split, str(cache_name(base))
        self.common = {**common, "use_cache": False, "return_dict": True}
        self.layers = [module for module in base.modules() if isinstance(module, GradientCheckpointingLayer)]
        self.written = WrittenPrefix(base.config, split.groups)
        self.hidden: Tensor | None = None
        self.skips_padding = False
        if has_rope_deltas(base):
            base.rope_deltas = None
        last = None if wants_hidden else _end_early(base, self.written)
        with suppress(PromptsStored), _cache_through_checkpoints(self.layers, last):
            outputs = plain(**self.common, **split.prompt_inputs(inputs), **{self.cache_name: self.written})
            self.hidden = hidden_states(outputs)
        self.written.check(split.start, self.hidden)
        self.deltas: Tensor | None = base.rope_deltas if has_rope_deltas(base) else None


class CompletionPass:
    """Runs rows of a batch behind their cached prompts.

    Args:
        base: base model (without head) of a transformers model.
        prefill: prompts of the batch.
        inputs: of the pass over the whole batch, by name.
    """

    def __init__(self, base: Any, prefill: Prefill, inputs: Mapping[str, Any]) -> None:
        self.prefill, self.split, self.inputs = prefill, prefill.split, inputs
        self.ids: Tensor = inputs["input_ids"]
        self.mask: Tensor = inputs["attention_mask"]
        self.index = on_device(self.split.groups, self.ids.device)  # (N,)
        deltas = prefill.deltas
        if deltas is not None:
            deltas = deltas.index_select(0, self.index.to(deltas.device))
        self.positions = positions_behind(base, inputs, self.split, deltas)
        if self.positions is None and prefill.skips_padding:
            self.positions = self.mask.long().cumsum(-1)[:, self.split.start : self.split.stop] - 1  # (N, columns)

    def lengths(self) -> list[int]:
        """Return the number of columns from `start` on that emit a token of each row, at least 1; (N,)."""
        emitted = self.mask[:, self.split.start + 1 : self.split.stop + 1].bool().sum(1)  # (N,)
        return [max(count, 1) for count in emitted.tolist()]

    def run_padded(self, rows: Sequence[int], length: int) -> Any:
        """Run `length` columns of some rows, and return their outputs, (B, length, D).

        Args:
            rows: their numbers.
            length: number of columns from `start` on.

        Raises:
            UnsupportedModel: the model does not read the prompts from its cache.
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
                attention_mask=self.mask[at, :stop],
                position_ids=positions,
                **take_pixels(self.inputs, self.split.behind, rows),
                **{self.prefill.cache_name: behind},
            )
        behind.check()
        return outputs

    def run_by_length(self, lengths: Sequence[int]) -> Any:
        """Run rows of similar lengths together; return the outputs of all rows, (N, stop - start, D)."""
        columns = self.split.stop - self.split.start
        if prefers_cudnn():  # which plans every new shape for 0.4 to 0.6 s (FunASR#3704)
            lengths = [min(length + -length % _FEW_SHAPES, columns) for length in lengths]
        passes = cut_by_length(lengths, _PASS_COST.get(self.ids.device.type, _PASS_COST_ON_GPU))
        parts = [self.run_padded(rows, max(lengths[row] for row in rows)) for rows in passes]
        wide = [torch.nn.functional.pad(part, (0, 0, 0, columns - part.size(1))) for part in map(hidden_states, parts)]
        order = on_device([row for rows in passes for row in rows], self.ids.device)
        return type(parts[0])(last_hidden_state=wide[0] if len(wide) == 1 else torch.cat(wide)[order.argsort()])

    def run_packed(self, lengths: Sequence[int]) -> Any:
        """Run all rows as a single row without padding; return outputs (N, stop - start, D), 0 for padding.

        Raises:
            UnsupportedModel: the model does not pass cu_seqlens on to its attention.
        """
        ids, positions = self.ids[:, self.split.start : self.split.stop], self.positions  # (N, columns)
        if positions is None:
            positions = torch.arange(self.split.start, self.split.stop, device=ids.device).unsqueeze(0)
        positions = positions.expand(*positions.shape[:-2], *ids.shape).flatten(-2)  # (..., N * columns)
        tokens, keys, bounds = find_packing(self.split, lengths, self.mask)
        cache = Cache(layers=[PackedKeys(layer, keys) for layer in self.prefill.written.layers])
        reason, attended = "a model that does not pass cu_seqlens on to its attention", []

        def attend_within_bounds(attend: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            attended.append(attend)
            require(kwargs.get("cu_seq_lens_k") is bounds["cu_seq_lens_k"], reason)
            return attend(*args, **kwargs)

        with wrap_attention(attend_within_bounds), _cache_through_checkpoints(self.prefill.layers):
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
    """Run a split batch; return the outputs of the base model for all rows and columns, (N, S, D).

    Args:
        base: base model (without head) of a transformers model.
        plain: its forward pass.
        inputs: of the pass, by name.
        split: of the batch.
        whole: whether outputs of prompts and padding are wanted; otherwise they are 0.
        alike: whether all processes have to run equally many passes.
        packs: whether completions run as one row without padding, unless outputs of padding are wanted.

    Raises:
        UnsupportedModel: the model does not cache its prompts, or does not read them from its cache.
    """
    if inputs.get("attention_mask") is None:
        inputs = {**inputs, "attention_mask": torch.ones_like(inputs["input_ids"])}
    if split.behind and inputs.get("position_ids") is None:  # positions without images would count padding
        names = ("input_ids", "mm_token_type_ids", "image_grid_thw", "attention_mask")
        positions, _ = base.get_rope_index(**{name: inputs.get(name) for name in names})  # (3, N, S)
        inputs = {**inputs, "position_ids": positions}
    if split.lent is None:
        prefill = Prefill(base, plain, inputs, split, wants_hidden=whole or alike)
    else:
        prefill = split.lent.prefill(base, plain)
    completions = CompletionPass(base, prefill, inputs)
    if packs and not whole and not split.behind:
        outputs = completions.run_packed(completions.lengths())
    elif whole or alike:
        outputs = completions.run_padded(range(len(split.groups)), split.stop - split.start)
    else:
        outputs = completions.run_by_length(completions.lengths())
    hidden = hidden_states(outputs)  # (N, stop - start, D)
    if prefill.hidden is not None and whole:
        hidden = torch.cat([prefill.hidden.index_select(0, completions.index), hidden], dim=1)
    missing = split.stop - hidden.size(1)
    hidden = torch.nn.functional.pad(hidden, (0, 0, missing, inputs["input_ids"].size(1) - split.stop))
    return type(outputs)(last_hidden_state=hidden)  # (N, S, D)


def hidden_states(outputs: Any) -> Tensor:
    """Return the last hidden states of a pass, (B, Q, D), or raise `UnsupportedModel` if it has none."""
    require(hasattr(outputs, "last_hidden_state"), "a model that does not return its last hidden states")
    hidden: Tensor = outputs.last_hidden_state
    return hidden


def positions_behind(
    base: Any, inputs: Mapping[str, Any], split: PrefixSplit, deltas: Tensor | None = None
) -> Tensor | None:
    """Return the position ids of the columns behind prompts.

    Args:
        base: base model (without head) of a transformers model.
        inputs: of the pass, by name.
        split: of the batch.
        deltas: (N, 1) offset of Qwen-VL's positions behind images; None: no images.

    Returns:
        (N, T), for Qwen-VL (3, N, T); None: the model counts on from the length of its cache, as in a plain pass.
    """
    given: Tensor | None = inputs.get("position_ids")
    if given is not None:
        return given[..., split.start : split.stop]
    if not has_rope_deltas(base):
        return None
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    if deltas is None:  # these models count padding in a pass without images
        return torch.arange(split.start, split.stop, device=ids.device).expand(len(ids), -1)  # (N, T)
    positions: Tensor = mask.long().cumsum(-1)[:, split.start : split.stop] - 1 + deltas.to(ids.device)
    return positions.expand(3, -1, -1)  # (3, N, T): time, height, width


def _end_early(base: Any, written: WrittenPrefix) -> GradientCheckpointingLayer | None:
    """Stop the pass over prompts once the last layer has stored its keys and values; return this layer, or None.

    Completions read neither its queries nor its outputs. It runs to its end if a hook waits for its outputs.
    """
    modules = dict(base.named_modules())  # thousands in large models, so listed once
    number = len(written.layers) - 1
    last = [
        (name, layer)
        for name, layer in modules.items()
        if isinstance(layer, GradientCheckpointingLayer)
        and any(module.layer_idx == number for module in indexed_modules(layer))
    ]
    # Completions must read nothing behind the last layer's keys and values.
    if len(last) != 1 or type(written.layers[-1]) is not StoredKeys:
        return None
    ((name, layer),) = last
    parents = [module for other, module in modules.items() if other and name.startswith(f"{other}.")]
    if any(module._forward_hooks or hasattr(module, "_hf_hook") for module in (*parents, *layer.modules())):
        return None
    written.layers[-1].ends_pass = True
    return layer


@contextmanager
def _cache_through_checkpoints(
    layers: Sequence[GradientCheckpointingLayer], last: GradientCheckpointingLayer | None = None
) -> Iterator[None]:
    """Let checkpointed layers use a cache, which a recomputation does not change, and keep the graph of prompts.

    Args:
        layers: of the model.
        last: layer that an exception leaves, so that its checkpoint could not recompute it; None: there is none.
    """
    with ExitStack() as stack:
        layer: Any
        for layer in layers:
            stack.enter_context(patched_attribute(layer, "_can_checkpoint_with_cache", True))
            if is_reentrant(layer):
                function = partial(layer._gradient_checkpointing_func, use_reentrant=False)
                stack.enter_context(patched_attribute(layer, "_gradient_checkpointing_func", function))
        if last is not None:
            stack.enter_context(patched_attribute(last, "gradient_checkpointing", False))
        yield


def why_not_pack(base: Any) -> str | None:
    """Return why completions of a base model cannot be packed; None: they can."""
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


def find_packing(split: PrefixSplit, lengths: Sequence[int], mask: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Return gather indices and cu_seqlens for packing completions.

    Args:
        split: of the batch.
        lengths: (N,) tokens of each row behind its prompt.
        mask: (N, S) attention mask of the batch, whose prompts are padded on the left.

    Returns:
        (Q,) index of each token among the flattened columns behind the prompts of N rows.
        (K,) index of each key among the flattened keys of U prompts and the Q tokens: each row reads its prompt without
            padding, then its own tokens.
        Arguments of flash attention: cu_seqlens and the longest row, of tokens and of keys.
    """
    width, columns = split.start, torch.arange(split.stop, device=mask.device)
    counts, groups = (on_device(each, mask.device).unsqueeze(1) for each in (lengths, split.groups))  # (N, 1) each
    own = columns[: split.stop - width] < counts  # (N, columns)
    number = (own.flatten().cumsum(0) - 1).view_as(own)  # of each token among the Q
    keys = torch.cat([groups * width + columns[:width], split.prompts * width + number], dim=1)
    reads = torch.cat([mask[:, :width].bool(), own], dim=1)  # (N, width + columns)
    bounds: dict[str, Any] = {"max_length_q": max(lengths), "max_length_k": int(reads.sum(1).max())}
    for name, read in (("cu_seq_lens_q", own), ("cu_seq_lens_k", reads)):
        bounds[name] = torch.nn.functional.pad(read.sum(1).cumsum(0), (1, 0)).int()
    return own.flatten().nonzero().flatten(), keys[reads], bounds
