"""What is around every pass of a run: prompts and image features computed once, and what is read off beside."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
from accelerate import Accelerator
from torch import nn

from vgr_trl.sharing import Place, SharedPasses, SharingPlan
from vgr_trl.sharing.backbone import base_of, causal_model, is_compiled
from vgr_trl.signals.head import leaves_rows_out
from vgr_trl.skipping import VisionCache, only_tokens
from vgr_trl.training.passes.blank_image import BlankImage
from vgr_trl.training.passes.emitted import EmittedReader


class Passes:
    """The passes of a run, as its plans say.

    Args:
        blank: for processes without images among others; None where there are none.
    """

    def __init__(
        self, sharing: SharingPlan, vision: VisionCache, accelerator: Accelerator, blank: BlankImage | None = None
    ) -> None:
        self.vision = vision
        self._blank = blank
        self._shared = SharedPasses(sharing, partial(_all_agree, accelerator), evens_images=blank is not None)
        self.values = EmittedReader(reads=lambda model: False)  # of a critic's head, where there is one
        self.hidden = EmittedReader(reads=lambda model: False)  # for what compares whole distributions

    @contextmanager
    def around(
        self, place: Place, model: nn.Module, completion_length: int | None = None, *, packs: bool = False
    ) -> Iterator[None]:
        """Leave out of passes of this block what can be; the arguments are those of `SharedPasses.around`."""
        values, hidden = (reader.around(model, completion_length) for reader in (self.values, self.hidden))
        scores = completion_length is not None and not torch.is_grad_enabled()
        head = _head_without_padding(model) if scores else nullcontext()
        tower = nullcontext() if self._blank is None else self._blank.around(model, completion_length is None)
        shared = self._shared.around(place, model, completion_length, packs=packs)
        with self.vision.around(model), head, shared, values, hidden, tower:
            yield

    def metrics(self) -> dict[str, float]:
        """Return what was left out since the last call."""
        return self._shared.metrics() | self.vision.metrics()


def _all_agree(accelerator: Accelerator, shares: bool) -> bool:
    return bool(accelerator.gather(torch.tensor([shares], device=accelerator.device)).all())


def _head_without_padding(model: nn.Module) -> AbstractContextManager[None]:
    """TRL's head scores padding too where it has no Triton; a head of some rows wants whole ones."""
    causal = causal_model(model)
    base = base_of(causal)
    if base is causal or is_compiled(model) or leaves_rows_out(model):
        return nullcontext()
    return only_tokens(causal, base, None)
