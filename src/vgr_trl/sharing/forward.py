"""Each prompt of a batch computed once: the prompts first, then all completions behind them."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from inspect import signature
from threading import RLock
from typing import Any

import torch

from vgr_trl.replacing import replaced
from vgr_trl.sharing.backbone import is_tracing, shards_layers
from vgr_trl.sharing.counts import CannotShare, SharingReport
from vgr_trl.sharing.cut import find_cut
from vgr_trl.sharing.fitness import refuse_unfit_model
from vgr_trl.sharing.image_inputs import images_as_tensors, without_empty_images
from vgr_trl.sharing.two_stages import two_stages


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
                passes = {"whole": self._wants_whole(), "alike": self.alike, "packs": self.packs}
                outputs = two_stages(self.base, self.plain, given, cut, **passes)
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

    def pause(self) -> AbstractContextManager[None]:
        """Run plainly for the duration, uncounted: `generate` makes its own arrangements."""
        return replaced(self, "paused", True)

    def refuse_unfit_model(self, gradients: bool) -> None:
        """Raise `CannotShare` if the model, in its present state, cannot go on from a prompt computed before."""
        if "past_key_values" not in self.names:
            raise CannotShare("a model without a cache of keys and values")
        refuse_unfit_model(self.base, gradients)

    def _refuse_what_was_found_unfit(self) -> None:
        if (gradients := torch.is_grad_enabled()) in self.refused:
            raise CannotShare(self.refused[gradients])

    def _wants_whole(self) -> bool:
        """Whether outputs of prompts are wanted; FSDP2 gathers a layer's weights when a gradient reaches its output."""
        return self.completion_length is None or (torch.is_grad_enabled() and shards_layers(self.base))
