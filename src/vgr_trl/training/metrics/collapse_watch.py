"""Watches for signs that a run is collapsing, after every step of training."""

from collections import deque
from typing import Any

from transformers import TrainerCallback
from transformers.utils import logging

from vgr_trl.credit.collapse import collapse_warning
from vgr_trl.reporting.signs import Course, describe, find_signs
from vgr_trl.training.host import Host

logger = logging.get_logger(__name__)

PERCEPTION_HISTORY = 40  # steps in which signs of a perception loss that is won by breaking the policy are looked for


class CollapseWatch(TrainerCallback):
    """Warns once of the signs of collapse, and ends the training if `stop_on_collapse` is on.

    Attributes:
        found: the sentence of the warning; None while there is none.
    """

    def __init__(self, host: Host) -> None:
        self.found: str | None = None
        self._host = host
        self._courses: dict[str, Course] = {}
        self._perception: deque[dict[str, float]] = deque(maxlen=PERCEPTION_HISTORY)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Read the newest value of every metric, which TRL keeps until it is logged; all processes have the same."""
        if self.found is not None:
            return
        found = self._host.newest_metrics()
        newest = {name: value for name, value in found.items() if value == value}  # NaN: nothing to average
        for name, value in newest.items():
            self._courses.setdefault(name, Course()).add(value)
        weights = dict(zip(self._host.reward_names, self._host.reward_weights.tolist(), strict=True))
        if signs := find_signs(self._courses, weights):
            self.found = describe(signs, state.global_step)
        elif args.perception_loss_weight > 0:
            self._perception.append(newest)
            self.found = collapse_warning(self._perception)
        if self.found is not None:
            if state.is_world_process_zero:
                logger.warning(self.found)
            control.should_training_stop |= args.stop_on_collapse
