"""A base model's forward pass over the row of a batch, and passes without empty pixel inputs."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from threading import RLock
from typing import Any

import torch
from accelerate.state import GradientState
from torch import Tensor, nn
from torch.nn.functional import pad

from vgr_trl.errors import DataError
from vgr_trl.pixels import IMAGE_INPUTS
from vgr_trl.sharing.attention import keep_keys_unrepeated, read_rows
from vgr_trl.sharing.model_support import (
    base_of,
    cache_of,
    causal_model,
    check_model,
    has_active_dropout,
    is_compiled,
)
from vgr_trl.sharing.prefix_split import NOT_TWICE, PrefixSplit, check_inputs, find_split
from vgr_trl.sharing.report import SharingReport, UnsupportedModel, require
from vgr_trl.sharing.row import ROW, Row, lay_out
from vgr_trl.sharing.state_mixers import split_state_mixers


def prepare_rows(base: Any) -> None:
    """Let the token mixers of a base model read the layout of rows, for the whole process."""
    keep_keys_unrepeated()
    read_rows()
    split_state_mixers(base)


def run_row(plain: Callable[..., Any], base: Any, row: Row, call: Mapping[str, Any]) -> Any:
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
    warns: bool = True
    first_step: dict[str, SharingReport] | None = None
    labelled: int | None = None
    paused: bool = False
    refused: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.names = list(signature(self.plain).parameters)
        self.agree_on_images = self.agree if "pixel_values" in self.names else None
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
            kind: of call; after a failure no call of this kind shares prompts.
            rows: tensor with one entry per row.
            split: splits the batch, or raises `UnsupportedModel`.
            shared: runs a split batch, or raises `UnsupportedModel`.
            plain: runs the batch without sharing.
            agree: returns whether an answer is True in all processes, which then share together or not at all; by
                default each process decides alone.
        """
        found, reason = None, self.refused.get(kind, "")
        try:
            found = None if reason else split()
        except UnsupportedModel as error:
            reason = str(error)
        if not agree(found is not None):
            found, reason = None, reason or "another process cannot share this batch"
        elif found is not None and agree(found.prompts == found.rows):
            found, reason = None, NOT_TWICE
        if found is not None:
            try:
                outputs = shared(found)
            except UnsupportedModel as error:
                self.refused[kind] = reason = str(error)
            else:
                self._count(kind, found.rows, found.prompts)
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
