"""Means over processes, whatever the spread of the rows; metrics of micro-batches; seconds of stages; collapse."""

import math
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from itertools import islice
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import TrainerCallback
from transformers.utils import logging

from vgr_trl.rows import valid_tokens

if TYPE_CHECKING:
    from vgr_trl.dapo_config import DAPOConfig
    from vgr_trl.rollout import ConstructedTrainer, TrainingPass

logger = logging.get_logger(__name__)
Gather = Callable[[Tensor], Tensor]


class Totals:
    """Sums, counts and extremes of local values; one gather turns them into metrics."""

    def __init__(self) -> None:
        self.means: dict[str, tuple[Tensor, Tensor]] = {}  # name -> sum, count
        self.largest: dict[str, tuple[Tensor, int]] = {}  # name -> largest value times a sign, that sign
        self.known: dict[str, float] = {}
        self.about_one: dict[str, str] = {}  # name of a mean of (x - 1)², to become the variance of x -> of its mean

    def add_known(self, name: str, value: float) -> None:
        """Add a number that is the same on all processes."""
        self.known[name] = value

    def add_mean(self, name: str, values: Tensor, where: Tensor) -> None:
        """Add the mean of `values` where the bool tensor `where`, of the same shape, is true, to that so far."""
        total, count = self.means.get(name, (0, 0))
        self.means[name] = (total + values.float().masked_fill(~where, 0).sum(), count + where.sum().float())

    def add_largest(self, name: str, values: Tensor, where: Tensor, sign: int = 1) -> None:
        """Add the largest of `values` where `where` is true; with a sign of -1 the smallest; and of those so far."""
        signed = (sign * values.float()).masked_fill(~where, -torch.inf).flatten()
        before, _ = self.largest.get(name, (signed.new_tensor(-torch.inf), sign))
        self.largest[name] = (torch.cat([signed, before.view(1)]).max(), sign)

    def metrics(self, gather: Gather | None = None) -> dict[str, float]:
        """Return all metrics over all processes, NaN for a mean or an extreme of nothing.

        Args:
            gather: returns the concatenation of a 1-D tensor over all processes; called once if anything was added.
        """
        local = [
            *(part for pair in self.means.values() for part in pair),
            *(value for value, _ in self.largest.values()),
        ]
        if not local:
            return dict(self.known)
        row = torch.stack(local)
        rows = (row if gather is None else gather(row)).detach().cpu().double().view(-1, len(local))  # (processes, ·)
        split = 2 * len(self.means)
        sums, counts = rows[:, :split].sum(dim=0).view(-1, 2).unbind(dim=1)
        results = dict(zip(self.means, (sums / counts).tolist(), strict=True))
        extremes = rows[:, split:].amax(dim=0).tolist()
        for (name, (_, sign)), value in zip(self.largest.items(), extremes, strict=True):
            results[name] = math.nan if value == -math.inf else sign * value
        for name, mean in self.about_one.items():
            results[name] = max(results[name] - (results[mean] - 1) ** 2, 0.0)
        return results | self.known


def add_weights(totals: Totals, name: str, weights: Tensor, mask: Tensor) -> None:
    """Add mean, variance, smallest and largest of (N, T) weights over the valid tokens `mask`."""
    totals.add_mean(f"{name}_mean", weights, mask)
    totals.add_mean(f"{name}_variance", (weights - 1) ** 2, mask)
    totals.about_one[f"{name}_variance"] = f"{name}_mean"
    totals.add_largest(f"{name}_min", weights, mask, sign=-1)
    totals.add_largest(f"{name}_max", weights, mask)


_VALID_MEANS = ("entropy_penalty", "perception_loss", "perturbed_entropy", "kl")
_PHI = "vespo/phi_seq_mean"
_RATIO_MEANS = ("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean", "cispo_clip_ratio")


def weigh_by_tokens(metrics: MutableMapping[str, list[float]], names: Iterable[str], counts: Sequence[float]) -> None:
    """Replace the values of micro-batches by one mean in which every token counts the same.

    Args:
        metrics: values by name; those that do not have one value for each micro-batch stay as they are.
        counts: tokens of each micro-batch, over all processes.
    """
    for name in names:
        values = metrics.get(name, [])
        if len(values) != len(counts):
            continue
        pairs = [(value, count) for value, count in zip(values, counts, strict=True) if not math.isnan(value)]
        if total := sum(count for _, count in pairs):
            metrics[name] = [sum(value * count for value, count in pairs) / total]


class StepMetrics:
    """Counts and means of the micro-batches since the last log.

    Attributes:
        prompts_too_long: prompts of a stream that were left out, in the whole run.
        rows_replaced: rows of this process since the last micro-batch that took the place of rows with damaged images.
        updates_left_out: steps that changed nothing because their gradient was not finite.
    """

    def __init__(self, args: "DAPOConfig", accelerator: Accelerator) -> None:
        self._args, self._accelerator = args, accelerator
        # Per micro-batch: valid tokens, tokens with loss, and what TRL's weights of vespo are averaged over.
        self._tokens: dict[str, list[float]] = {"valid": [], "scored": [], "weighed": []}
        self._sums: Counter[str] = Counter()
        self.prompts_too_long = self.updates_left_out = self.rows_replaced = 0
        has_token_advantages = args.shapes_advantages or args.uses_critic
        by_completion = args.importance_sampling_level == "sequence" and not has_token_advantages
        self._means = ("entropy",) if by_completion else ("entropy", *_RATIO_MEANS)  # TRL's, over tokens that train

    def measure(self, passed: "TrainingPass", of_trl: MutableMapping[str, list[float]]) -> dict[str, float]:
        """Count a micro-batch, over all processes, and return its metrics, which are means over tokens with loss.

        `approx_kl` is the k3 estimate of KL(old policy ‖ policy): ratio − 1 − ln ratio with ratio = π/π_old of a token
        sampled from π_old (Schulman, http://joschu.net/blog/kl-approx.html).

        Args:
            of_trl: TRL's metrics; the newest values of its means over valid tokens, to which tokens that were not
                scored add 0, become means over tokens with loss, NaN where there is none.
        """
        inputs, logps, mask = passed.inputs, passed.logps.detach(), valid_tokens(passed.inputs)  # (N, T)
        loss_mask = mask if passed.loss_mask is None else passed.loss_mask
        old_logps = inputs.get("old_per_token_logps", logps)  # TRL leaves them out while they equal the new ones
        log_ratio = (logps - old_logps).float() * loss_mask
        counts = {
            "kl": (log_ratio.exp() - 1 - log_ratio).sum(),
            "valid": mask.sum(),
            "scored": loss_mask.sum(),
            "tokens": inputs["prompt_mask"].sum() + inputs["completion_mask"].sum(),
            "rows": len(mask),
            "rows run": len(mask) if passed.loss_mask is None else passed.rows_run,
            "replaced": self.rows_replaced,
        }
        self.rows_replaced = 0
        is_vespo = self._args.loss_type == "vespo"
        counts["phi"], counts["weighed"] = self._sum_phi(inputs, log_ratio, mask, loss_mask) if is_vespo else (0, 0)
        local = torch.stack([torch.as_tensor(count, device=logps.device).float() for count in counts.values()])
        totals = self._accelerator.reduce(local, reduction="sum").tolist()
        found = dict(zip(counts, totals, strict=True))
        self._sums.update(found)
        valid, scored = found["valid"], found["scored"]
        for name in self._means if scored != valid else ():
            if values := of_trl.get(name):
                values[-1] = values[-1] * valid / scored if scored else math.nan
        if values := of_trl.get(_PHI):
            values[-1] = found["phi"] / found["weighed"] if found["weighed"] else math.nan
        for name, each in self._tokens.items():
            each.append(found[name])
        return {"approx_kl": found["kl"] / scored if scored else math.nan}

    def merge(self, metrics: MutableMapping[str, list[float]]) -> None:
        """Make one value of those of the micro-batches, before they are logged."""
        weigh_by_tokens(metrics, _VALID_MEANS, self._tokens["valid"])
        weigh_by_tokens(metrics, ("approx_kl", *self._means), self._tokens["scored"])
        weigh_by_tokens(metrics, (_PHI,), self._tokens["weighed"])
        self._tokens = {name: [] for name in self._tokens}

    def _sum_phi(
        self, inputs: Mapping[str, Any], log_ratio: Tensor, mask: Tensor, loss_mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return sum and count of the weights of `vespo` over completions with loss, or tokens if each has its own."""
        from trl import GRPOTrainer

        advantages = inputs["advantages"].reshape(len(mask), -1)
        bounds = [getattr(self._args, f"vespo_{name}") for name in ("k_pos", "lambda_pos", "k_neg", "lambda_neg")]
        given = advantages, log_ratio, mask, inputs.get("importance_sampling_ratio")
        phi = GRPOTrainer.get_gamma_weights(*given, *bounds)
        where = loss_mask if phi.size(1) > 1 else loss_mask.any(1, keepdim=True)
        return phi.masked_fill(~where, 0).sum(), where.sum()

    def summarise_window(self, seconds: float, reward_weights: Mapping[str, float]) -> dict[str, float]:
        """Return what is logged of the micro-batches since the last log, and of the run; start a new window.

        Those are tokens and completions per second, generation and scoring included; completions that did not run and
        tokens that were not scored; the weights of the rewards.
        """
        sums, self._sums = self._sums, Counter()
        logs: dict[str, float] = {
            "perf/tokens_per_second": sums["tokens"] / seconds,
            "perf/samples_per_second": sums["rows"] / seconds,
            "skipped/rows": float(sums["rows"] - sums["rows run"]),
            "skipped/tokens": float(sums["valid"] - sums["scored"]),
            **{f"reward_weights/{name}": weight for name, weight in reward_weights.items()},
        }
        sometimes = {
            "skipped/updates": self.updates_left_out,
            "data/prompts_replaced": sums["replaced"] / int(self._args.num_generations or 1),
            "data/prompts_too_long": self.prompts_too_long,
        }
        self.updates_left_out = 0
        return logs | {name: value for name, value in sometimes.items() if value}


STAGES = ("generation", "reward", "old_logps", "reference", "values", "perturbed", "selection", "update", "optimizer")
NO_NESTED_STAGES = "perturbed"  # whose passes are its own


def moment() -> Any:
    """Return when the device comes to what it is asked for from here on, without waiting for it; on a CPU, now."""
    if not (torch.cuda.is_available() and torch.backends.cuda.is_built()):
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class StageClock:
    """Time in each stage since the last log; in a stage within another, that one stands still."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Any, Any]] = []  # stage, and the moments of its beginning and end
        self._running: list[str] = []
        self._since: Any = None

    @contextmanager
    def stage(self, name: str, counts: bool = True) -> Iterator[None]:
        """Count the time in this block; kernels that are under way end with the stage that they were started in.

        Args:
            counts: False: it is one of an evaluation, and counts nowhere.
        """
        if not counts or (self._running and self._running[-1] == NO_NESTED_STAGES):
            yield
            return
        self._turn()
        self._running.append(name)
        try:
            yield
        finally:
            self._turn()
            self._running.pop()

    def _turn(self) -> None:
        now = moment()
        if self._running:
            self.spans.append((self._running[-1], self._since, now))
        self._since = now

    def metrics(self, accelerator: Accelerator, steps: int) -> dict[str, float]:
        """Return the mean seconds of a step in each stage, of the slowest process, and begin again at 0.

        Args:
            steps: since the last log.
        """
        spans, self.spans = self.spans, []
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # once per log
        seconds: dict[str, float] = defaultdict(float)
        for name, start, end in spans:
            seconds[name] += end - start if isinstance(end, float) else start.elapsed_time(end) / 1000
        own = torch.tensor([seconds[name] for name in STAGES], device=accelerator.device)
        slowest = accelerator.gather(own).view(-1, len(STAGES)).max(dim=0).values / max(1, steps)
        return {f"timing/{name}": value for name, value in zip(STAGES, slowest.tolist(), strict=True) if value > 0}


class OptimizerClock(TrainerCallback):
    """Counts the time of the optimizer's steps, which TRL leaves out of those of a step."""

    def __init__(self, clock: StageClock) -> None:
        self.clock = clock
        self._started: Any = None

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Gradients are there."""
        self._started = moment()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Parameters are changed."""
        self.clock.spans.append(("optimizer", self._started, moment()))


ENGINE_BOUND = 0.1  # nats per token; numerics alone put an engine in bfloat16 at about 0.02
WINDOW = 8  # steps whose mean is compared with the means of earlier ones
SMALLEST_RATE = 0.1  # of correct or well-formed answers; a fall from below it is noise
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
    """One metric: the mean of its newest `WINDOW` steps, and the first, lowest and highest such mean before them."""

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=2 * WINDOW)
        self.first: float | None = None
        self.lowest, self.highest, self.now = math.inf, -math.inf, 0.0

    def add(self, value: float) -> None:
        """Add the value of one more step."""
        self._values.append(value)
        if len(self._values) == 2 * WINDOW:
            before = fmean(islice(self._values, WINDOW))
            self.now = fmean(islice(self._values, WINDOW, None))
            self.first = before if self.first is None else self.first
            self.lowest, self.highest = min(self.lowest, before), max(self.highest, before)


def find_collapse(histories: Mapping[str, MetricHistory], reward_weights: Mapping[str, float]) -> list[CollapseSign]:
    """Return the signs of collapse in the histories of metrics, which have TRL's names.

    Args:
        histories: of metrics that begin with one of `WATCHED`; those of fewer than 2 · `WINDOW` steps do not count.
        reward_weights: by the names of the reward functions.
    """
    known = {name: history for name, history in histories.items() if history.first is not None}
    stds = {name: known[f"rewards/{name}/std"].now for name in reward_weights if f"rewards/{name}/std" in known}
    deviations = {name: abs(reward_weights[name]) * std for name, std in stds.items()}
    vgr_rewards = ", ".join(name for name, weight in reward_weights.items() if "vgr" in name and weight)
    slower, signs = "a lower learning_rate", list[CollapseSign]()

    def fell(name: str, history: MetricHistory, *remedies: str, note: str = "") -> None:
        signs.append(CollapseSign(name, f"{name} fell from {history.highest:.3g} to {history.now:.3g}{note}", remedies))

    for name, weight in reward_weights.items():
        reward = known.get(f"rewards/{name}/mean")
        if reward is None or weight == 0 or reward.now >= reward.highest / 2:
            continue
        share = deviations.get(name, 0.0) / (sum(deviations.values()) or 1.0)
        if ("accuracy" in name or "format" in name) and reward.highest >= SMALLEST_RATE:
            fell(name, reward, slower, *([f"less weight on {vgr_rewards}"] if vgr_rewards else []))
        elif "vgr" in name and share > 0.5:
            note = f" and makes up {share:.0%} of the rewards' deviation"
            fell(name, reward, f"less weight on {name}", "scale_rewards none", note=note)
    if (length := known.get("completions/mean_length")) and length.now < length.highest / 4:
        fell("the length of completions", length, slower)
    if (clipped := known.get("completions/clipped_ratio")) and clipped.now > 0.9 and clipped.lowest < 0.5:
        seen = f"{clipped.now:.0%} of the completions are truncated (lowest so far {clipped.lowest:.0%})"
        signs.append(CollapseSign("truncated", seen, (slower, "a length reward")))
    if (entropy := known.get("entropy")) and entropy.first is not None:
        if entropy.now < 0.005 and entropy.highest > 0.05:
            fell("entropy", entropy, slower, "a higher epsilon_high or temperature")
        elif entropy.now > max(4 * entropy.lowest, 2 * entropy.first, 0.05):
            seen = f"entropy rose from {entropy.lowest:.3g} to {entropy.now:.3g}"
            signs.append(CollapseSign("entropy rose", seen, (slower, "use_entropy_penalty")))
    divergence, perturbed = known.get("perception_loss"), known.get("perturbed_entropy")
    if entropy and divergence and perturbed and divergence.now < 2 * min(divergence.lowest, 0.0):
        ratio = known.get("clip_ratio/high_mean") or known.get("cispo_clip_ratio")
        rising = [entropy, perturbed, *([ratio] if ratio and ratio.highest + ratio.now > 0 else [])]
        if all(each.now > each.highest for each in rising):  # as in PAPO (https://huggingface.co/papers/2507.06448)
            seen = f"the perception loss fell from {divergence.lowest:.3g} to {divergence.now:.3g} while entropies rose"
            remedies = ("a lower perception_loss_weight", "higher weights for both entropy terms")
            signs.append(CollapseSign("perception", seen, remedies))
    if (equal := known.get("frac_reward_zero_std")) and equal.now >= 0.95 and equal.lowest < 0.8:
        seen = f"{equal.now:.0%} of the groups have equal rewards (lowest so far {equal.lowest:.0%})"
        signs.append(CollapseSign("equal rewards", seen, ("other questions", "a reward that differs within a group")))
    return signs


def collapse_sentence(signs: Sequence[CollapseSign], step: int) -> str:
    """Return the warning that names the signs, the step to go back to, and the remedies."""
    remedies = ", or ".join(dict.fromkeys(remedy for sign in signs for remedy in sign.remedies))
    return (
        f"The run shows signs of collapse at step {step}: {', '.join(sign.seen for sign in signs)} (means of {WINDOW} "
        f"steps); go back to a checkpoint before step {max(step - 2 * WINDOW, 0)} and try {remedies}."
    )


def first_signs(logs: Iterable[tuple[int, Mapping[str, float | None]]]) -> list[tuple[int, str]]:
    """Return the signs of collapse in what a run has logged in training, each with its first step.

    Besides those of `find_collapse`, with logged values in place of steps: a loss or gradient that is not finite.

    Args:
        logs: steps, in order, with the values that were logged; rewards weigh 1 unless their weight was logged.
    """
    histories: dict[str, MetricHistory] = defaultdict(MetricHistory)
    weights: dict[str, float] = {}
    found: dict[str, tuple[int, str]] = {}
    for step, values in logs:
        for name, value in values.items():
            if value is None or not math.isfinite(value):
                if name in ("loss", "grad_norm"):
                    found.setdefault(name, (step, f"{name} is not finite"))
            elif name == "pixels/engine_distance" and value > ENGINE_BOUND:
                seen = f"log-probabilities of the engine are {value:.3g} nats from the trainer's"
                found.setdefault(name, (step, seen))
            elif name.startswith("reward_weights/"):
                weights[name.removeprefix("reward_weights/")] = value
            elif name.startswith(WATCHED):
                histories[name].add(value)
                if name.startswith("rewards/"):
                    weights.setdefault(name.split("/")[1], 1.0)
        for sign in find_collapse(histories, weights):
            found.setdefault(sign.kind, (step, sign.seen))
    return sorted(found.values())


class CollapseWatch(TrainerCallback):
    """Warns once of the signs of collapse, and ends the training if `stop_on_collapse` is on.

    Attributes:
        found: the sentence of the warning; None while there is none.
    """

    def __init__(self, trainer: "ConstructedTrainer") -> None:
        self.found: str | None = None
        self._trainer = trainer
        self._histories: dict[str, MetricHistory] = {}
        self._read: dict[str, int] = {}

    def start_window(self) -> None:
        """Read the metrics of the trainer from their beginning again, since they were logged and cleared."""
        self._read.clear()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Read the mean of every metric over the micro-batches of this step; all processes have the same values."""
        if self.found is not None:
            return
        for name, values in self._trainer._metrics["train"].items():
            new = [value for value in values[self._read.get(name, 0) :] if not math.isnan(value)]
            self._read[name] = len(values)
            if new:  # a micro-batch without a gradient has none
                self._histories.setdefault(name, MetricHistory()).add(fmean(new))
        if signs := find_collapse(self._histories, self._trainer.named_reward_weights()):
            self.found = collapse_sentence(signs, state.global_step)
            if state.is_world_process_zero:
                logger.warning(self.found)
            control.should_training_stop |= args.stop_on_collapse
