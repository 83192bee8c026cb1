"""`share_prompts`: equal prompts computed once in forward, backward and `generate`, and where a run does so."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from inspect import signature
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer
from transformers.generation import GenerationMixin, GenerationMode

from vgr_trl.pixels import IMAGE_INPUTS, clone_to, on_device
from vgr_trl.sharing.model_support import (
    base_of,
    causal_model,
    check_model,
    check_token_types,
    has_sharded_parameters,
    is_checkpointed,
    is_compiled,
    keep_keys_unrepeated,
    why_no_pass_shares,
)
from vgr_trl.sharing.prefix_cache import SharingReport, UnsupportedModel, require
from vgr_trl.sharing.prefix_forward import (
    PER_TOKEN,
    PrefixSplit,
    SharedForward,
    drop_empty_images,
    find_groups,
    find_split,
    first_rows,
)
from vgr_trl.sharing.probe import why_not_share
from vgr_trl.utils import ConfigError, Feature, patched_attribute, patched_method


@contextmanager
def share_prompts(
    model: nn.Module,
    completion_length: int | None = None,
    *,
    agree: Callable[[bool], bool] | None = None,
    sharded: bool = True,
    packs: bool = False,
) -> Iterator[SharingReport]:
    """Compute equal prompts of a batch once, in `forward`, backward and `generate` of `model`, with the same results.

    In a trainer of TRL:

        with share_prompts(trainer.model):
            trainer.train()

    Log-probabilities, gradients and tokens are those of the plain passes, up to the order of additions. A call for
    which that cannot be had runs plainly, and the report says why. Dropout at work, or noise in routers, is the
    exception: the completions of a prompt then share what is drawn over their prompt, where plain passes draw for each.

    Calls from several threads take turns.

    Args:
        model: transformers model, also wrapped by DDP, DeepSpeed or PEFT, or patched by TRL.
        completion_length: T, the number of columns behind the prompts in every batch of the block, at least 1. Of
            the outputs only those that score completions can be used then: hidden states of prompts and padding are 0.
            None: rows may be anything; their longest common beginnings are shared, and all outputs are there.
        agree: given an answer of this process, returns whether it is that of all; needed where all processes have to
            share a batch or none: with sharded parameters, whose forward passes have to be equally many, and under
            DeepSpeed, which adds up gradients in the order in which they come.
        sharded: whether parameters are; a pass in which some processes have images and others none is refused then.
        packs: whether completions pass behind their prompts as one row without padding, where `completion_length` is
            given. Only where `why_not_pack` of the model gives no reason.

    Yields:
        Counts of rows and prompts, and the reasons of the calls that ran plainly, until the end of the block.

    Raises:
        ConfigError: `model` is no transformers model, `completion_length` is below 1, or another thread is in such a
            block with this model.
    """
    if completion_length is not None and completion_length < 1:
        raise ConfigError(f"completion_length is {completion_length}: give an integer of at least 1, or None.")
    causal = causal_model(model)
    report = SharingReport()
    # The passes of a sharded model may not begin below its wrapper, so it is not asked.
    reason = why_no_pass_shares(model) if has_sharded_parameters(model) else why_not_share(model, gradients=False)
    if reason is not None:
        report.plain[reason] += 1
        with ignore_empty_images(model):
            yield report
        return
    keep_keys_unrepeated()
    base = base_of(causal)
    forward = SharedForward(base, base.forward, report, completion_length, agree, sharded, packs)
    with ExitStack() as stack:
        stack.enter_context(patched_method(base, "forward", forward))
        if base is not causal and hasattr(causal, "generate"):
            generate = SharedGeneration(causal, causal.generate, forward, report)
            stack.enter_context(patched_method(causal, "generate", generate))
        yield report


@contextmanager
def ignore_empty_images(model: nn.Module, *, agree: Callable[[bool], bool] | None = None) -> Iterator[None]:
    """Let a model run on rows without images although it is given pixel inputs; `share_prompts` does so by itself.

    Args:
        model: as `share_prompts` takes it; a compiled one is left alone.
        agree: likewise.

    Raises:
        ConfigError: `model` is no transformers model.
    """
    base = base_of(causal_model(model))
    if is_compiled(model):
        yield
        return
    plain = base.forward
    names = list(signature(plain).parameters)
    agree = agree if "pixel_values" in names else None

    def forward(*args: Any, **kwargs: Any) -> Any:
        return plain(**drop_empty_images(dict(zip(names, args, strict=False)) | kwargs, agree))

    with patched_method(base, "forward", forward):
        yield


class SharedPasses:
    """Shares prompts in the passes of a run.

    Args:
        agree: as `share_prompts` takes it.
        sharded: whether parameters are.
        in_order: whether gradients are added up in the order in which they come, which has to be that of all processes.
        evens_images: whether the caller lets the vision tower run in every process if it does in one.
    """

    def __init__(
        self, agree: Callable[[bool], bool], *, sharded: bool, in_order: bool, evens_images: bool = False
    ) -> None:
        self._agree, self._sharded, self._in_order = agree, sharded, in_order
        self._refuses_uneven = sharded and not evens_images
        self._report = SharingReport()

    @contextmanager
    def around(
        self,
        feature: Feature,
        model: nn.Module,
        completion_length: int | None = None,
        *,
        packs: bool = False,
        counts: bool = True,
    ) -> Iterator[None]:
        """Share prompts in passes of this block, if the feature is on.

        Args:
            model: as `share_prompts` takes it.
            completion_length: T of a scored batch; None where the model generates.
            packs: as `share_prompts` takes it.
            counts: whether `metrics` counts these passes.
        """
        refuses = self._refuses_uneven
        if not feature.enabled:
            generates = completion_length is None
            with ignore_empty_images(model, agree=self._agree if refuses and not generates else None):
                yield
            return
        alike = self._sharded or (self._in_order and torch.is_grad_enabled())
        agree = self._agree if alike else None
        with share_prompts(model, completion_length, agree=agree, sharded=refuses, packs=packs) as report:
            yield
        if counts:
            self._report.add(report)

    def metrics(self) -> dict[str, float]:
        """Return what was shared since the last call."""
        report, self._report = self._report, SharingReport()
        return {"sharing/prompts_per_row": report.prompts_per_row} if report.rows else {}


def whole_groups(batch_size: int, num_generations: int) -> int:
    """The smallest multiple of `num_generations` that is at least `batch_size`: rows of a pass without gradients."""
    return -(-batch_size // num_generations) * num_generations


def sort_by_group(permutation: Sequence[int], groups: Sequence[int]) -> list[int]:
    """The permutation with the rows of a group brought together where the group's first row stands, order kept."""
    position: dict[int, int] = {}
    for row in permutation:
        position.setdefault(groups[row], len(position))
    return sorted(permutation, key=lambda row: position[groups[row]])


def shuffle_whole_groups(
    batch: dict[str, Any], arrange: Callable[[Sequence[int], Sequence[int]], list[int]] = sort_by_group
) -> dict[str, Any]:
    """TRL's `shuffle_sequence_dict` for a generation batch, with the completions of a prompt kept together.

    Draws the same random numbers. A value with no entry per row (a number, None) is kept. Pixel inputs that TRL has cut
    into rows are one object for all rows of a group, and keep no other memory.

    Args:
        batch: `prompt_ids` and `prompt_mask` (N, P), and tensors or lists with one entry per row.
        arrange: returns another permutation, given a random one and the number of the group of each row.
    """
    pixels = {name: batch[name] for name in IMAGE_INPUTS if batch.get(name) is not None}
    by_row = list(zip(*pixels.values(), strict=True)) if pixels else None
    groups = find_groups(batch["prompt_ids"], batch["prompt_mask"], by_row)
    batch = batch | {
        name: _one_per_group(values, groups) for name, values in pixels.items() if isinstance(values, list)
    }
    order = arrange(torch.randperm(len(groups)).tolist(), groups)

    def reordered(value: Any) -> Any:
        if value is None or (isinstance(value, torch.Tensor) and value.ndim == 0):
            return value
        return (
            value[on_device(order, value.device)] if isinstance(value, torch.Tensor) else [value[row] for row in order]
        )

    return {key: reordered(value) for key, value in batch.items()}


def _one_per_group(values: Sequence[torch.Tensor], groups: Sequence[int]) -> list[torch.Tensor]:
    kept = [clone_to(values[row], values[row].device) for row in first_rows(groups)]
    return [kept[group] for group in groups]


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
        self._longer = [_grow_buffer(filled.keys), _grow_buffer(filled.values)]
        self._show(filled.get_seq_length())

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        start = self.get_seq_length()
        stop = start + key_states.size(-2)
        if stop > self._longer[0].size(-2):
            self._longer = [
                _grow_buffer(self.keys, key_states.size(-2)),
                _grow_buffer(self.values, key_states.size(-2)),
            ]
        for longer, new in zip(self._longer, (key_states, value_states), strict=True):
            longer[:, :, start:stop] = new
        self._show(stop)
        return self.keys, self.values

    def _show(self, length: int) -> None:
        self.keys, self.values = (longer[:, :, :length] for longer in self._longer)


def _grow_buffer(filled: torch.Tensor, at_least: int = 0) -> torch.Tensor:
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
        kwargs = drop_empty_images(kwargs, self.forward.agree_on_images)
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
        check_model(self.forward.base, gradients=False)
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
        index = on_device(split.groups, inputs["input_ids"].device).repeat_interleave(copies)  # (N * copies,)
        grow_in_place(cache, index)
        base = self.forward.base
        if getattr(base, "rope_deltas", None) is not None:
            base.rope_deltas = base.rope_deltas.index_select(0, index.to(base.rope_deltas.device))  # (N, 1)
        return cache
