"""Share prompts in all forward passes of a training run."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from vgr_trl.sharing.context_manager import share_prompts
from vgr_trl.sharing.empty_images import ignore_empty_images
from vgr_trl.sharing.lending import Lending
from vgr_trl.sharing.report import SharingReport
from vgr_trl.sharing.shared_forward import ModelChecks


class SharedPasses:
    """Shares prompts in all forward passes of a training run.

    Args:
        agree: returns whether an answer is True in all processes.
        sharded: whether parameters are sharded.
        in_order: whether gradients are reduced in the order of arrival, which has to be equal in all processes.
        evens_images: whether the caller runs the vision tower in every process if it runs in one.

    Attributes:
        lending: prompts lent to several micro-batches of the trained model; None: no prompt is lent.
    """

    def __init__(self, agree: Callable[[bool], bool], *, sharded: bool, in_order: bool, evens_images: bool) -> None:
        self._agree, self._sharded, self._in_order = agree, sharded, in_order
        self._refuses_uneven = sharded and not evens_images
        self._report = SharingReport()
        self.lending: Lending | None = None
        self._checks: WeakKeyDictionary[nn.Module, ModelChecks] = WeakKeyDictionary()

    def reset(self) -> None:
        """Forget the prompts of an interrupted training, and how models are wrapped."""
        if self.lending is not None:
            self.lending.clear()
        self._checks.clear()

    @contextmanager
    def around(
        self,
        why_not: str | None,
        model: nn.Module,
        completion_length: int | None = None,
        *,
        packs: bool = False,
        counts: bool = True,
        again: Sequence[bool] | None = None,
    ) -> Iterator[None]:
        """Share prompts in passes of this block.

        Args:
            why_not: why no prompts are shared; None: they are.
            model: transformers model, also wrapped.
            completion_length: T of a scored batch; None: the model generates.
            packs: whether completions run as one row without padding.
            counts: whether `metrics` counts these passes.
            again: (N,) whether a later micro-batch of the optimizer step reads the prompt of a row; None: no prompt is
                lent to several micro-batches.
        """
        refuses = self._refuses_uneven
        if why_not is not None:
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
        """Return the prompts computed per row since the last call; empty without passes."""
        report, self._report = self._report, SharingReport()
        return {"sharing/prompts_per_row": report.prompts_per_row} if report.rows else {}


def whole_groups(batch_size: int, num_generations: int) -> int:
    """Round a batch size up to a multiple of `num_generations`, for passes without gradients."""
    return -(-batch_size // num_generations) * num_generations
