"""Each prompt of a batch computed once: the prompts first, then all completions behind them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import signature
from threading import RLock
from typing import Any

import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from vgr_trl.sharing.backbone import is_tracing, shards_layers
from vgr_trl.sharing.cut import Cut, constants, find_cut
from vgr_trl.sharing.fitness import refuse_unfit_model
from vgr_trl.sharing.image_inputs import images_as_tensors, without_empty_images
from vgr_trl.sharing.prefix_cache import check_read, check_written, prefix_to_read, prefix_to_write
from vgr_trl.sharing.report import CannotShare, SharingReport


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
    """

    def __init__(
        self,
        base: Any,
        plain: Callable[..., Any],
        report: SharingReport,
        completion_length: int | None,
        agree: Callable[[bool], bool] | None,
        sharded: bool = True,
    ) -> None:
        self.base, self.plain, self.report = base, plain, report
        self.completion_length, self.agree = completion_length, agree
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
            cut = find_cut(given, self.base.config, self.completion_length, alone=self.agree is not None)
        except CannotShare as error:
            reason = str(error)
        all_can = self.all_agree(cut is not None)
        if cut is not None and not all_can:
            cut, reason = None, "another process cannot share this batch"
        elif cut is not None and self.agree is not None and self.agree(cut.prompts == len(cut.groups)):
            cut, reason = None, "no prompt occurs twice"
        if cut is not None:
            try:
                outputs = self._two_stages(given, cut)
            except CannotShare as error:
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

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Run plainly for the duration, uncounted: `generate` makes its own arrangements."""
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before

    def refuse_unfit_model(self, gradients: bool) -> None:
        """Raise `CannotShare` if the model, in its present state, cannot go on from a prompt computed before."""
        if "past_key_values" not in self.names:
            raise CannotShare("a model without a cache of keys and values")
        refuse_unfit_model(self.base, gradients)

    def _refuse_what_was_found_unfit(self) -> None:
        if (gradients := torch.is_grad_enabled()) in self.refused:
            raise CannotShare(self.refused[gradients])

    def _two_stages(self, inputs: dict[str, Any], cut: Cut) -> Any:
        """Prompts, then the rest of every row behind its prompt; the outputs for all rows and columns."""
        ids, mask = inputs["input_ids"], inputs.get("attention_mask")
        index = torch.tensor(cut.groups, device=ids.device)  # (N,)
        common = {**constants(inputs), "use_cache": False, "return_dict": True}
        common.pop("logits_to_keep", None)  # Gemma 4 would keep that many of each stage
        prefix = prefix_to_write(self.base.config)
        prefix.groups = cut.groups
        with _cache_through_checkpoints(self.base), _own_offsets(self.base) as offsets:
            prompts = self.plain(**common, **cut.prompt_inputs(inputs), past_key_values=prefix)
            if not hasattr(prompts, "last_hidden_state"):
                raise CannotShare("a model that does not return its last hidden states")
            check_written(prefix, cut.split, prompts.last_hidden_state)
            offsets.expand(index)
            behind = prefix_to_read(prefix, index)
            rest = self.plain(
                **common,
                input_ids=ids[:, cut.split : cut.stop],
                attention_mask=None if mask is None else mask[:, : cut.stop],
                position_ids=_positions(inputs, cut, offsets),
                past_key_values=behind,
            )
            check_read(behind)
        hidden = rest.last_hidden_state  # (N, stop - split, D)
        # FSDP2 gathers a layer's weights when a gradient reaches its output: there the outputs of prompts are kept too.
        if self.completion_length is None or (torch.is_grad_enabled() and shards_layers(self.base)):
            hidden = torch.cat([prompts.last_hidden_state.index_select(0, index), hidden], dim=1)
        missing = (ids.size(1) - cut.stop, cut.stop - hidden.size(1))  # columns behind, columns before
        hidden = torch.nn.functional.pad(hidden, (0, 0, missing[1], missing[0]))
        return type(rest)(last_hidden_state=hidden)  # (N, S, D)


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


def _positions(inputs: dict[str, Any], cut: Cut, offsets: _Offsets) -> torch.Tensor | None:
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
def _cache_through_checkpoints(base: torch.nn.Module) -> Iterator[None]:
    """Let checkpointed layers use a cache: ours is not changed by a recomputation."""
    layers = [module for module in base.modules() if isinstance(module, GradientCheckpointingLayer)]
    before = [vars(layer).get("_can_checkpoint_with_cache") for layer in layers]
    for layer in layers:
        layer._can_checkpoint_with_cache = True
    try:
        yield
    finally:
        for layer, value in zip(layers, before, strict=True):
            if value is None:
                del layer._can_checkpoint_with_cache
            else:
                layer._can_checkpoint_with_cache = value
