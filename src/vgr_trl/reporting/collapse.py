"""Collapse detection: signs in the metrics of a run, watched for in training and shown by the report."""

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from statistics import mean
from typing import NamedTuple

from vgr_trl.reporting.records import LogEntry

WINDOW = 8  # steps whose mean is compared with the means of earlier ones

_WATCHED = {"completions/mean_length", "completions/clipped_ratio", "entropy", "frac_reward_zero_std"}
_SMALLEST_RATE = 0.1  # of right or well-formed answers, below which a fall says nothing


class CollapseSign(NamedTuple):
    """What was seen, and what may help; `kind` is the same for the same sign at another step."""

    kind: str
    seen: str
    remedies: tuple[str, ...]


class MetricHistory:
    """One metric: the mean of its newest `WINDOW` steps, and the first, lowest and highest such mean before them."""

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=2 * WINDOW)
        self.first: float | None = None
        self.lowest = self.highest = self.now = 0.0

    def add(self, value: float) -> None:
        """Add the value of one more step."""
        self._values.append(value)
        if len(self._values) < 2 * WINDOW:
            return
        before = mean(islice(self._values, WINDOW))
        self.now = mean(islice(self._values, WINDOW, None))
        if self.first is None:
            self.first = self.lowest = self.highest = before
        self.lowest, self.highest = min(self.lowest, before), max(self.highest, before)


def find_collapse(histories: Mapping[str, MetricHistory], reward_weights: Mapping[str, float]) -> list[CollapseSign]:
    """Return the signs of collapse in the histories of metrics, by TRL's names for them.

    Args:
        histories: of `rewards/<name>/mean` and `/std`, `completions/mean_length` and `/clipped_ratio`, `entropy`,
            `frac_reward_zero_std`; those of fewer than 2 · `WINDOW` steps do not count.
        reward_weights: by the names of the reward functions.
    """
    known = {name: history for name, history in histories.items() if history.first is not None}
    deviations = {
        name: abs(weight) * known[f"rewards/{name}/std"].now
        for name, weight in reward_weights.items()
        if f"rewards/{name}/std" in known
    }
    rivals = ", ".join(name for name, weight in reward_weights.items() if "vgr" in name and weight)
    signs: list[CollapseSign] = []

    def fell(name: str, history: MetricHistory, *remedies: str, note: str = "") -> None:
        signs.append(CollapseSign(name, f"{name} fell from {history.highest:.3g} to {history.now:.3g}{note}", remedies))

    for name, weight in reward_weights.items():
        reward = known.get(f"rewards/{name}/mean")
        if reward is None or weight == 0 or reward.now >= reward.highest / 2:
            continue
        share = deviations.get(name, 0.0) / (sum(deviations.values()) or 1.0)
        if ("accuracy" in name or "format" in name) and reward.highest >= _SMALLEST_RATE:
            fell(name, reward, "a lower learning_rate", *([f"less weight on {rivals}"] if rivals else []))
        elif "vgr" in name and share > 0.5:
            note = f" while it is {share:.0%} of the rewards' deviation"
            fell(name, reward, f"less weight on {name}", "scale_rewards none", note=note)
    if (length := known.get("completions/mean_length")) and length.now < length.highest / 4:
        fell("the length of completions", length, "a lower learning_rate")
    if (clipped := known.get("completions/clipped_ratio")) and clipped.now > 0.9 and clipped.lowest < 0.5:
        seen = f"{clipped.now:.0%} of the completions never end (at least {clipped.lowest:.0%} before)"
        signs.append(CollapseSign("clipped", seen, ("a lower learning_rate", "a length reward")))
    if (entropy := known.get("entropy")) and entropy.first is not None:
        if entropy.now < 0.005 and entropy.highest > 0.05:
            fell("entropy", entropy, "a lower learning_rate", "a higher epsilon_high or temperature")
        elif entropy.now > max(4 * entropy.lowest, 2 * entropy.first, 0.05):
            seen = f"entropy rose from {entropy.lowest:.3g} to {entropy.now:.3g}"
            signs.append(CollapseSign("entropy rose", seen, ("a lower learning_rate", "use_entropy_penalty")))
    if (equal := known.get("frac_reward_zero_std")) and equal.now >= 0.95 and equal.lowest < 0.8:
        seen = f"{equal.now:.0%} of the groups have equal rewards (at least {equal.lowest:.0%} before)"
        signs.append(CollapseSign("equal rewards", seen, ("other questions", "a reward that differs within a group")))
    return signs


def warning_of(signs: Sequence[CollapseSign], step: int) -> str:
    """Return the one sentence of the warning."""
    remedies = ", or ".join(dict.fromkeys(remedy for sign in signs for remedy in sign.remedies))
    return (
        f"The run shows signs of collapse at step {step}: {', '.join(sign.seen for sign in signs)} (means of {WINDOW} "
        f"steps); go back to a checkpoint before step {max(step - 2 * WINDOW, 0)} and try {remedies}."
    )


def first_signs(entries: Iterable[LogEntry]) -> list[tuple[int, str]]:
    """Return the signs of collapse in what a run has logged in training, each with the step at which it is first seen.

    Beside those of `find_collapse`, with logged values in the place of steps: a loss or gradient that is not finite.

    Args:
        entries: in the order of their steps; weights of rewards are those that were logged, else 1.
    """
    histories: dict[str, MetricHistory] = {}
    weights: dict[str, float] = {}
    found: dict[str, tuple[int, str]] = {}
    for entry in entries:
        if entry.mode != "train":
            continue
        for name, value in entry.values.items():
            if value is None or not math.isfinite(value):
                if name in ("loss", "grad_norm"):
                    found.setdefault(name, (entry.step, f"{name} is not finite"))
            elif name in _WATCHED or name.startswith("rewards/"):
                histories.setdefault(name, MetricHistory()).add(value)
                if name.startswith("rewards/"):
                    weights.setdefault(name.split("/")[1], 1.0)
            elif name.startswith("reward_weights/"):
                weights[name.removeprefix("reward_weights/")] = value
        for sign in find_collapse(histories, weights):
            found.setdefault(sign.kind, (entry.step, sign.seen))
    return sorted(found.values())
