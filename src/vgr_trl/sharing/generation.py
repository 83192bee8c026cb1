"""Prompts computed once, then every completion sampled behind its prompt."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer
from transformers.generation import GenerationMixin, GenerationMode

from vgr_trl.batch import IMAGE_INPUTS
from vgr_trl.sharing.model_support import check_token_types, is_checkpointed
from vgr_trl.sharing.prefix_cache import SharingReport, UnsupportedModel, require
from vgr_trl.sharing.prefix_forward import PER_TOKEN, PrefixSplit, SharedForward, find_split, without_empty_images
from vgr_trl.utils import patched_attribute

ROOM = 128  # tokens for which there is room before the next copy


class GrowingLayer(DynamicLayer):
    """Keys and values of some rows of a filled layer, to which tokens are added; for `generate` without beams.

    Args:
        filled: the other layer.
        index: (N,) row -> row of the other layer.
    """

    keys: Any
    values: Any

    def __init__(self, filled: Any, index: torch.Tensor) -> None:
        super().__init__()
        self.dtype, self.device, self.is_initialized = filled.dtype, filled.device, True
        filled.reorder_cache(index)
        self._longer = [_with_room(filled.keys), _with_room(filled.values)]
        self._show(filled.get_seq_length())

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        start = self.get_seq_length()
        stop = start + key_states.size(-2)
        if stop > self._longer[0].size(-2):
            self._longer = [_with_room(self.keys, key_states.size(-2)), _with_room(self.values, key_states.size(-2))]
        for longer, new in zip(self._longer, (key_states, value_states), strict=True):
            longer[:, :, start:stop] = new
        self._show(stop)
        return self.keys, self.values

    def _show(self, length: int) -> None:
        self.keys, self.values = (longer[:, :, :length] for longer in self._longer)


def _with_room(filled: torch.Tensor, at_least: int = 0) -> torch.Tensor:
    """Return a tensor that begins with (N, H, S, D), and has more tokens."""
    rows, heads, length, width = filled.shape
    longer = filled.new_empty(rows, heads, length + max(at_least, ROOM), width)
    longer[:, :, :length] = filled
    return longer


def grow_in_place(cache: Cache, index: torch.Tensor) -> None:
    """Give a filled cache rows `index`, (N,), of its own, with room behind them in layers that keep all tokens."""
    for number, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer and layer.is_initialized:
            cache.layers[number] = GrowingLayer(layer, index)
        else:
            layer.reorder_cache(index)  # type: ignore[arg-type]  # a LongTensor, which no tensor is for mypy


_GENERATE = GenerationMixin.generate
_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)


class SharedGeneration:
    """A model's `generate` that computes equal prompts once, and runs plainly where that is not exact.

    Args:
        model: transformers model with a head.
        plain: its `generate`.
        forward: the shared forward pass of its base model, which is paused meanwhile.
        report: where calls are counted.
    """

    def __init__(self, model: Any, plain: Callable[..., Any], forward: SharedForward, report: SharingReport) -> None:
        self.model, self.plain, self.forward, self.report = model, plain, forward, report

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        kwargs = without_empty_images(kwargs, self.forward.agree_on_images)
        split, reason = None, ""
        with self.forward.lock, patched_attribute(self.forward, "paused", True):
            try:
                inputs, copies = self._inputs(args, kwargs)
                split = self._split(inputs, copies)
            except UnsupportedModel as error:
                reason = str(error)
            if not self.forward.all_agree(split is not None) and split is not None:
                split, reason = None, "another process cannot share this batch"
            if split is not None:
                try:
                    cache = self._prefill(inputs, split, copies)
                except UnsupportedModel as error:
                    reason = str(error)
                else:
                    self.report.add_shared(len(split.groups) * copies, split.prompts)
                    return self._continue(inputs, copies, cache)
            ids = kwargs.get("input_ids", kwargs.get("inputs", args[0] if args else None))
            self.report.add_plain(len(ids) if isinstance(ids, torch.Tensor) else 0, reason)
            return self.plain(*args, **kwargs)

    def _continue(self, inputs: dict[str, Any], copies: int, cache: Cache) -> Any:
        """Generate from the prompts in the cache: the images are in it, and must not be given again."""
        inputs = {name: value for name, value in inputs.items() if name not in IMAGE_INPUTS}
        if copies > 1:
            tokens = {name: inputs[name] for name in PER_TOKEN if inputs.get(name) is not None}
            inputs |= {name: value.repeat_interleave(copies, dim=0) for name, value in tokens.items()}
            inputs["num_return_sequences"] = 1
        return self.plain(**inputs, past_key_values=cache)

    def _inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[dict[str, Any], int]:
        """The inputs by name, and the completions per row."""
        plain_generate = getattr(self.plain, "__func__", None) is _GENERATE
        require(plain_generate, "a generate that is not that of transformers")
        self.forward.check_model(gradients=False)
        require(not is_checkpointed(self.model), "generate with gradient checkpointing on")
        inputs = dict(kwargs)
        twice = args and ("input_ids" in inputs or "inputs" in inputs)
        require(len(args) <= 1 and not twice, "positional arguments of generate")
        if args or "inputs" in inputs:
            inputs["input_ids"] = args[0] if args else inputs.pop("inputs")
        starts_anew = inputs.get("past_key_values") is None and inputs.get("inputs_embeds") is None
        require(starts_anew, "generate from a cache or from embeddings")
        for name, value in inputs.items():
            per_row = isinstance(value, torch.Tensor) and value.ndim and name not in (*PER_TOKEN, *IMAGE_INPUTS)
            if per_row or (name in ("assistant_model", "custom_generate") and value is not None):
                raise UnsupportedModel(f"the input {name}")
        return inputs, self._check_config(inputs)

    def _split(self, inputs: dict[str, Any], copies: int) -> PrefixSplit:
        """Prompts without their last tokens, which begin the completions."""
        ids, mask = inputs.get("input_ids"), inputs.get("attention_mask")
        if not isinstance(ids, torch.Tensor) or ids.ndim != 2:
            raise UnsupportedModel("no prompt before the completions")
        require(mask is not None and mask.shape == ids.shape, "generate without an attention mask")
        check_token_types(inputs, self.model.config)
        return find_split(inputs, self.model.config, (ids.size(1) - 1, ids.size(1)), alone=copies > 1)

    def _check_config(self, inputs: dict[str, Any]) -> int:
        """Raise `UnsupportedModel` unless `generate` samples token by token; completions per input row."""
        names = set(GenerationConfig().to_dict()) | {"generation_config"}
        given = {name: value for name, value in inputs.items() if name in names}
        config, _ = self.model._prepare_generation_config(given.pop("generation_config", None), **given)
        require(config.get_generation_mode(None) in _MODES, "generate with beams or an assistant")
        growing = config.use_cache and config.cache_implementation is None
        require(growing, "generate without its default, growing cache")
        require(config.prefill_chunk_size is None, "prefill_chunk_size")
        require(not config.output_hidden_states, "output_hidden_states=True")
        return config.num_return_sequences or 1

    def _prefill(self, inputs: dict[str, Any], split: PrefixSplit, copies: int) -> Cache:
        """The cache of all rows to be generated, after all tokens of their prompts but the last."""
        prompts = split.prompt_inputs(inputs)
        others = {"synced_gpus": inputs["synced_gpus"]} if "synced_gpus" in inputs else {}
        cache = DynamicCache(config=self.model.config)
        # One greedy step draws no random numbers, and prepares positions and masks as the family's own generate does.
        # The model's own defaults are for completions.
        step = GenerationConfig(max_new_tokens=1, do_sample=False, num_beams=1, return_dict_in_generate=True)
        with torch.no_grad(), patched_attribute(self.model, "generation_config", step):
            self.plain(**prompts, **others, past_key_values=cache, generation_config=step)
        whole = cache.get_seq_length() == split.start
        require(whole, "the model did not keep the whole prompt in its cache")
        index = torch.tensor(split.groups, device=inputs["input_ids"].device).repeat_interleave(copies)  # (N * copies,)
        grow_in_place(cache, index)
        base = self.forward.base
        if getattr(base, "rope_deltas", None) is not None:
            base.rope_deltas = base.rope_deltas.index_select(0, index.to(base.rope_deltas.device))  # (N, 1)
        return cache
