"""What is around every pass of a run: prompts computed once, image features computed once."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from vgr_trl.sharing import Place, SharedPasses, SharingPlan
from vgr_trl.skipping import VisionOnce, VisionPlan


class Passes:
    """The passes of a run, as its plans say.

    Args:
        sharing: where prompts are computed once.
        vision: where image features are.
        agree: as `share_prompts` takes it.
    """

    def __init__(self, sharing: SharingPlan, vision: VisionPlan, agree: Callable[[bool], bool]) -> None:
        self.vision = VisionOnce(vision)
        self._shared = SharedPasses(sharing, agree)

    @contextmanager
    def around(self, place: Place, model: Any, completion_length: int | None = None) -> Iterator[None]:
        """Leave out of passes of this block what can be; the arguments are those of `SharedPasses.around`."""
        with self.vision.around(model), self._shared.around(place, model, completion_length):
            yield

    def rollout(self, trains: bool) -> AbstractContextManager[None]:
        """Around generation and scoring of a rollout, as `VisionOnce.rollout`."""
        return self.vision.rollout(trains)

    def metrics(self) -> dict[str, float]:
        """Return what was left out since the last call."""
        return self._shared.metrics() | self.vision.metrics()
