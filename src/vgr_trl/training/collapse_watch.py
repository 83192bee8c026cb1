"""Signs that a run is collapsing, looked for after every step of training."""

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import islice
from statistics import mean
from typing import Any, NamedTuple

from transformers import TrainerCallback
from transformers.utils import logging

from vgr_trl.credit import collapse_warning
from vgr_trl.training.host import Host

logger = logging.get_logger(__name__)

WINDOW = 8  # steps whose mean is compared with the means of earlier ones
PERCEPTION_HISTORY = 40  # steps in which signs of a perception loss that is won by breaking the policy are looked for

_SMALLEST_RATE = 0.1  # of right or well-formed answers, below which a fall says nothing


class Sign(NamedTuple):
    """What was seen, and what may help."""

    seen: str
    remedies: tuple[str, ...]


class Course:
    """One metric: the mean of its newest `WINDOW` steps, and the first, lowest and highest such mean before them."""

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=2 * WINDOW)
        self.first: float | None = None
        self.lowest = self.highest = self.now = 0.0

    def add(self, value: float) -> None:
        """Take in the value of one more step."""
        self._values.append(value)
        if len(self._values) < 2 * WINDOW:
            return
        before = mean(islice(self._values, WINDOW))
        self.now = mean(islice(self._values, WINDOW, None))
        if self.first is None:
            self.first = self.lowest = self.highest = before
        self.lowest, self.highest = min(self.lowest, before), max(self.highest, before)


def find_signs(courses: Mapping[str, Course], reward_weights: Mapping[str, float]) -> list[Sign]:
    """Return the signs of collapse in the courses of metrics, by TRL's names for them.

    Args:
        courses: of `rewards/<name>/mean` and `/std`, `completions/mean_length` and `/clipped_ratio`, `entropy`,
            `frac_reward_zero_std`; those of fewer than 2 · `WINDOW` steps are passed over.
        reward_weights: by the names of the reward functions.
    """
    known = {name: course for name, course in courses.items() if course.first is not None}
    signs = [*_rewards_fallen(known, reward_weights), *_length(known), *_entropy(known)]
    dead = known.get("frac_reward_zero_std")
    if dead is not None and dead.now >= 0.95 and dead.lowest < 0.8:
        signs.append(
            Sign(
                f"{dead.now:.0%} of the groups have equal rewards (at least {dead.lowest:.0%} before)",
                ("other questions", "a reward that tells the completions of a prompt apart"),
            )
        )
    return signs


def _rewards_fallen(known: Mapping[str, Course], weights: Mapping[str, float]) -> list[Sign]:
    signs = []
    for name, weight in weights.items():
        course = known.get(f"rewards/{name}/mean")
        if course is None or weight == 0 or course.now >= course.highest / 2:
            continue
        if ("accuracy" in name or "format" in name) and course.highest >= _SMALLEST_RATE:
            rival = ", ".join(other for other in weights if "vgr" in other and weights[other])
            signs.append(_fall(name, course, "a lower learning_rate", *([f"less weight on {rival}"] if rival else [])))
        elif "vgr" in name and (share := _share(known, weights, name)) > 0.5:
            sign = _fall(name, course, f"less weight on {name}", "scale_rewards none")
            signs.append(Sign(f"{sign.seen} while it is {share:.0%} of the rewards' deviation", sign.remedies))
    return signs


def _share(known: Mapping[str, Course], weights: Mapping[str, float], name: str) -> float:
    """Share of a reward's deviation, times its weight, in that of all."""
    spread = {
        other: abs(weight) * known[f"rewards/{other}/std"].now
        for other, weight in weights.items()
        if f"rewards/{other}/std" in known
    }
    return spread.get(name, 0.0) / (sum(spread.values()) or 1.0)


def _length(known: Mapping[str, Course]) -> list[Sign]:
    signs = []
    length, clipped = known.get("completions/mean_length"), known.get("completions/clipped_ratio")
    if length is not None and length.now < length.highest / 4:
        signs.append(_fall("the length of completions", length, "a lower learning_rate"))
    if clipped is not None and clipped.now > 0.9 and clipped.lowest < 0.5:
        signs.append(
            Sign(
                f"{clipped.now:.0%} of the completions never end (at least {clipped.lowest:.0%} before)",
                ("a lower learning_rate", "a length reward"),
            )
        )
    return signs


def _entropy(known: Mapping[str, Course]) -> list[Sign]:
    course = known.get("entropy")
    if course is None or course.first is None:
        return []
    if course.now < 0.005 and course.highest > 0.05:
        return [_fall("entropy", course, "a lower learning_rate", "a higher epsilon_high or temperature")]
    if course.now > max(4 * course.lowest, 2 * course.first, 0.05):
        seen = f"entropy rose from {course.lowest:.3g} to {course.now:.3g}"
        return [Sign(seen, ("a lower learning_rate", "use_entropy_penalty"))]
    return []


def _fall(what: str, course: Course, *remedies: str) -> Sign:
    return Sign(f"{what} fell from {course.highest:.3g} to {course.now:.3g}", remedies)


def describe(signs: Sequence[Sign], step: int) -> str:
    """Return the one sentence of the warning."""
    remedies = ", or ".join(dict.fromkeys(remedy for sign in signs for remedy in sign.remedies))
    return (
        f"The run shows signs of collapse at step {step}: {', '.join(sign.seen for sign in signs)} (means of {WINDOW} "
        f"steps); go back to a checkpoint before step {max(step - 2 * WINDOW, 0)} and try {remedies}."
    )


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
