"""What is measured of a training step besides TRL's own metrics."""

import math
from collections.abc import Iterable, MutableMapping, Sequence
from typing import Any

import torch

_TOKEN_MEANS = ("approx_kl", "entropy_penalty", "perception_loss", "perturbed_entropy", "kl", "entropy")
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
    by_completion = args.importance_sampling_level == "sequence" and not args.shapes_advantages
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


class Throughput:
    """Counts of a logging window, turned into rates."""

    def __init__(self) -> None:
        self.tokens = 0.0
        self.samples = 0.0

    def add(self, tokens: float, samples: float) -> None:
        """Count what one micro-batch trained on, over all processes: prompt and completion tokens, completions."""
        self.tokens += tokens
        self.samples += samples

    def rates(self, seconds: float) -> dict[str, float]:
        """Return tokens and completions per second, generation and scoring included, and start a new window."""
        rates = {"perf/tokens_per_second": self.tokens / seconds, "perf/samples_per_second": self.samples / seconds}
        self.tokens = self.samples = 0.0
        return rates
