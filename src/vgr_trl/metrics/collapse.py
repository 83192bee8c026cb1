"""Find signs of collapse in the history of a run's metrics, and warn of them."""

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from statistics import fmean
from typing import Any, NamedTuple

from transformers import TrainerCallback
from transformers.utils import logging

logger = logging.get_logger(__name__)
ENGINE_BOUND = 0.1  # nats per token; numerics alone put an engine in bfloat16 at about 0.02
WINDOW_STEPS = 8  # the mean of this many steps is compared with earlier means
SMALLEST_RATE = 0.1  # rate of correct or well-formed answers, or another reward; a fall from a lower one is noise
WATCHED = (
    "rewards/", "completions/mean_length", "completions/clipped_ratio", "entropy", "frac_reward_zero_std",
    "perception_loss", "perturbed_entropy", "clip_ratio/high_mean", "cispo_clip_ratio",
)  # fmt: skip


class CollapseSign(NamedTuple):
    """A sign of collapse, with remedies; `kind` is the same for the same sign at another step."""

    kind: str
    seen: str
    remedies: tuple[str, ...]


class MetricHistory:
    """The mean of a metric over its newest `WINDOW_STEPS` steps; the first, lowest and highest of earlier means."""

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=2 * WINDOW_STEPS)
        self.first: float | None = None
        self.lowest, self.highest, self.now = math.inf, -math.inf, 0.0

    def add(self, value: float) -> None:
        """Add the value of one more step."""
        self._values.append(value)
        if len(self._values) == 2 * WINDOW_STEPS:
            before = fmean(islice(self._values, WINDOW_STEPS))
            self.now = fmean(islice(self._values, WINDOW_STEPS, None))
            self.first = before if self.first is None else self.first
            self.lowest, self.highest = min(self.lowest, before), max(self.highest, before)


def find_collapse(histories: Mapping[str, MetricHistory], reward_weights: Mapping[str, float]) -> list[CollapseSign]:
    """Return the signs of collapse in the histories of metrics, named as in TRL.

    Args:
        histories: histories of metrics whose names begin with one of `WATCHED`; histories of fewer than
            2 · `WINDOW_STEPS` steps are skipped.
        reward_weights: weights by the names of the reward functions.
    """
    complete = {name: history for name, history in histories.items() if history.first is not None}
    stds = {name: complete[f"rewards/{name}/std"].now for name in reward_weights if f"rewards/{name}/std" in complete}
    deviations = {name: abs(reward_weights[name]) * std for name, std in stds.items()}
    vgr_rewards = ", ".join(name for name, weight in reward_weights.items() if "vgr" in name and weight)
    slower, signs = "a lower learning_rate", list[CollapseSign]()

    def fell(name: str, history: MetricHistory, *remedies: str, note: str = "") -> None:
        signs.append(CollapseSign(name, f"{name} fell from {history.highest:.3g} to {history.now:.3g}{note}", remedies))

    for name, weight in reward_weights.items():
        reward = complete.get(f"rewards/{name}/mean")
        if reward is None or weight == 0 or reward.highest < SMALLEST_RATE or reward.now >= reward.highest / 2:
            continue
        share = deviations.get(name, 0.0) / (sum(deviations.values()) or 1.0)
        if "accuracy" in name or "format" in name:
            fell(name, reward, slower, *([f"less weight on {vgr_rewards}"] if vgr_rewards else []))
        elif "vgr" in name and share > 0.5:
            note = f" and makes up {share:.0%} of the rewards' deviation"
            fell(name, reward, f"less weight on {name}", "scale_rewards none", note=note)
    if (length := complete.get("completions/mean_length")) and length.now < length.highest / 4:
        fell("the length of completions", length, slower)
    if (clipped := complete.get("completions/clipped_ratio")) and clipped.now > 0.9 and clipped.lowest < 0.5:
        seen = f"{clipped.now:.0%} of the completions are truncated (lowest so far {clipped.lowest:.0%})"
        signs.append(CollapseSign("truncated", seen, (slower, "a length reward")))
    if (entropy := complete.get("entropy")) and entropy.first is not None:
        if entropy.now < 0.005 and entropy.highest > 0.05:
            fell("entropy", entropy, slower, "a higher epsilon_high or temperature")
        elif entropy.now > max(4 * entropy.lowest, 2 * entropy.first, 0.05):
            seen = f"entropy rose from {entropy.lowest:.3g} to {entropy.now:.3g}"
            signs.append(CollapseSign("entropy rose", seen, (slower, "use_entropy_penalty")))
    divergence, perturbed = complete.get("perception_loss"), complete.get("perturbed_entropy")
    if entropy and divergence and perturbed and divergence.now < 2 * min(divergence.lowest, 0.0):
        ratio = complete.get("clip_ratio/high_mean") or complete.get("cispo_clip_ratio")
        rising = [entropy, perturbed, *([ratio] if ratio and ratio.highest + ratio.now > 0 else [])]
        if all(rise.now > rise.highest for rise in rising):  # PAPO's sign (https://huggingface.co/papers/2507.06448)
            seen = f"the perception loss fell from {divergence.lowest:.3g} to {divergence.now:.3g} while entropies rose"
            remedies = ("a lower perception_loss_weight", "higher weights for both entropy terms")
            signs.append(CollapseSign("perception", seen, remedies))
    if (equal := complete.get("frac_reward_zero_std")) and equal.now >= 0.95 and equal.lowest < 0.8:
        seen = f"{equal.now:.0%} of the groups have equal rewards (lowest so far {equal.lowest:.0%})"
        signs.append(CollapseSign("equal rewards", seen, ("other questions", "a reward that differs within a group")))
    return signs


def collapse_sentence(signs: Sequence[CollapseSign], step: int) -> str:
    """Return the warning that names the signs, the step to go back to, and the remedies."""
    remedies, before = dict.fromkeys(cure for sign in signs for cure in sign.remedies), max(step - 2 * WINDOW_STEPS, 0)
    seen = f"{', '.join(sign.seen for sign in signs)} (means of {WINDOW_STEPS} steps)"
    cure = f"go back to a checkpoint before step {before} and try {', or '.join(remedies)}"
    return f"The run shows signs of collapse at step {step}: {seen}; {cure}."


def first_signs(logs: Iterable[tuple[int, Mapping[str, float | None]]]) -> list[tuple[int, str]]:
    """Return the signs of collapse in a run's training logs, each with its first step.

    They are the signs of `find_collapse`, with logs instead of steps, and non-finite losses and gradients.

    Args:
        logs: logged values with their steps, in order; rewards weigh 1 unless their weight was logged.
    """
    histories: dict[str, MetricHistory] = defaultdict(MetricHistory)
    weights: dict[str, float] = {}
    signs: dict[str, tuple[int, str]] = {}
    for step, values in logs:
        for name, value in values.items():
            if value is None or not math.isfinite(value):
                if name in ("loss", "grad_norm"):
                    signs.setdefault(name, (step, f"{name} is not finite"))
            elif name == "engine/distance" and value > ENGINE_BOUND:
                seen = f"log-probabilities of the engine are {value:.3g} nats from the trainer's"
                signs.setdefault(name, (step, seen))
            elif name.startswith("reward_weights/"):
                weights[name.removeprefix("reward_weights/")] = value
            elif name.startswith(WATCHED):
                histories[name].add(value)
                if name.startswith("rewards/"):
                    weights.setdefault(name.split("/")[1], 1.0)
        for sign in find_collapse(histories, weights):
            signs.setdefault(sign.kind, (step, sign.seen))
    return sorted(signs.values())


class CollapseWatch(TrainerCallback):
    """Warns once of the signs of collapse, and stops training if `stop_on_collapse` is on.

    Args:
        metrics: TRL's metrics of training since the last log.
        reward_weights: returns the current weights by the names of the reward functions.

    Attributes:
        warning: sentence of the warning; None before it.
    """

    def __init__(self, metrics: Mapping[str, list[float]], reward_weights: Callable[[], Mapping[str, float]]) -> None:
        self.warning: str | None = None
        self._metrics, self._reward_weights = metrics, reward_weights
        self._histories: dict[str, MetricHistory] = {}
        self._read: dict[str, int] = {}

    def start_window(self) -> None:
        """Read the metrics from their beginning again, after they were logged and cleared."""
        self._read.clear()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add the mean of every metric over the micro-batches of this step; all processes have the same values."""
        if self.warning is not None:
            return
        for name, values in self._metrics.items():
            new = [value for value in values[self._read.get(name, 0) :] if not math.isnan(value)]
            self._read[name] = len(values)
            if new:  # a micro-batch without a gradient has none
                self._histories.setdefault(name, MetricHistory()).add(fmean(new))
        if signs := find_collapse(self._histories, self._reward_weights()):
            self.warning = collapse_sentence(signs, state.global_step)
            if state.is_world_process_zero:
                logger.warning(self.warning)
            control.should_training_stop |= args.stop_on_collapse
