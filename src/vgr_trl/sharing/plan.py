"""Where a run computes each prompt once for its completions, where it does not, and why; and doing so, counted."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import nn

from vgr_trl.sharing.generation import SharedGeneration
from vgr_trl.sharing.model_support import base_of, causal_model, is_compiled, why_adapter_reads_whole_rows
from vgr_trl.sharing.prefix_cache import SharingReport
from vgr_trl.sharing.sharing import SharedForward, with_scored_columns, with_unseen_counted, without_empty_images
from vgr_trl.utils import ConfigError, replaced_method

# ---------------------------------------------------------------------------------------------------------------------
# `share_prompts`: prompt sharing around forward, backward and `generate` of one model.


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
            the outputs only those that score completions can be used then: hidden states of prompts and padding are 0,
            and TRL's fused head returns T columns.
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
    reason = "torch.compile" if is_compiled(model) else why_adapter_reads_whole_rows(model)
    if reason is not None:
        report.plain[reason] += 1
        yield report
        return
    base = base_of(causal)
    forward = SharedForward(base, base.forward, report, completion_length, agree, sharded, packs)
    with ExitStack() as stack:
        stack.enter_context(replaced_method(base, "forward", forward))
        if base is not causal:
            head = with_unseen_counted(causal.forward, forward)
            if completion_length is not None:
                head = with_scored_columns(head, base, completion_length, forward.lock)
            stack.enter_context(replaced_method(causal, "forward", head))
        if base is not causal and hasattr(causal, "generate"):
            generate = SharedGeneration(causal, causal.generate, forward, report)
            stack.enter_context(replaced_method(causal, "generate", generate))
        yield report


@contextmanager
def leave_out_empty_images(model: nn.Module, *, agree: Callable[[bool], bool] | None = None) -> Iterator[None]:
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
        return plain(**without_empty_images(dict(zip(names, args, strict=False)) | kwargs, agree))

    with replaced_method(base, "forward", forward):
        yield


@dataclass(frozen=True)
class Place:
    """Generation, scoring or training; `reason_off` is None where prompts are shared."""

    reason_off: str | None

    def __str__(self) -> str:
        return "on" if self.reason_off is None else f"off ({self.reason_off})"


@dataclass(frozen=True)
class SharingPlan:
    """What `share_prompts` comes to in a run; printed as the one line that says so."""

    mode: str
    generation: Place
    scoring: Place
    training: Place
    regroup_reason: str | None
    regroups: bool
    sharded: bool
    dropout: bool
    in_order: bool = False  # gradients are added up in the order in which they come, which has to be that of all

    def __str__(self) -> str:
        if self.mode == "off":
            return "share_prompts=off"
        together = "kept together" if self.regroups else f"shuffled ({self.regroup_reason or 'training is off'})"
        changed = f", although {self.regroup_reason}" if self.regroups and self.regroup_reason else ""
        return (
            f"share_prompts={self.mode}: generation {self.generation}, scoring {self.scoring}, training "
            f"{self.training}; completions of a prompt {together}{changed}"
            + (
                "; with dropout or noise in routers, the completions of a prompt share what is drawn over it"
                if self.dropout
                else ""
            )
        )


class SharedPasses:
    """Shares prompts where a plan says so.

    Args:
        plan: of the run.
        agree: as `share_prompts` takes it.
        evens_images: whether the caller lets the vision tower run in every process if it does in one.
    """

    def __init__(self, plan: SharingPlan, agree: Callable[[bool], bool], evens_images: bool = False) -> None:
        self.plan, self._agree = plan, agree
        self._refuses_uneven = plan.sharded and not evens_images
        self._report = SharingReport()

    @contextmanager
    def around(
        self, place: Place, model: nn.Module, completion_length: int | None = None, *, packs: bool = False
    ) -> Iterator[None]:
        """Share prompts in passes of this block.

        Args:
            place: of the plan.
            model: as `share_prompts` takes it.
            completion_length: T of a scored batch; None where the model generates.
            packs: as `share_prompts` takes it.
        """
        refuses = self._refuses_uneven
        if place.reason_off is not None:
            generates = completion_length is None
            with leave_out_empty_images(model, agree=self._agree if refuses and not generates else None):
                yield
            return
        alike = self.plan.sharded or (self.plan.in_order and torch.is_grad_enabled())
        agree = self._agree if alike else None
        with share_prompts(model, completion_length, agree=agree, sharded=refuses, packs=packs) as report:
            yield
        self._report.add(report)

    def metrics(self) -> dict[str, float]:
        """Return what was shared since the last call."""
        report, self._report = self._report, SharingReport()
        return {"sharing/prompts_per_row": report.prompts_per_row} if report.rows else {}
