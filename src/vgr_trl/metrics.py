"""Means over processes, whatever the spread of the rows; metrics of the micro-batches; seconds of each stage."""

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import TrainerCallback

from vgr_trl.rows import valid_tokens

if TYPE_CHECKING:
    from vgr_trl.dapo_config import DAPOConfig
    from vgr_trl.rollout import TrainingPass

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
        self._tokens: dict[str, list[float]] = {"valid": [], "scored": []}  # with loss, and scored, per micro-batch
        self._sums: Counter[str] = Counter()
        self.prompts_too_long = self.updates_left_out = self.rows_replaced = 0
        by_completion = args.importance_sampling_level == "sequence" and not args.has_token_advantages
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
        local = torch.stack([torch.as_tensor(count, device=logps.device).float() for count in counts.values()])
        totals = self._accelerator.reduce(local, reduction="sum").tolist()
        found = dict(zip(counts, totals, strict=True))
        self._sums.update(found)
        valid, scored = found["valid"], found["scored"]
        for name in self._means if scored != valid else ():
            if values := of_trl.get(name):
                values[-1] = values[-1] * valid / scored if scored else math.nan
        for name, each in self._tokens.items():
            each.append(found[name])
        return {"approx_kl": found["kl"] / scored if scored else math.nan}

    def merge(self, metrics: MutableMapping[str, list[float]]) -> None:
        """Make one value of those of the micro-batches, before they are logged."""
        weigh_by_tokens(metrics, _VALID_MEANS, self._tokens["valid"])
        weigh_by_tokens(metrics, ("approx_kl", *self._means), self._tokens["scored"])
        self._tokens = {"valid": [], "scored": []}

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
