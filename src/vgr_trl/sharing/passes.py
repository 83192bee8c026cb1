"""Prompt sharing around the passes of a run, as its plan says, with counts of what it did."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from vgr_trl.sharing.context import leave_out_empty_images, share_prompts
from vgr_trl.sharing.plan import Place, SharingPlan
from vgr_trl.sharing.report import SharingReport


class SharedPasses:
    """Shares prompts where a plan says so.

    Args:
        plan: of the run.
        agree: as `share_prompts` takes it.
    """

    def __init__(self, plan: SharingPlan, agree: Callable[[bool], bool]) -> None:
        self.plan, self._agree = plan, agree if plan.sharded else None
        self._report = SharingReport()

    @contextmanager
    def around(self, place: Place, model: Any, completion_length: int | None = None) -> Iterator[None]:
        """Share prompts in passes of this block.

        Args:
            place: of the plan.
            model: as `share_prompts` takes it.
            completion_length: T of a scored batch; None where the model generates.
        """
        if place.reason_off is not None:
            generates = completion_length is None
            with leave_out_empty_images(model, agree=None if generates else self._agree):
                yield
            return
        with share_prompts(model, completion_length, agree=self._agree) as report:
            yield
        self._report.add(report)

    def metrics(self) -> dict[str, float]:
        """Return what was shared since the last call."""
        report, self._report = self._report, SharingReport()
        return {"sharing/prompts_per_row": report.prompts_per_row} if report.rows else {}
