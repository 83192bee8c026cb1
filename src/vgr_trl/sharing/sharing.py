"""`share_prompts`: equal prompts computed once in forward, backward and `generate`, and where a run does so."""

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from inspect import signature
from threading import RLock
from typing import Any
from weakref import WeakKeyDictionary

import torch
from accelerate.state import AcceleratorState, DistributedType, is_initialized
from accelerate.utils import gather
from torch import Tensor, nn
from transformers import GenerationConfig
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, StaticCache, StaticLayer
from transformers.generation import GenerationMixin, GenerationMode

from vgr_trl.pixels import IMAGE_INPUTS, on_device
from vgr_trl.sharing.lending import Lending, MicroBatch, is_last_micro_batch
from vgr_trl.sharing.model_support import (
    base_of,
    causal_model,
    check_model,
    check_token_types,
    has_active_dropout,
    has_sharded_parameters,
    is_checkpointed,
    is_compiled,
    keep_keys_unrepeated,
    replaced,
    shards_layers,
    why_no_pass_shares,
)
from vgr_trl.sharing.prefix_cache import (
    SharingReport,
    StoredKeys,
    UnsupportedModel,
    WrittenPrefix,
    require,
    why_unsupported,
)
from vgr_trl.sharing.prefix_forward import (
    PER_TOKEN,
    PrefixSplit,
    check_inputs,
    drop_empty_images,
    find_split,
    prefix_forward,
)
from vgr_trl.sharing.probe import why_not_share, why_padding_counts
from vgr_trl.utils import ConfigError, Feature, patched_attribute


@contextmanager
def share_prompts(model: nn.Module, completion_length: int | None = None, **modes: Any) -> Iterator[SharingReport]:
    """Compute equal prompts of a batch once, in `forward`, backward and `generate` of `model`, with the same results.

    In a trainer of TRL:

        with share_prompts(trainer.model):
            trainer.train()

    Example:
        >>> model, processor = build_tiny_vlm([])  # of vgr_trl.demo.tiny_model
        >>> tokens = torch.tensor([[70, 71, 72, 80], [70, 71, 72, 81]])  # two completions of a prompt
        >>> with torch.no_grad(), share_prompts(model, completion_length=1) as report:
        ...     logits = model(input_ids=tokens, logits_to_keep=2).logits
        >>> print(report)
        computed 1 prompts for 2 rows

    Where accelerate accumulates gradients, as TRL lets it, a prompt whose completions lie in several micro-batches runs
    once for all of them, forward and backward.

    Log-probabilities, gradients and tokens are those of the plain passes, up to the order of additions. A call for
    which that cannot be had runs plainly, and the report says why. Dropout at work, or noise in routers, is the
    exception: the completions of a prompt then share what is drawn over their prompt, where plain passes draw for each,
    and a warning says so.

    After the first step the main process prints how many prompts were computed, if `completion_length` is None.

    Calls from several threads take turns.

    Args:
        model: transformers model, also wrapped by DDP, DeepSpeed or PEFT, or patched by TRL.
        completion_length: T, the number of columns behind the prompts in every batch of the block, at least 1. Of
            the outputs only those that score completions can be used then: hidden states of prompts and padding are 0.
            None: rows may be anything; their longest common beginnings are shared, and all outputs are there. Those of
            padding may differ from a plain pass.
        modes: of a run with several processes or its own micro-batches, as `SharedForward` takes them.

    Yields:
        Counts of rows and prompts, and the reasons of the calls that ran plainly, until the end of the block.

    Raises:
        ConfigError: `model` is no transformers model, `completion_length` is below 1, or another thread is in such a
            block with this model.
    """
    if completion_length is not None and completion_length < 1:
        raise ConfigError(f"completion_length is {completion_length}: give an integer of at least 1, or None.")
    causal, report = causal_model(model), SharingReport()
    base = base_of(causal)
    is_alone = completion_length is None and modes.get("agree") is None
    forward = SharedForward(base, base.forward, report, completion_length, **{**_modes_of_engine(), **modes})
    checks = forward.checks or ModelChecks(model)
    tells = is_alone and forward.checks is None and os.environ.get("RANK", "0") == "0"
    if checks.reason is not None:
        report.plain[checks.reason] += 1
        if tells:
            print(f"share_prompts shares nothing: {checks.reason}.", flush=True)
        with ignore_empty_images(model):
            yield report
        return
    keep_keys_unrepeated()
    why = why_not_lend(base) if is_alone else None
    own = Lending(base) if is_alone and why is None else None
    forward.lending, forward.first_step = own or forward.lending, {} if tells else None
    if tells and forward.agree is not None:
        print(f"share_prompts shares prompts within a micro-batch, not over several ({why}). {_ADVICE}", flush=True)
    changes: list[tuple[Any, str, Any]] = [(base, "forward", forward)]
    if base is not causal and hasattr(causal, "generate"):
        changes.append((causal, "generate", SharedGeneration(causal, causal.generate, forward)))
    reads = _reading_labels(causal, forward) if is_alone else nullcontext()
    with replaced(*changes), reads, nullcontext() if own is None else _lending(own):
        yield report


_ADVICE = "Best: per_device_train_batch_size num_generations, and gradient_accumulation_steps divided by as much."


def _modes_of_engine() -> dict[str, Any]:
    """Return the modes of `SharedForward` under DeepSpeed and FSDP, where all processes share a batch or none."""
    kind = AcceleratorState().distributed_type if is_initialized() else None
    if kind not in (DistributedType.DEEPSPEED, DistributedType.FSDP):
        return {}
    state = AcceleratorState()
    sharded = kind == DistributedType.FSDP or state.deepspeed_plugin.zero_stage == 3

    def all_agree(answer: bool) -> bool:
        votes = sharded or torch.is_grad_enabled()
        return bool(gather(torch.tensor([answer], device=state.device)).all()) if votes else answer

    return {"agree": all_agree, "sharded": sharded}


class ModelChecks:
    """Answers about all modules of a model, thousands of them, found once while it stays wrapped as it is.

    Args:
        model: as `share_prompts` takes it.

    Attributes:
        reason: why no pass shares prompts; None: it depends on the pass.
        gathers: whether FSDP2 gathers a layer's weights for the backward pass when a gradient reaches its output.
    """

    def __init__(self, model: nn.Module) -> None:
        # The passes of a sharded model may not begin below its wrapper, so it is not asked.
        sharded = has_sharded_parameters(model)
        self.reason = why_no_pass_shares(model) if sharded else why_not_share(model, gradients=False)
        self._base = base_of(causal_model(model))
        self.gathers = shards_layers(self._base)

    @cached_property
    def why_not_train(self) -> str | None:
        """Why no pass with gradients shares prompts."""
        return why_unsupported(check_model, self._base, True)


def why_not_lend(base: Any) -> str | None:
    """Return why prompts of a base model are not lent to several micro-batches; None: they can be."""
    kind = AcceleratorState().distributed_type if is_initialized() else None
    if kind == DistributedType.DEEPSPEED:
        return "DeepSpeed"
    if kind == DistributedType.FSDP or has_sharded_parameters(base):
        return "sharded parameters"
    if not all(type(layer) is StoredKeys for layer in WrittenPrefix(base.config, []).layers):
        return "layers that keep other state than keys and values"
    return why_padding_counts(base)


@contextmanager
def _reading_labels(causal: Any, forward: "SharedForward") -> Iterator[None]:
    """Read where completions begin off the labels of TRL's scoring."""

    def read(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        labels, forward.labelled = kwargs.get("labels"), None
        wanted = torch.is_grad_enabled() or forward.agree is not None  # or one process decides for all
        if wanted and kwargs.get("fused_lm_head") and labels is not None:
            labelled = (labels != -100).any(0).nonzero()
            forward.labelled = labels.size(1) - int(labelled[0]) if len(labelled) else None

    with causal.register_forward_pre_hook(read, with_kwargs=True):
        yield


@contextmanager
def _lending(lending: Lending) -> Iterator[None]:
    """Forget open prompts at the end of the block."""
    try:
        yield
        if lending.open:  # of a training that has stopped within an optimizer step, or of a block that ends in one
            lost = f"{len(lending.open)} prompts have run forward and not backward, and lost their gradients"
            warnings.warn(f"{lost}: end the block of share_prompts behind an optimizer step.", stacklevel=2)
    finally:
        lending.clear()


@contextmanager
def ignore_empty_images(model: nn.Module, *, agree: Callable[[bool], bool] | None = None) -> Iterator[None]:
    """Let a model run on rows without images although it is given pixel inputs; `share_prompts` does so by itself.

    Args:
        model: as `share_prompts` takes it; a compiled one is left alone.
        agree: as `SharedForward` takes it.

    Raises:
        ConfigError: `model` is no transformers model.
    """
    base = base_of(causal_model(model))
    if is_compiled(model):
        yield
        return
    agree = agree if "pixel_values" in signature(base.forward).parameters else None
    with base.register_forward_pre_hook(partial(_drop_from_call, agree), with_kwargs=True):
        yield


def _drop_from_call(agree: Any, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return args, drop_empty_images(kwargs, agree)  # of this module, so that a model can be pickled within the block


@dataclass(eq=False)
class SharedForward:
    """A base model's forward pass that computes equal prompts once, and runs plainly where that is not exact.

    Args:
        base: base model (without head) of a transformers model.
        plain: its forward pass.
        report: where calls are counted.
        completion_length: T, if every batch is P + T columns of prompt and completion; None finds the longest common
            beginnings of the rows itself.
        agree: given an answer of this process, returns whether it is that of all; needed where all processes have to
            share a batch or none: with sharded parameters, whose forward passes have to be equally many, and under
            DeepSpeed, which adds up gradients in the order in which they come.
        sharded: whether parameters are; a pass in which some processes have images and others none is refused then.
        packs: whether completions pass behind their prompts as one row without padding, where `completion_length` is
            given. Only where `why_not_pack` of the model gives no reason.
        lending: prompts that are lent to several micro-batches with gradients; None: none are.
        again: (N,) whether a later micro-batch of the optimizer step reads the prompt of a row; None: any may.
        checks: of the model, where it stays wrapped as it is; None: they are made in each pass.

    Attributes:
        first_step: counts by kind of call, until they are printed after the first step; None: nothing is printed.
        labelled: T of the call that runs, where only completions have labels; otherwise None.
    """

    base: Any
    plain: Callable[..., Any]
    report: SharingReport
    completion_length: int | None
    agree: Callable[[bool], bool] | None = None
    sharded: bool = True
    packs: bool = False
    lending: Lending | None = None
    again: Sequence[bool] | None = None
    checks: ModelChecks | None = None
    first_step: dict[str, SharingReport] | None = None
    labelled: int | None = None
    paused: bool = False  # `generate` makes its own arrangements
    refused: dict[str, str] = field(default_factory=dict)  # kind of call -> why the model turned out to be unsupported

    def __post_init__(self) -> None:
        self.alike = self.sharded and self.agree is not None
        self.warns = self.checks is None  # of dropout, once; `DAPOTrainer` does it at the start of a run
        self.names = list(signature(self.plain).parameters)
        self.agree_on_images = self.agree if self.sharded and "pixel_values" in self.names else None
        self.lock = RLock()  # the model keeps the offsets of one batch at a time

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.plain(*args, **kwargs)
        with self.lock:
            width, self.labelled = self.completion_length or self.labelled, None  # labels are those of one call
            if self.paused:
                return self.plain(*args, **kwargs)
            inputs = drop_empty_images(dict(zip(self.names, args, strict=False)) | kwargs, self.agree_on_images)
            if inputs.get("use_cache") or any(inputs.get(name) is not None for name in ("past_key_values", "cache")):
                return self.plain(**inputs)
            gradients = torch.is_grad_enabled()
            if gradients and self.lending is not None:
                self.lending.begin_pass()
            # FSDP2 gathers a layer's weights for the backward pass when a gradient reaches the layer's output.
            gathers = gradients and (shards_layers(self.base) if self.checks is None else self.checks.gathers)
            whole = width is None or gathers
            run = partial(prefix_forward, self.base, self.plain, inputs)
            shared = partial(run, whole=whole, alike=self.alike, packs=self.packs)
            kind = "training" if gradients else "scoring"
            rows = inputs.get("inputs_embeds") if inputs.get("input_ids") is None else inputs["input_ids"]
            outputs = self.share(kind, rows, partial(self._split, inputs, width), shared, partial(self.plain, **inputs))
            if gradients and self.lending is not None and self.lending.open and is_last_micro_batch():
                outputs.last_hidden_state = self.lending.close_all(outputs.last_hidden_state)
            if gradients and self.first_step is not None and is_last_micro_batch():
                kinds = "; ".join(f"{kind} {counts}" for kind, counts in self.first_step.items())
                print(f"share_prompts, until the end of the first step: {kinds}.", flush=True)
                self.first_step = None
            return outputs

    def _split(self, inputs: dict[str, Any], width: int | None) -> PrefixSplit:
        if self.checks is None or not torch.is_grad_enabled():
            check_model(self.base, torch.is_grad_enabled())
        else:
            require(self.checks.why_not_train is None, str(self.checks.why_not_train))
        check_inputs(inputs, self.base.config)
        stop = inputs["input_ids"].size(1) - 1
        columns = None if width is None else (stop - width, stop)  # the last column emits nothing
        lends = self.lending is not None and torch.is_grad_enabled() and columns is not None and self.agree is None
        lends = lends and inputs.get("attention_mask") is not None and inputs.get("position_ids") is None
        split = find_split(inputs, self.base.config, columns, alone=lends or self.agree is not None)
        require(not split.behind or self.agree is None, "images in completions, of sharded models or with DeepSpeed")
        if not lends or self.lending is None:
            return split
        lent = MicroBatch(self.lending, inputs, split, self.again)
        require(lent.lends or split.prompts < split.rows, "no prompt occurs twice")
        return replace(split, lent=lent) if lent.lends else split

    def share(
        self,
        kind: str,
        rows: Any,
        split: Callable[[], PrefixSplit],
        shared: Callable[[PrefixSplit], Any],
        plain: Callable[[], Any],
    ) -> Any:
        """Return what `shared` makes of a split, or `plain` where that is not supported or not by all processes.

        Args:
            kind: of call; what the model turns out not to support is not tried again for calls of this kind.
            rows: tensor with one entry per row.
        """
        found, reason = None, self.refused.get(kind, "")
        try:
            found = None if reason else split()
        except UnsupportedModel as error:
            reason = str(error)
        if self.agree is not None:
            if not self.agree(found is not None):
                found, reason = None, reason or "another process cannot share this batch"
            elif found is not None and self.agree(found.prompts == found.rows):
                found, reason = None, "no prompt occurs twice"
        if found is not None:
            try:
                outputs = shared(found)
            except UnsupportedModel as error:
                self.refused[kind] = reason = str(error)
            else:
                self._count(kind, found.rows, found.computed)
                if self.warns and has_active_dropout(self.base):
                    warnings.warn("The completions of a prompt share its dropout, or noise of routers.", stacklevel=2)
                    self.warns = False
                return outputs
        count = len(rows) if isinstance(rows, Tensor) else 0
        self._count(kind, count, count, [reason])
        return plain()

    def _count(self, kind: str, *counts: Any) -> None:
        self.report.add(*counts, trains=self.base.training)
        if self.first_step is not None:
            self.first_step.setdefault(kind, SharingReport()).add(*counts)


class SharedPasses:
    """Shares prompts in the passes of a run.

    Args:
        agree: as `SharedForward` takes it.
        sharded: whether parameters are.
        in_order: whether gradients are added up in the order in which they come, which has to be that of all processes.
        evens_images: whether the caller lets the vision tower run in every process if it does in one.
    """

    def __init__(self, agree: Callable[[bool], bool], *, sharded: bool, in_order: bool, evens_images: bool) -> None:
        self._agree, self._sharded, self._in_order = agree, sharded, in_order
        self._refuses_uneven = sharded and not evens_images
        self._report = SharingReport()
        self.lending: Lending | None = None  # of the model that is trained
        self._checks: WeakKeyDictionary[nn.Module, ModelChecks] = WeakKeyDictionary()

    def reset(self) -> None:
        """Forget the prompts of a training that was interrupted, and how models are wrapped."""
        if self.lending is not None:
            self.lending.clear()
        self._checks.clear()

    @contextmanager
    def around(
        self,
        feature: Feature,
        model: nn.Module,
        completion_length: int | None = None,
        *,
        packs: bool = False,
        counts: bool = True,
        again: Sequence[bool] | None = None,
    ) -> Iterator[None]:
        """Share prompts in passes of this block, if the feature is on.

        Args:
            model: as `share_prompts` takes it.
            completion_length: T of a scored batch; None where the model generates.
            packs: as `SharedForward` takes it.
            counts: whether `metrics` counts these passes.
            again: as `SharedForward` takes it; None: no prompt is lent to several micro-batches.
        """
        refuses = self._refuses_uneven
        if not feature.enabled:
            with ignore_empty_images(model, agree=self._agree if refuses and completion_length else None):
                yield
            return
        agree = self._agree if self._sharded or (self._in_order and torch.is_grad_enabled()) else None
        modes: dict[str, Any] = {"agree": agree, "sharded": refuses, "packs": packs}
        lending = None if again is None else self.lending
        checks = self._checks.get(model) or self._checks.setdefault(model, ModelChecks(model))
        with share_prompts(model, completion_length, **modes, lending=lending, again=again, checks=checks) as report:
            yield
        if counts:
            self._report.add(report.rows, report.prompts)

    def metrics(self) -> dict[str, float]:
        """Return what was shared since the last call."""
        report, self._report = self._report, SharingReport()
        return {"sharing/prompts_per_row": report.prompts_per_row} if report.rows else {}


def whole_groups(batch_size: int, num_generations: int) -> int:
    """The smallest multiple of `num_generations` that is at least `batch_size`: rows of a pass without gradients."""
    return -(-batch_size // num_generations) * num_generations


_OPTIONS = {*GenerationConfig().to_dict(), "generation_config"}  # of `generate`
ROOM = 128  # tokens for which there is room before the next copy
_CACHE_LENGTHS = 256  # tokens, of which the lengths of static caches are multiples


class GrowingLayer(DynamicLayer):
    """Keys and values of some rows of a filled layer, to which tokens are added; for `generate` without beams.

    Args:
        filled: the other layer.
        index: (N,) row -> row of the other layer.
    """

    keys: Any
    values: Any

    def __init__(self, filled: Any, index: Tensor) -> None:
        super().__init__()
        self.dtype, self.device, self.is_initialized = filled.dtype, filled.device, True
        filled.reorder_cache(index)
        self._longer = [_grow_buffer(filled.keys), _grow_buffer(filled.values)]
        self._show(filled.get_seq_length())

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        start = self.get_seq_length()
        stop = start + key_states.size(-2)
        if stop > self._longer[0].size(-2):
            self._longer = [_grow_buffer(each, key_states.size(-2)) for each in (self.keys, self.values)]
        for longer, new in zip(self._longer, (key_states, value_states), strict=True):
            longer[:, :, start:stop] = new
        self._show(stop)
        return self.keys, self.values

    def _show(self, length: int) -> None:
        self.keys, self.values = (longer[:, :, :length] for longer in self._longer)


def _grow_buffer(filled: Tensor, at_least: int = 0) -> Tensor:
    """Return a tensor that begins with (N, H, S, D), and has more tokens."""
    rows, heads, length, width = filled.shape
    longer = filled.new_empty(rows, heads, length + max(at_least, ROOM), width)
    longer[:, :, :length] = filled
    return longer


def grow_in_place(cache: Cache, index: Tensor) -> None:
    """Give a filled cache rows `index`, (N,), of its own, with room behind them in layers that keep all tokens."""
    for number, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer and layer.is_initialized:
            cache.layers[number] = GrowingLayer(layer, index)
        else:
            layer.reorder_cache(index)  # type: ignore[arg-type]  # a LongTensor, which no tensor is for mypy


def why_not_static(config: Any) -> str | None:
    """Return why a model with this config generates with a static cache without shared prompts; None: with them."""
    if not all(type(layer) is DynamicLayer for layer in DynamicCache(config=config).layers):
        return "a static cache of layers that see a window, or keep a state"
    return None if hasattr(StaticLayer(1), "cumulative_length") else "a static cache of a transformers before 5.17"


class SharedGeneration:
    """A model's `generate` that computes equal prompts once, and runs plainly where that is not exact.

    Args:
        model: transformers model with a head.
        plain: its `generate`.
        forward: the shared forward pass of its base model, which is paused meanwhile.
    """

    def __init__(self, model: Any, plain: Callable[..., Any], forward: SharedForward) -> None:
        self.model, self.plain, self.forward = model, plain, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        kwargs = drop_empty_images(kwargs, self.forward.agree_on_images)
        inputs = dict(kwargs)
        ids = [*args, *(inputs.pop(name) for name in ("inputs", "input_ids") if name in inputs)]
        inputs["input_ids"] = ids[0] if len(ids) == 1 else None
        plain = partial(self.plain, *args, **kwargs)
        with self.forward.lock, replaced((self.forward, "paused", True)):
            split, generate = partial(self._split, inputs), partial(self._generate, inputs)
            return self.forward.share("generation", inputs["input_ids"], split, generate, plain)

    def _split(self, inputs: dict[str, Any]) -> PrefixSplit:
        """Prompts without their last tokens, which begin the completions."""
        plain_generate = getattr(self.plain, "__func__", None) is GenerationMixin.generate
        require(plain_generate, "a generate method of its own")
        check_model(self.forward.base, gradients=False)
        require(not is_checkpointed(self.model), "generate with gradient checkpointing on")
        starts_anew = inputs.get("past_key_values") is None and inputs.get("inputs_embeds") is None
        require(starts_anew, "generate from a cache or from embeddings")
        for name, value in inputs.items():
            per_row = isinstance(value, Tensor) and value.ndim and name not in (*PER_TOKEN, *IMAGE_INPUTS)
            alone = name in ("assistant_model", "custom_generate") and value is not None
            require(not (per_row or alone), f"the input {name}")
        copies = self._check_config(self._config_of(inputs))
        ids, mask = inputs["input_ids"], inputs.get("attention_mask")
        require(isinstance(ids, Tensor) and ids.ndim == 2, "no prompt before the completions")
        require(mask is not None and mask.shape == ids.shape, "generate without an attention mask")
        check_token_types(inputs, self.model.config)
        alone = copies > 1 or self.forward.agree is not None
        split = find_split(inputs, self.model.config, (ids.size(1) - 1, ids.size(1)), alone=alone)
        return replace(split, copies=copies)

    def _config_of(self, inputs: dict[str, Any]) -> GenerationConfig:
        given = {name: value for name, value in inputs.items() if name in _OPTIONS}
        config: GenerationConfig
        config, _ = self.model._prepare_generation_config(given.pop("generation_config", None), **given)
        return config

    def _check_config(self, config: GenerationConfig) -> int:
        """Raise `UnsupportedModel` unless `generate` samples token by token; completions per input row."""
        modes = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
        require(config.get_generation_mode(None) in modes, "generate with beams or an assistant")
        known = config.use_cache and config.cache_implementation in (None, "static")
        require(known, "generate without a growing or a static cache")
        if config.cache_implementation == "static" and (reason := why_not_static(self.model.config)):
            raise UnsupportedModel(reason)
        require(config.prefill_chunk_size is None, "prefill_chunk_size")
        require(not config.output_hidden_states, "output_hidden_states=True")
        return config.num_return_sequences or 1

    def _generate(self, inputs: dict[str, Any], split: PrefixSplit) -> Any:
        """Generate from the prompts in a cache: the images are in it, and must not be given again."""
        cache: Cache = self._prefill(inputs, split)
        inputs = {name: value for name, value in inputs.items() if name not in IMAGE_INPUTS}
        if split.copies > 1:
            tokens = {name: inputs[name] for name in PER_TOKEN if inputs.get(name) is not None}
            inputs |= {name: value.repeat_interleave(split.copies, dim=0) for name, value in tokens.items()}
            inputs["num_return_sequences"] = 1
        config = self._config_of(inputs)
        if config.cache_implementation is None:
            return self._continue(cache, inputs)
        inputs = {name: value for name, value in inputs.items() if name not in _OPTIONS}
        cache, config.cache_implementation = self._fixed(cache, inputs["input_ids"], config), None
        for longer, new in (("max_length", config.max_new_tokens), ("min_length", config.min_new_tokens)):
            if new is not None:  # transformers has filled in its default, and would warn of two lengths
                setattr(config, longer, None)
        base, shared = self.forward.base, vars(self.forward.base)["forward"]
        of_class = getattr(self.forward.plain, "__func__", None) is type(base).forward
        # Whatever stands in the place of the class's method is another object in each block, and compiled again.
        if of_class:
            del base.forward
        try:
            return self._continue(cache, inputs | {"generation_config": config})
        finally:
            base.forward = shared

    def _continue(self, cache: Cache, inputs: dict[str, Any]) -> Any:
        # Beside a cache transformers takes no kind of cache, which it would fill in from the model's own defaults.
        with patched_attribute(self.model.generation_config, "cache_implementation", None):
            return self.plain(**inputs, past_key_values=cache)

    def _fixed(self, filled: Any, ids: Tensor, config: GenerationConfig) -> Any:
        """Return a static cache that begins with what a cache of as many rows holds, with room for all new tokens."""
        longest = config.max_length if config.max_new_tokens is None else ids.size(1) + config.max_new_tokens
        # A cache as long as the one before is not compiled for again, which takes half a minute for a 7B.
        longest += -longest % _CACHE_LENGTHS
        longest = max(longest, getattr(self.model, "_previous_max_cache_length", 0))
        self.model._previous_max_cache_length = longest
        cache: Any = StaticCache(config=self.model.config.get_text_config(decoder=True), max_cache_len=longest)
        for layer, of_prompt in zip(cache.layers, filled.layers, strict=True):
            layer.update(of_prompt.keys, of_prompt.values)
        return cache

    def _prefill(self, inputs: dict[str, Any], split: PrefixSplit) -> DynamicCache:
        """The cache of all rows to be generated, after all tokens of their prompts but the last."""
        others = {"synced_gpus": inputs["synced_gpus"]} if "synced_gpus" in inputs else {}
        cache = DynamicCache(config=self.model.config)
        # One greedy step draws no random numbers, and prepares positions and masks as the family's own generate does.
        # Whatever it leaves out it would take from the model's own defaults, which are for completions.
        greedy = {"do_sample": False, "num_beams": 1, "temperature": 1.0, "top_p": 1.0, "top_k": 50}
        step = GenerationConfig(max_new_tokens=1, num_return_sequences=1, return_dict_in_generate=True, **greedy)
        with torch.no_grad():
            self._continue(cache, {**split.prompt_inputs(inputs), **others, "generation_config": step})
        whole = cache.get_seq_length() == split.start
        require(whole, "the model did not keep the whole prompt in its cache")
        index = on_device(split.groups, inputs["input_ids"].device).repeat_interleave(split.copies)  # (N * copies,)
        grow_in_place(cache, index)
        base = self.forward.base
        if getattr(base, "rope_deltas", None) is not None:
            base.rope_deltas = base.rope_deltas.index_select(0, index.to(base.rope_deltas.device))  # (N, 1)
        return cache
