"""A model's forward pass and its `generate`, computing equal prompts once, for `share_prompts`."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import signature
from threading import RLock
from typing import Any

import torch
from accelerate.state import GradientState
from torch import Tensor
from torch.nn.functional import pad
from transformers import GenerationConfig
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, StaticCache, StaticLayer
from transformers.generation import GenerationMixin, GenerationMode

from vgr_trl.patching import patched_attribute
from vgr_trl.pixels import IMAGE_INPUTS, drop_empty_images, on_device
from vgr_trl.sharing.model_support import (
    SharingReport,
    UnsupportedModel,
    cache_name,
    cache_of,
    check_model,
    check_token_types,
    has_active_dropout,
    require,
)
from vgr_trl.sharing.prefix_split import NOT_TWICE, PER_TOKEN, PrefixSplit, check_inputs, find_split
from vgr_trl.sharing.row import ROW, lay_out, run_row

WHOLE_GROUPS = (
    "for prompts shared in training, use GRPOTrainer(args=vgr_trl.sharing.whole_groups(args)), which puts whole groups "
    "into micro-batches for the same update."
)


@dataclass(eq=False)
class SharedForward:
    """A base model's forward pass that computes equal prompts once where that is exact.

    Args:
        base: base model (without head) of a transformers model.
        plain: its forward pass.
        report: counts all calls.
        completion_length: T, if every batch has P + T columns of prompt and completion; None: the longest common
            beginnings of the rows are shared.
        agree: returns whether an answer is True in all processes, where parameters are sharded: `generate` then needs
            equally many passes in all of them, and images in some of them only are refused. None: each decides alone.
        evens_images: whether the caller looks after images that only some processes have.
        warns: whether to warn once of active dropout.

    Attributes:
        first_step: counts by kind of call, printed after the first step; None: nothing is printed.
        labelled: T of the next call, where only completions have labels; otherwise None.
        paused: whether calls run plainly, as within `generate`.
        refused: kind of call -> why the model turned out to be unsupported.
    """

    base: Any
    plain: Callable[..., Any]
    report: SharingReport
    completion_length: int | None
    agree: Callable[[bool], bool] | None = None
    evens_images: bool = False
    warns: bool = True
    first_step: dict[str, SharingReport] | None = None
    labelled: int | None = None
    paused: bool = False
    refused: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.names = list(signature(self.plain).parameters)
        self.agree_on_images = self.agree if "pixel_values" in self.names and not self.evens_images else None
        self.lock = RLock()  # the model keeps the offsets of one generation at a time

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or ROW in kwargs:
            return self.plain(*args, **kwargs)
        with self.lock:
            width, self.labelled = self.completion_length or self.labelled, None  # labels belong to one call
            if self.paused:
                return self.plain(*args, **kwargs)
            inputs = drop_empty_images(dict(zip(self.names, args, strict=False)) | kwargs, self.agree_on_images)
            if inputs.get("use_cache") or cache_of(inputs) is not None:
                return self.plain(**inputs)
            gradients = torch.is_grad_enabled()
            kind = "training" if gradients else "scoring"
            rows = inputs.get("inputs_embeds") if inputs.get("input_ids") is None else inputs["input_ids"]
            split, shared = partial(self._split, inputs, width), partial(self._run, inputs, width is None)
            outputs = self.share(kind, rows, split, shared, partial(self.plain, **inputs))
            if gradients and self.first_step is not None and GradientState().sync_gradients:
                self._tell_first_step(self.first_step)
            return outputs

    def _tell_first_step(self, counts: Mapping[str, SharingReport]) -> None:
        """Print the counts of the first step, and how to share more."""
        kinds = "; ".join(f"{kind} {counted}" for kind, counted in counts.items())
        print(f"share_prompts, until the end of the first step: {kinds}.", flush=True)
        if "training" in counts and counts["training"].plain.get(NOT_TWICE):
            print(f"share_prompts: {WHOLE_GROUPS}", flush=True)
        self.first_step = None

    def _split(self, inputs: dict[str, Any], width: int | None) -> PrefixSplit:
        """Split a batch into its prompts and completions."""
        check_model(self.base)
        check_inputs(inputs, self.base.config)
        unset = width is None and inputs.get("use_cache") is None and not self.base.training  # may decode next
        require(not (unset and self.base.config.get_text_config(decoder=True).use_cache), "use_cache is not False")
        start = None if width is None else inputs["input_ids"].size(1) - 1 - width  # the last column emits no token
        return find_split(inputs, self.base.config, start)

    def _run(self, inputs: dict[str, Any], whole: bool, split: PrefixSplit) -> Any:
        """Run a split batch; return the base model's outputs (N, S, D), 0 where no token ran."""
        row, call = lay_out(self.base, inputs, split, whole=whole)
        outputs = run_row(self.plain, self.base, row, call)
        # Columns that did not run read the last entry, which is 0.
        return type(outputs)(last_hidden_state=pad(outputs.last_hidden_state[0], (0, 0, 0, 1))[row.table])

    def share(
        self,
        kind: str,
        rows: Any,
        split: Callable[[], PrefixSplit],
        shared: Callable[[PrefixSplit], Any],
        plain: Callable[[], Any],
        agree: Callable[[bool], bool] = bool,
    ) -> Any:
        """Share prompts, or fall back to the plain call if that is not exact.

        Args:
            kind: kind of call; after a failure no call of this kind shares prompts.
            rows: tensor with one entry per row.
            split: splits the batch, or raises `UnsupportedModel`.
            shared: runs a split batch, or raises `UnsupportedModel`.
            plain: runs the batch without sharing.
            agree: returns whether an answer is True in all processes, which then share together or not at all; by
                default each process decides alone.
        """
        batch_split, reason = None, self.refused.get(kind, "")
        try:
            batch_split = None if reason else split()
        except UnsupportedModel as error:
            reason = str(error)
        if not agree(batch_split is not None):
            batch_split, reason = None, reason or "another process cannot share this batch"
        elif batch_split is not None and agree(batch_split.prompts == batch_split.rows):
            batch_split, reason = None, NOT_TWICE
        if batch_split is not None:
            try:
                outputs = shared(batch_split)
            except UnsupportedModel as error:
                self.refused[kind] = reason = str(error)
            else:
                self._count(kind, batch_split.rows, batch_split.prompts)
                if self.warns and has_active_dropout(self.base):
                    warnings.warn("The completions of a prompt share its dropout or router noise.", stacklevel=2)
                    self.warns = False
                return outputs
        count = len(rows) if isinstance(rows, Tensor) else 0
        self._count(kind, count, count, [reason])
        return plain()

    def _count(self, kind: str, *counts: Any) -> None:
        self.report.add(*counts, trains=self.base.training)
        if self.first_step is not None:
            self.first_step.setdefault(kind, SharingReport()).add(*counts)


_OPTIONS = {*GenerationConfig().to_dict(), "generation_config"}  # arguments of `generate`
ROOM = 128  # tokens that fit before the next copy
_CACHE_LENGTHS = 256  # static caches are multiples of so many tokens long


class GrowingLayer(DynamicLayer):
    """Keys and values of rows of a filled layer, with room for new tokens; for `generate` without beams.

    Args:
        filled: layer with the keys and values of prompts.
        index: (N,) row of the filled layer for each row.
    """

    keys: Any
    values: Any

    def __init__(self, filled: Any, index: Tensor) -> None:
        super().__init__()
        self.dtype, self.device, self.is_initialized = filled.keys.dtype, filled.device, True
        filled.reorder_cache(index)
        self._longer = [pad(states, (0, 0, 0, ROOM)) for states in (filled.keys, filled.values)]
        self._show_tokens(filled.get_seq_length())

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        start = self.get_seq_length()
        stop = start + key_states.size(-2)
        if stop > self._longer[0].size(-2):
            room = max(key_states.size(-2), ROOM)
            self._longer = [pad(states, (0, 0, 0, room)) for states in (self.keys, self.values)]
        for longer, new in zip(self._longer, (key_states, value_states), strict=True):
            longer[:, :, start:stop] = new
        self._show_tokens(stop)
        return self.keys, self.values

    def _show_tokens(self, length: int) -> None:
        self.keys, self.values = (longer[:, :, :length] for longer in self._longer)


def grow_in_place(cache: Cache, index: Tensor) -> None:
    """Select rows `index`, (N,), of a filled cache, and make room for new tokens in layers that keep all tokens."""
    for number, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer and layer.is_initialized:
            cache.layers[number] = GrowingLayer(layer, index)
        else:
            layer.reorder_cache(index)  # type: ignore[arg-type]  # annotated as a LongTensor


def why_not_static(config: Any) -> str | None:
    """Return why a model with this config cannot share prompts with a static cache, or None if it can."""
    if not all(type(layer) is DynamicLayer for layer in DynamicCache(config=config).layers):
        return "a static cache of layers with a window or a state"
    return None if hasattr(StaticLayer(1), "cumulative_length") else "a static cache of a transformers before 5.17"


class SharedGeneration:
    """A model's `generate` that computes equal prompts once where that is exact.

    Args:
        model: transformers model with a head.
        plain: its `generate`.
        forward: the shared forward pass of its base model, paused during `generate`.
    """

    def __init__(self, model: Any, plain: Callable[..., Any], forward: SharedForward) -> None:
        self.model, self.plain, self.forward = model, plain, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        kwargs = drop_empty_images(kwargs, self.forward.agree_on_images)
        inputs = dict(kwargs)
        ids = [*args, *(inputs.pop(name) for name in ("inputs", "input_ids") if name in inputs)]
        inputs["input_ids"] = ids[0] if len(ids) == 1 else None
        plain = partial(self.plain, *args, **kwargs)
        with self.forward.lock, patched_attribute(self.forward, "paused", True):
            split, generate = partial(self._split, inputs), partial(self._generate, inputs)
            agree = self.forward.agree or bool
            return self.forward.share("generation", inputs["input_ids"], split, generate, plain, agree)

    def _split(self, inputs: dict[str, Any]) -> PrefixSplit:
        """Split prompts from their last tokens, which run with the completions."""
        require(getattr(self.plain, "__func__", None) is GenerationMixin.generate, "a generate method of its own")
        check_model(self.forward.base)
        require(cache_name(self.forward.base) is not None, "a model without a cache of keys and values")
        training = (module for module in self.model.modules() if module.training)
        checkpoints = any(getattr(module, "gradient_checkpointing", False) for module in training)
        require(not checkpoints, "generate with gradient checkpointing on")
        starts_anew = cache_of(inputs) is None and inputs.get("inputs_embeds") is None
        require(starts_anew, "generate from a cache or from embeddings")
        for name, value in inputs.items():
            per_row = isinstance(value, Tensor) and value.ndim and name not in (*PER_TOKEN, *IMAGE_INPUTS)
            alone = name in ("assistant_model", "custom_generate") and value is not None
            require(not (per_row or alone), f"the input {name}")
        config = self._prepare_config(inputs)
        modes = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
        require(config.get_generation_mode(None) in modes, "generate with beams or an assistant")
        is_supported = config.use_cache and config.cache_implementation in (None, "static")
        require(is_supported, "generate without a growing or a static cache")
        if config.cache_implementation == "static" and (reason := why_not_static(self.model.config)):
            raise UnsupportedModel(reason)
        require(config.prefill_chunk_size is None, "prefill_chunk_size")
        require(not (config.output_hidden_states or config.output_attentions), "hidden states or attention as outputs")
        ids, mask = inputs["input_ids"], inputs.get("attention_mask")
        require(isinstance(ids, Tensor) and ids.ndim == 2, "no prompt before the completions")
        require(mask is not None and mask.shape == ids.shape, "generate without an attention mask")
        check_token_types(inputs, self.model.config)
        split = find_split(inputs, self.model.config, ids.size(1) - 1)
        return replace(split, copies=config.num_return_sequences or 1)

    def _prepare_config(self, inputs: dict[str, Any]) -> Any:
        """Return the `GenerationConfig` of a call."""
        options = {name: value for name, value in inputs.items() if name in _OPTIONS}
        return self.model._prepare_generation_config(options.pop("generation_config", None), **options)[0]

    def _generate(self, inputs: dict[str, Any], split: PrefixSplit) -> Any:
        """Generate from cached prompts, without their images, which the cache contains."""
        cache: Cache = self._fill_cache(inputs, split)
        inputs = {name: value for name, value in inputs.items() if name not in IMAGE_INPUTS}
        if split.copies > 1:
            tokens = {name: inputs[name] for name in PER_TOKEN if inputs.get(name) is not None}
            inputs |= {name: value.repeat_interleave(split.copies, dim=0) for name, value in tokens.items()}
            inputs["num_return_sequences"] = 1
        config = self._prepare_config(inputs)
        if config.cache_implementation is None:
            return self._continue_cache(cache, inputs)
        inputs = {name: value for name, value in inputs.items() if name not in _OPTIONS}
        cache, config.cache_implementation = self._make_static_cache(cache, inputs["input_ids"], config), None
        for longer, new in (("max_length", config.max_new_tokens), ("min_length", config.min_new_tokens)):
            if new is not None:  # transformers would warn of two lengths, of which one is its default
                setattr(config, longer, None)
        base, shared = self.forward.base, vars(self.forward.base)["forward"]
        # A replaced method is a new object in each block, for which torch would compile again.
        if getattr(self.forward.plain, "__func__", None) is type(base).forward:
            del base.forward
        try:
            return self._continue_cache(cache, inputs | {"generation_config": config})
        finally:
            base.forward = shared

    def _continue_cache(self, cache: Cache, inputs: dict[str, Any]) -> Any:
        # transformers accepts either a cache or its kind, which it would take from the model's defaults.
        with patched_attribute(self.model.generation_config, "cache_implementation", None):
            return self.plain(**inputs, **{str(cache_name(self.forward.base)): cache})

    def _make_static_cache(self, filled: Any, ids: Tensor, config: GenerationConfig) -> Any:
        """Return a static cache with the keys and values of a filled cache, and room for all new tokens."""
        longest = config.max_length if config.max_new_tokens is None else ids.size(1) + config.max_new_tokens
        # torch compiles again for a cache of another length, half a minute for a 7B.
        longest += -longest % _CACHE_LENGTHS
        longest = max(longest, getattr(self.model, "_previous_max_cache_length", 0))
        self.model._previous_max_cache_length = longest
        cache: Any = StaticCache(config=self.model.config.get_text_config(decoder=True), max_cache_len=longest)
        for layer, of_prompt in zip(cache.layers, filled.layers, strict=True):
            layer.update(of_prompt.keys, of_prompt.values)
        return cache

    def _fill_cache(self, inputs: dict[str, Any], split: PrefixSplit) -> DynamicCache:
        """Return a cache of all rows to generate, filled with their prompts except for the last tokens."""
        engine_options = {"synced_gpus": inputs["synced_gpus"]} if "synced_gpus" in inputs else {}
        cache = DynamicCache(config=self.model.config)
        # One greedy step draws no random numbers, and lets the family's own generate prepare positions and masks.
        # Options that are not given would come from the model's defaults.
        greedy = {"do_sample": False, "num_beams": 1, "temperature": 1.0, "top_p": 1.0, "top_k": 50}
        step = GenerationConfig(max_new_tokens=1, num_return_sequences=1, return_dict_in_generate=True, **greedy)
        with torch.no_grad():
            self._continue_cache(cache, {**split.prompt_inputs(inputs), **engine_options, "generation_config": step})
        require(cache.get_seq_length() == split.start, "the model did not keep the whole prompt in its cache")
        index = on_device(split.groups, inputs["input_ids"].device).repeat_interleave(split.copies)  # (N * copies,)
        grow_in_place(cache, index)
        base = self.forward.base
        if getattr(base, "rope_deltas", None) is not None:  # Qwen-VL keeps them between calls
            base.rope_deltas = base.rope_deltas.index_select(0, index.to(base.rope_deltas.device))  # (N, 1)
        return cache
