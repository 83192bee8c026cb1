"""Signs that a run is collapsing, in the courses of what it logs: watched for in training, shown by the report."""

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from statistics import mean
from typing import NamedTuple

from vgr_trl.reporting.records.record import LogEntry

WINDOW = 8  # steps whose mean is compared with the means of earlier ones

_WATCHED = {"completions/mean_length", "completions/clipped_ratio", "entropy", "frac_reward_zero_std"}
_SMALLEST_RATE = 0.1  # of right or well-formed answers, below which a fall says nothing


class Sign(NamedTuple):
    """What was seen, and what may help; `kind` is the same for the same sign at another step."""

    kind: str
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
                "equal rewards",
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
            signs.append(
                Sign(sign.kind, f"{sign.seen} while it is {share:.0%} of the rewards' deviation", sign.remedies)
            )
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
                "clipped",
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
        return [Sign("entropy rose", seen, ("a lower learning_rate", "use_entropy_penalty"))]
    return []


def _fall(what: str, course: Course, *remedies: str) -> Sign:
    return Sign(what, f"{what} fell from {course.highest:.3g} to {course.now:.3g}", remedies)


def describe(signs: Sequence[Sign], step: int) -> str:
    """Return the one sentence of the warning."""
    remedies = ", or ".join(dict.fromkeys(remedy for sign in signs for remedy in sign.remedies))
    return (
        f"The run shows signs of collapse at step {step}: {', '.join(sign.seen for sign in signs)} (means of {WINDOW} "
        f"steps); go back to a checkpoint before step {max(step - 2 * WINDOW, 0)} and try {remedies}."
    )


def first_signs(entries: Iterable[LogEntry]) -> list[tuple[int, str]]:
    """Return the signs of collapse in what a run has logged in training, each with the step at which it is first seen.

    Beside those of `find_signs`, with logged values in the place of steps: a loss or gradient that is not finite.

    Args:
        entries: in the order of their steps; weights of rewards are those that were logged, else 1.
    """
    courses: dict[str, Course] = {}
    weights: dict[str, float] = {}
    found: dict[str, tuple[int, str]] = {}
    for entry in entries:
        if entry.mode != "train":
            continue
        for name, value in entry.values.items():
            if name in ("loss", "grad_norm") and (value is None or not math.isfinite(value)):
                found.setdefault(name, (entry.step, f"{name} is not finite"))
            if value is None or not math.isfinite(value):
                continue
            if name in _WATCHED or name.startswith("rewards/"):
                courses.setdefault(name, Course()).add(value)
                if name.startswith("rewards/"):
                    weights.setdefault(name.split("/")[1], 1.0)
            elif name.startswith("reward_weights/"):
                weights[name.removeprefix("reward_weights/")] = value
        for sign in find_signs(courses, weights):
            found.setdefault(sign.kind, (entry.step, sign.seen))
    return sorted(found.values())
