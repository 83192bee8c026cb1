"""Metrics of a step: masked means over processes, micro-batches weighted by their tokens, seconds by stage."""

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import TrainerCallback

from vgr_trl.batch import Batch

if TYPE_CHECKING:
    from vgr_trl.dapo_config import DAPOConfig

_VALID_MEANS = (
    "entropy_penalty", "perception_loss", "perturbed_entropy", "kl", "teacher_divergence", "gated_distillation",
    "teacher_gate",
)  # fmt: skip
_PHI = "vespo/phi_seq_mean"
_RATIO_MEANS = ("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean", "cispo_clip_ratio")


def weigh_by_tokens(metrics: MutableMapping[str, list[float]], names: Iterable[str], counts: Sequence[float]) -> None:
    """Replace the values of micro-batches by their mean, weighted by tokens.

    Args:
        metrics: values by name; a metric without one value per micro-batch stays unchanged.
        names: the metrics to average.
        counts: tokens of each micro-batch, over all processes.
    """
    for name in names:
        values = metrics.get(name, [])
        if len(values) != len(counts):
            continue
        pairs = [(value, count) for value, count in zip(values, counts, strict=True) if not math.isnan(value)]
        if total := sum(count for _, count in pairs):
            metrics[name] = [sum(value * count for value, count in pairs) / total]


def k3(log_ratio: Tensor) -> Tensor:
    """Return r - 1 - ln r of each token, an estimate of KL(p ‖ q) from a token sampled from p, with r = q / p.

    Schulman, http://joschu.net/blog/kl-approx.html.

    Args:
        log_ratio: ln r, of any shape.
    """
    return torch.expm1(log_ratio) - log_ratio


class StepMetrics:
    """Counts and means of the micro-batches since the last log.

    Attributes:
        prompts_too_long: skipped prompts of a stream, in the whole run.
        rows_replaced: rows of this process since the last micro-batch that replaced rows with damaged images.
        updates_skipped: updates since the last log that were skipped because their gradient was not finite.
    """

    def __init__(self, args: "DAPOConfig", accelerator: Accelerator) -> None:
        self._args, self._accelerator = args, accelerator
        # Per micro-batch: valid tokens, tokens with loss, and the number of vespo weights that TRL averages.
        self._tokens: dict[str, list[float]] = {"valid": [], "scored": [], "weighed": []}
        self._sums: Counter[str] = Counter()
        self.prompts_too_long = self.updates_skipped = self.rows_replaced = 0
        has_token_advantages = args.shapes_advantages or args.uses_critic
        by_completion = args.importance_sampling_level == "sequence" and not has_token_advantages
        self._means = ("entropy",) if by_completion else ("entropy", *_RATIO_MEANS)  # TRL's means

    def count_too_long(self, split: str) -> None:
        """Count a skipped prompt of a stream, unless it belongs to the eval data."""
        self.prompts_too_long += split == "train"

    def measure(
        self,
        batch: Batch,
        logps: Tensor,
        trl_metrics: MutableMapping[str, list[float]],
        loss_mask: Tensor,
        rows_run: int,
    ) -> dict[str, float]:
        """Count a micro-batch over all processes, and return its metrics, means over tokens with loss.

        `approx_kl` estimates KL(old policy ‖ policy) by `k3` of the tokens, which the old policy sampled.

        Args:
            batch: the micro-batch, N rows.
            logps: (N, T), log-probabilities of the training pass.
            trl_metrics: TRL's metrics, whose last means are rescaled from valid tokens to loss tokens; NaN without any.
            loss_mask: (N, T) bool, tokens with loss.
            rows_run: rows of the pass.
        """
        logps, mask = logps.detach(), batch.valid  # (N, T)
        old_logps = logps if batch.old_logps is None else batch.old_logps
        log_ratio = (logps - old_logps).float() * loss_mask
        counts = {
            "kl": k3(log_ratio).sum(),
            "valid": mask.sum(),
            "scored": loss_mask.sum(),
            "tokens": batch.prompt_mask.sum() + batch.completion_mask.sum(),
            "rows": len(mask),
            "rows run": rows_run,
            "replaced": self.rows_replaced,
        }
        self.rows_replaced = 0
        is_vespo = self._args.loss_type == "vespo"
        counts["phi"], counts["weighed"] = self._sum_phi(batch, log_ratio, mask, loss_mask) if is_vespo else (0, 0)
        local = torch.stack([torch.as_tensor(count, device=logps.device).float() for count in counts.values()])
        totals = self._accelerator.reduce(local, reduction="sum").tolist()
        total = dict(zip(counts, totals, strict=True))
        self._sums.update(total)
        valid, scored = total["valid"], total["scored"]
        for name in self._means if scored != valid else ():
            if values := trl_metrics.get(name):
                values[-1] = values[-1] * valid / scored if scored else math.nan
        if values := trl_metrics.get(_PHI):
            values[-1] = total["phi"] / total["weighed"] if total["weighed"] else math.nan
        for name, tokens in self._tokens.items():
            tokens.append(total[name])
        return {"approx_kl": total["kl"] / scored if scored else math.nan}

    def merge(self, metrics: MutableMapping[str, list[float]]) -> None:
        """Merge the values of the micro-batches into one mean each, before they are logged."""
        weigh_by_tokens(metrics, _VALID_MEANS, self._tokens["valid"])
        weigh_by_tokens(metrics, ("approx_kl", *self._means), self._tokens["scored"])
        weigh_by_tokens(metrics, (_PHI,), self._tokens["weighed"])
        self._tokens = {name: [] for name in self._tokens}

    def _sum_phi(self, batch: Batch, log_ratio: Tensor, mask: Tensor, loss_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return sum and count of `vespo`'s weights, one per completion or per token with loss."""
        from trl import GRPOTrainer

        advantages = cast("Tensor", batch.advantages).reshape(len(mask), -1)
        args, ratio = self._args, batch.columns.get("engine_ratio")
        bounds = args.vespo_k_pos, args.vespo_lambda_pos, args.vespo_k_neg, args.vespo_lambda_neg
        phi = GRPOTrainer.get_gamma_weights(advantages, log_ratio, mask, ratio, *bounds)
        where = loss_mask if phi.size(1) > 1 else loss_mask.any(1, keepdim=True)
        return phi.masked_fill(~where, 0).sum(), where.sum()

    def summarise_window(self, seconds: float, reward_weights: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics of the micro-batches since the last log, and start a new window.

        The metrics are tokens and completions per second, generation and scoring included, skipped completions and
        tokens, the weights of the rewards, and counts that are logged only if they are not 0.

        Args:
            seconds: duration of the window.
            reward_weights: weights by the names of the reward functions.
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
            "skipped/updates": self.updates_skipped,
            "data/prompts_replaced": sums["replaced"] / int(self._args.num_generations or 1),
            "data/prompts_too_long": self.prompts_too_long,
        }
        self.updates_skipped = 0
        return logs | {name: value for name, value in sometimes.items() if value}


Gather = Callable[[Tensor], Tensor]


class Totals:
    """Sums, counts and extremes of local values; one gather turns them into metrics."""

    def __init__(self) -> None:
        self.means: dict[str, tuple[Tensor, Tensor]] = {}  # name -> sum, count
        self.largest: dict[str, tuple[Tensor, int]] = {}  # name -> largest value times a sign, the sign
        self.replicated: dict[str, float] = {}  # numbers that are the same on all processes
        self.about_one: dict[str, str] = {}  # name of a mean of (x - 1)² -> name of the mean of x

    def add_mean(self, name: str, values: Tensor, where: Tensor) -> None:
        """Accumulate a masked mean.

        Args:
            name: name of the metric.
            values: tensor of any shape.
            where: bool tensor of the same shape, true for values that enter the mean.
        """
        total, count = self.means.get(name, (0, 0))
        self.means[name] = (total + values.float().masked_fill(~where, 0).sum(), count + where.sum().float())

    def add_largest(self, name: str, values: Tensor, where: Tensor, sign: int = 1) -> None:
        """Accumulate a masked maximum or minimum.

        Args:
            name: name of the metric.
            values: tensor of any shape.
            where: bool tensor of the same shape, true for values that count.
            sign: 1 for the maximum, -1 for the minimum.
        """
        signed = (sign * values.float()).masked_fill(~where, -torch.inf).flatten()
        before, _ = self.largest.get(name, (signed.new_tensor(-torch.inf), sign))
        self.largest[name] = (torch.cat([signed, before.view(1)]).max(), sign)

    def metrics(self, gather: Gather | None = None) -> dict[str, float]:
        """Return all metrics over all processes; a mean or an extreme of nothing is NaN.

        Args:
            gather: concatenates a 1-D tensor over all processes; called once if anything was added. None: there is one
                process.
        """
        local = [part for pair in self.means.values() for part in pair]
        local += [value for value, _ in self.largest.values()]
        if not local:
            return dict(self.replicated)
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
        return results | self.replicated


def add_weights(totals: Totals, name: str, weights: Tensor, mask: Tensor) -> None:
    """Add mean, variance, minimum and maximum of weights to `totals`.

    Args:
        totals: receives the metrics.
        name: their prefix.
        weights: (N, T).
        mask: (N, T) bool, valid tokens.
    """
    totals.add_mean(f"{name}_mean", weights, mask)
    totals.add_mean(f"{name}_variance", (weights - 1) ** 2, mask)
    totals.about_one[f"{name}_variance"] = f"{name}_mean"
    totals.add_largest(f"{name}_min", weights, mask, sign=-1)
    totals.add_largest(f"{name}_max", weights, mask)


STAGES = ("generation", "reward", "old_logps", "reference", "values", "perturbed", "selection", "update", "optimizer")
NO_NESTED_STAGES = "perturbed"  # a stage that keeps the time of the stages within it


def record_moment() -> Any:
    """Return an event that completes when the device has finished its queue; on a CPU, the time."""
    if not (torch.cuda.is_available() and torch.backends.cuda.is_built()):
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class StageClock(TrainerCallback):
    """Time in each stage since the last log; a nested stage pauses the outer one.

    As a callback it counts the time of the optimizer, which TRL's step time excludes.
    """

    def __init__(self) -> None:
        self.spans: list[tuple[str, Any, Any]] = []  # stage, begin, end
        self._running: list[str] = []
        self._since: Any = None

    @contextmanager
    def stage(self, name: str, counts: bool = True) -> Iterator[None]:
        """Count the time of this block; a kernel counts in the stage that launched it.

        Args:
            name: one of `STAGES`.
            counts: False for a stage of an evaluation, which is not counted.
        """
        if not counts or (self._running and self._running[-1] == NO_NESTED_STAGES):
            yield
            return
        self._switch()
        self._running.append(name)
        try:
            yield
        finally:
            self._switch()
            self._running.pop()

    def _switch(self) -> None:
        now = record_moment()
        if self._running:
            self.spans.append((self._running[-1], self._since, now))
        self._since = now

    def metrics(self, accelerator: Accelerator, steps: int) -> dict[str, float]:
        """Return the mean seconds per step in each stage on the slowest process, and restart at 0.

        Args:
            accelerator: gathers over processes.
            steps: steps since the last log.
        """
        spans, self.spans = self.spans, []
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # once per log
        seconds: dict[str, float] = defaultdict(float)
        for name, start, end in spans:
            seconds[name] += end - start if isinstance(end, float) else start.elapsed_time(end) / 1000
        local_seconds = torch.tensor([seconds[name] for name in STAGES], device=accelerator.device)
        slowest = accelerator.gather(local_seconds).view(-1, len(STAGES)).max(dim=0).values / max(1, steps)
        return {f"timing/{name}": value for name, value in zip(STAGES, slowest.tolist(), strict=True) if value > 0}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the optimizer's stage: gradients are complete."""
        self._optimizer_started = record_moment()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the optimizer's stage: parameters are updated."""
        self.spans.append(("optimizer", self._optimizer_started, record_moment()))
