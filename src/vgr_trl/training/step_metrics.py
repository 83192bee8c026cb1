"""What is measured of a training step besides TRL's own metrics."""

import math
from collections.abc import Iterable, MutableMapping, Sequence
from typing import Any

import torch

from vgr_trl.training.host import Host
from vgr_trl.training.rollout import TrainingPass, valid_tokens

_TOKEN_MEANS = (
    "approx_kl",
    "entropy_penalty",
    "perception_loss",
    "perturbed_entropy",
    "kl",
    "kl/mean",
    "entropy",
    "critic/value_loss",
    "critic/clipped",
)
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


def token_means(args: Any) -> tuple[str, ...]:
    """Return the metrics of a micro-batch that are means over its valid tokens, TRL's own among them.

    Args:
        args: a `DAPOConfig`; with importance ratios of sequences, what is clipped is counted by completions.
    """
    by_completion = args.importance_sampling_level == "sequence" and not args.has_token_advantages
    return _TOKEN_MEANS if by_completion else _TOKEN_MEANS + _RATIO_MEANS


def weigh_by_tokens(metrics: MutableMapping[str, list[float]], names: Iterable[str], counts: Sequence[float]) -> None:
    """Replace the values of micro-batches by one mean in which every token counts the same.

    Args:
        metrics: values by name; those that do not have one value for each micro-batch stay as they are.
        names: of the metrics that are means over tokens.
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

    Args:
        host: of which processes and options are read.
    """

    def __init__(self, host: Host) -> None:
        self.host = host
        self._counts: list[float] = []  # valid tokens of each micro-batch
        self._tokens = self._samples = 0.0

    def measure(self, passed: TrainingPass) -> dict[str, float]:
        """Count a micro-batch, over all processes, and return its metrics.

        Args:
            passed: with log-probabilities.
        """
        assert passed.logps is not None
        inputs, logps = passed.inputs, passed.logps.detach()
        mask = valid_tokens(inputs)  # (N, T)
        old_logps = inputs.get("old_per_token_logps", logps)  # TRL leaves them out while they equal the new ones
        kl = approximate_kl(logps, old_logps, mask)  # (N,)
        tokens = inputs["prompt_mask"].sum() + inputs["completion_mask"].sum()
        rows = torch.tensor(mask.size(0), device=mask.device)
        local = torch.stack([kl.sum(), mask.sum().float(), tokens.float(), rows.float()])
        kl_sum, valid, all_tokens, all_rows = self.host.accelerator.reduce(local, reduction="sum").tolist()
        self._counts.append(valid)
        self._tokens += all_tokens
        self._samples += all_rows
        return {"approx_kl": kl_sum / max(valid, 1.0)}

    def merge(self, metrics: MutableMapping[str, list[float]]) -> None:
        """Make one value of those of the micro-batches, before they are logged."""
        weigh_by_tokens(metrics, token_means(self.host.args), self._counts)
        self._counts.clear()

    def rates(self, seconds: float) -> dict[str, float]:
        """Return tokens and completions per second, generation and scoring included, and start a new window."""
        rates = {"perf/tokens_per_second": self._tokens / seconds, "perf/samples_per_second": self._samples / seconds}
        self._tokens = self._samples = 0.0
        return rates
