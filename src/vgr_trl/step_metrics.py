"""Metrics of the micro-batches since the last log."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, MutableMapping, Sequence

import torch
from accelerate import Accelerator

from vgr_trl.dapo_config import DAPOConfig
from vgr_trl.rollout import TrainingPass
from vgr_trl.rows import valid_tokens

_VALID_MEANS = ("entropy_penalty", "perception_loss", "perturbed_entropy", "kl", "kl/mean")
_RATIO_MEANS = ("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean", "cispo_clip_ratio")


def approximate_kl(logps: torch.Tensor, old_logps: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return per completion the sum over its valid tokens of the k3 estimate of KL(old policy ‖ policy).

    k3 = ratio − 1 − ln ratio with ratio = π/π_old of a token sampled from π_old, never negative and unbiased
    (Schulman, http://joschu.net/blog/kl-approx.html).

    Args:
        logps: log-probabilities under the policy, (N, T).
        old_logps: those under the policy that generated the tokens, (N, T).
        mask: valid tokens, (N, T).

    Returns:
        (N,), at least 0.
    """
    log_ratio = (logps - old_logps).float() * mask
    return (log_ratio.exp() - 1 - log_ratio).sum(dim=1)


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
        rows_replaced: rows of this process since the last micro-batch whose images could not be decoded, so that
            others took their place.
        updates_left_out: steps that changed nothing because their gradient was not finite.
    """

    def __init__(self, args: DAPOConfig, accelerator: Accelerator) -> None:
        self._args, self._accelerator = args, accelerator
        self._valid: list[float] = []  # tokens of each micro-batch that count in the loss
        self._scored: list[float] = []  # those of them that were scored
        self._sums: Counter[str] = Counter()
        self.prompts_too_long = self.updates_left_out = self.rows_replaced = 0
        by_completion = args.importance_sampling_level == "sequence" and not args.has_token_advantages
        self._means = ("entropy",) if by_completion else ("entropy", *_RATIO_MEANS)  # TRL's, over tokens that train

    def measure(self, passed: TrainingPass, of_trl: MutableMapping[str, list[float]]) -> dict[str, float]:
        """Count a micro-batch, over all processes, and return its metrics, which are means over tokens with loss.

        Args:
            of_trl: TRL's metrics; the newest values of its means over valid tokens, to which tokens that were not
                scored add 0, become means over tokens with loss, NaN where there is none.
        """
        inputs, logps, mask = passed.inputs, passed.logps.detach(), valid_tokens(passed.inputs)  # (N, T)
        loss_mask = mask if passed.loss_mask is None else passed.loss_mask
        rows_run = len(mask) if passed.loss_mask is None else passed.rows_run
        old_logps = inputs.get("old_per_token_logps", logps)  # TRL leaves them out while they equal the new ones
        kl = approximate_kl(logps, old_logps, loss_mask)  # (N,)
        tokens = inputs["prompt_mask"].sum() + inputs["completion_mask"].sum()
        counts = (kl.sum(), mask.sum(), loss_mask.sum(), tokens, len(mask), rows_run, self.rows_replaced)
        self.rows_replaced = 0
        local = torch.stack([torch.as_tensor(count, device=kl.device).float() for count in counts])
        kl_sum, valid, scored, tokens, rows, run, replaced = self._accelerator.reduce(local, reduction="sum").tolist()
        for name in self._means if scored != valid else ():
            if values := of_trl.get(name):
                values[-1] = values[-1] * valid / scored if scored else math.nan
        self._valid.append(valid)
        self._scored.append(scored)
        self._sums.update(
            {"tokens": tokens, "rows": rows, "skipped/rows": rows - run, "skipped/tokens": valid - scored}
            | {"replaced": replaced}
        )
        return {"approx_kl": kl_sum / scored if scored else math.nan}

    def merge(self, metrics: MutableMapping[str, list[float]]) -> None:
        """Make one value of those of the micro-batches, before they are logged."""
        weigh_by_tokens(metrics, _VALID_MEANS, self._valid)
        weigh_by_tokens(metrics, ("approx_kl", *self._means), self._scored)
        self._valid.clear()
        self._scored.clear()

    def summarise_window(self, seconds: float, reward_weights: Mapping[str, float]) -> dict[str, float]:
        """Return what is logged of the micro-batches since the last log, and of the run; start a new window.

        Those are tokens and completions per second, generation and scoring included; completions that did not run and
        tokens that were not scored; the weights of the rewards.
        """
        sums, self._sums = self._sums, Counter()
        logs: dict[str, float] = {
            "perf/tokens_per_second": sums["tokens"] / seconds,
            "perf/samples_per_second": sums["rows"] / seconds,
            "skipped/rows": float(sums["skipped/rows"]),
            "skipped/tokens": float(sums["skipped/tokens"]),
            **{f"reward_weights/{name}": weight for name, weight in reward_weights.items()},
        }
        if self.updates_left_out:
            logs["skipped/updates"], self.updates_left_out = self.updates_left_out, 0
        if sums["replaced"]:
            logs["data/prompts_replaced"] = sums["replaced"] / int(self._args.num_generations or 1)
        if self.prompts_too_long:
            logs["data/prompts_too_long"] = self.prompts_too_long
        return logs
