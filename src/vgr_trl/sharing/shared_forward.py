"""A base model's forward pass that computes equal prompts once, and ignores empty pixel inputs."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from inspect import signature
from threading import RLock
from typing import Any

import torch
from torch import Tensor, nn

from vgr_trl.errors import DataError
from vgr_trl.pixels import IMAGE_INPUTS
from vgr_trl.sharing.exactness import why_not_share
from vgr_trl.sharing.lending import Lending, MicroBatch, is_last_micro_batch
from vgr_trl.sharing.model_support import (
    base_of,
    cache_of,
    causal_model,
    check_model,
    has_active_dropout,
    has_sharded_parameters,
    is_compiled,
    shards_layers,
    why_no_pass_shares,
)
from vgr_trl.sharing.prefix_forward import prefix_forward
from vgr_trl.sharing.prefix_split import PrefixSplit, check_inputs, find_split
from vgr_trl.sharing.report import SharingReport, UnsupportedModel, require, why_unsupported


class ModelChecks:
    """Answers about the thousands of modules of a model, valid while its wrappers stay the same.

    Args:
        model: transformers model, also wrapped.

    Attributes:
        reason: why no pass shares prompts; None: it depends on the pass.
        gathers: whether FSDP2 shards the model.
    """

    def __init__(self, model: nn.Module) -> None:
        # The probe would run a sharded model without its wrapper.
        sharded = has_sharded_parameters(model)
        self.reason = why_no_pass_shares(model) if sharded else why_not_share(model, gradients=False)
        self._base = base_of(causal_model(model))
        self.gathers = shards_layers(self._base)

    @cached_property
    def why_not_train(self) -> str | None:
        """Why no pass with gradients shares prompts; None: it depends on the pass."""
        return why_unsupported(check_model, self._base, True)


@dataclass(eq=False)
class SharedForward:
    """A base model's forward pass that computes equal prompts once where that is exact.

    Args:
        base: base model (without head) of a transformers model.
        plain: its forward pass.
        report: counts all calls.
        completion_length: T, if every batch has P + T columns of prompt and completion; None: the longest common
            beginnings of the rows are shared.
        agree: returns whether an answer is True in all processes. They have to share a batch together: with sharded
            parameters they run equally many passes, and DeepSpeed reduces gradients in the order of arrival.
            None: each process decides alone.
        sharded: whether parameters are sharded; a pass with images in some processes only is refused then.
        packs: whether completions of a given length run behind their prompts as one row without padding, for models
            without a reason in `why_not_pack`.
        lending: prompts lent to several micro-batches with gradients; None: no prompt is lent.
        again: (N,) whether a later micro-batch of the optimizer step reads the prompt of a row; None: unknown.
        checks: of the model; None: every pass checks anew.

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
    sharded: bool = True
    packs: bool = False
    lending: Lending | None = None
    again: Sequence[bool] | None = None
    checks: ModelChecks | None = None
    first_step: dict[str, SharingReport] | None = None
    labelled: int | None = None
    paused: bool = False
    refused: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.alike = self.sharded and self.agree is not None
        self.warns = self.checks is None  # of dropout, once; `DAPOTrainer` warns at the start of a run
        self.names = list(signature(self.plain).parameters)
        self.agree_on_images = self.agree if self.sharded and "pixel_values" in self.names else None
        self.lock = RLock()  # the model keeps the offsets of one batch at a time

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.plain(*args, **kwargs)
        with self.lock:
            width, self.labelled = self.completion_length or self.labelled, None  # labels belong to one call
            if self.paused:
                return self.plain(*args, **kwargs)
            inputs = drop_empty_images(dict(zip(self.names, args, strict=False)) | kwargs, self.agree_on_images)
            if inputs.get("use_cache") or cache_of(inputs) is not None:
                return self.plain(**inputs)
            gradients = torch.is_grad_enabled()
            if gradients and self.lending is not None:
                self.lending.begin_pass()
            # FSDP2 gathers a layer's weights when a gradient reaches the layer's output, so all outputs are needed.
            gathers = gradients and (shards_layers(self.base) if self.checks is None else self.checks.gathers)
            modes: dict[str, Any] = {"whole": width is None or gathers, "alike": self.alike, "packs": self.packs}
            shared = partial(prefix_forward, self.base, self.plain, inputs, **modes)
            kind = "training" if gradients else "scoring"
            rows = inputs.get("inputs_embeds") if inputs.get("input_ids") is None else inputs["input_ids"]
            outputs = self.share(kind, rows, partial(self._split, inputs, width), shared, partial(self.plain, **inputs))
            if gradients and is_last_micro_batch():
                self._finish_step(outputs)
            return outputs

    def _finish_step(self, outputs: Any) -> None:
        """Close open prompts in the last micro-batch of an optimizer step, and print the counts of the first step."""
        if self.lending is not None and self.lending.open:
            outputs.last_hidden_state = self.lending.close_all(outputs.last_hidden_state)
        if self.first_step is not None:
            kinds = "; ".join(f"{kind} {counts}" for kind, counts in self.first_step.items())
            print(f"share_prompts, until the end of the first step: {kinds}.", flush=True)
            self.first_step = None

    def _split(self, inputs: dict[str, Any], width: int | None) -> PrefixSplit:
        """Split a batch, and lend its prompts to other micro-batches where that is possible."""
        if self.checks is None or not torch.is_grad_enabled():
            check_model(self.base, torch.is_grad_enabled())
        else:
            require(self.checks.why_not_train is None, str(self.checks.why_not_train))
        check_inputs(inputs, self.base.config)
        stop = inputs["input_ids"].size(1) - 1
        columns = None if width is None else (stop - width, stop)  # the last column emits no token
        unset = width is None and inputs.get("use_cache") is None and not self.base.training  # may decode next
        require(not (unset and self.base.config.get_text_config(decoder=True).use_cache), "use_cache is not False")
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
        """Share prompts, or fall back to the plain call if this or another process cannot.

        Args:
            kind: of call; after a failure no call of this kind shares prompts.
            rows: tensor with one entry per row.
            split: splits the batch, or raises `UnsupportedModel`.
            shared: runs a split batch, or raises `UnsupportedModel`.
            plain: runs the batch without sharing.
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


def has_images(inputs: Mapping[str, Any]) -> bool:
    """Whether the pixel inputs of a pass hold an image; Idefics pads rows without an image."""
    pixels, mask = inputs.get("pixel_values"), inputs.get("pixel_attention_mask")
    return pixels is not None and len(pixels) > 0 and (mask is None or bool(mask.any()))


def drop_empty_images(inputs: Mapping[str, Any], agree: Callable[[bool], bool] | None = None) -> dict[str, Any]:
    """Return the inputs of a pass, without pixel inputs that hold no image.

    TRL cuts a batch into chunks. A chunk of rows without images has empty pixels, or padding, on which models fail.

    Args:
        inputs: of the pass, by name.
        agree: returns whether an answer is True in all processes, where parameters are sharded: the vision tower then
            runs in every process or in none. None: each process decides alone.

    Raises:
        DataError: only some processes have images; it is raised in all processes.
    """
    mine = has_images(inputs)
    if agree is not None and not agree(mine) and not agree(not mine):
        has = f"A batch of this process has {'images' if mine else 'no images'}, unlike a batch of another process"
        raise DataError(f"{has}, and the parameters are sharded: give every row images, or none, or use ZeRO-2 or DDP.")
    empty = inputs.get("pixel_values") is not None and not mine
    return {name: value for name, value in inputs.items() if not (empty and name in IMAGE_INPUTS)}


@contextmanager
def ignore_empty_images(model: nn.Module, *, agree: Callable[[bool], bool] | None = None) -> Iterator[None]:
    """Drop pixel inputs without images in passes of this block; `share_prompts` does so by itself.

    Args:
        model: transformers model, also wrapped; a compiled model keeps its inputs.
        agree: returns whether an answer is True in all processes, where parameters are sharded.

    Raises:
        ConfigError: `model` is no transformers model.
    """
    base = base_of(causal_model(model))
    agree = agree if "pixel_values" in signature(base.forward).parameters else None
    drops = partial(_drop_from_call, agree)
    with nullcontext() if is_compiled(model) else base.register_forward_pre_hook(drops, with_kwargs=True):
        yield


def _drop_from_call(agree: Any, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return args, drop_empty_images(kwargs, agree)  # a function of this module, so that the model can be pickled
