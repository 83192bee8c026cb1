"""Where a run computes each prompt once for its completions, where it does not, and why; and doing so, counted."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from vgr_trl.sharing.context import leave_out_empty_images, share_prompts
from vgr_trl.sharing.counts import SharingReport


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
