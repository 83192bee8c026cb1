"""What is measured of a training step besides TRL's own metrics."""

import torch


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
