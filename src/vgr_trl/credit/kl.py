"""How far the policy is from its reference, token by token, and the coefficient that follows it."""

import torch

from vgr_trl.config.ranges import check_number
from vgr_trl.errors import ConfigError, DataError

KINDS = ("kl", "abs", "mse", "low_var_kl", "full")
_LARGEST = 10.0  # of `low_var_kl`
_LARGEST_DIFFERENCE = 20.0
_ROUNDING = 1e-6  # below it the sign of a difference is that of float32 rounding


def kl_penalty(logps: torch.Tensor, ref_logps: torch.Tensor, kind: str = "low_var_kl") -> torch.Tensor:
    """Return an estimate of KL(policy ‖ reference) for every token, as EasyR1 and verl define its kinds.

    With d = log π − log π_ref of the sampled token: `kl` is d (k1), `abs` |d| with gradient 0 where |d| < 1e-6,
    `mse` d²/2 (k2), `low_var_kl` is exp(−d) + d − 1 with d clamped to ±20 and the result to 10 (k3; Schulman,
    http://joschu.net/blog/kl-approx.html).
    `full` is the divergence itself, Σ_v π(v) (log π(v) − log π_ref(v)), from the logits of all words.

    Args:
        logps: log-probabilities (N, T) of the tokens; for `full` logits (N, T, vocabulary).
        ref_logps: of the reference, the same shape.
        kind: one of `KINDS`.

    Returns:
        (N, T) float32, with gradients.

    Raises:
        ConfigError: `kind` is unknown.
        DataError: the shapes differ or do not fit `kind`.
    """
    if kind not in KINDS:
        raise ConfigError(f"The kind of KL is {kind!r}: give one of {', '.join(KINDS)}.")
    dimensions = 3 if kind == "full" else 2
    if logps.shape != ref_logps.shape or logps.ndim != dimensions:
        raise DataError(
            f"kl_penalty got tensors of shape {tuple(logps.shape)} and {tuple(ref_logps.shape)} for {kind}: give two "
            f"of shape {'(N, T, vocabulary), the logits' if kind == 'full' else '(N, T), the log-probabilities'}."
        )
    logps, ref_logps = logps.float(), ref_logps.float()
    if kind == "full":
        logps, ref_logps = logps.log_softmax(-1), ref_logps.log_softmax(-1)
        return (logps.exp() * (logps - ref_logps)).sum(-1)
    difference = logps - ref_logps  # (N, T)
    if kind == "kl":
        return difference
    if kind == "abs":
        size = difference.abs()
        return torch.where(size < _ROUNDING, size.detach(), size)
    if kind == "mse":
        return 0.5 * difference.square()
    difference = difference.clamp(-_LARGEST_DIFFERENCE, _LARGEST_DIFFERENCE)
    return (torch.exp(-difference) + difference - 1).clamp(max=_LARGEST)


class FixedKLController:
    """A coefficient that stays as it is."""

    def __init__(self, coefficient: float) -> None:
        check_number("The coefficient of KL", coefficient, 0, 1e30, "of at least 0")
        self.coefficient = coefficient

    def update(self, mean_kl: float, num_samples: int) -> None:
        """Do nothing."""

    def state_dict(self) -> dict[str, float]:
        """Return the coefficient."""
        return {"coefficient": self.coefficient}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Keep the coefficient of this run: a fixed one is an option, not a state."""


class AdaptiveKLController:
    """A coefficient that rises while the KL is above its target and falls while it is below.

    After each update it is multiplied by 1 + clip(KL / target − 1, −0.2, 0.2) · samples / horizon (Ziegler et al.,
    2019, https://arxiv.org/abs/1909.08593).

    Args:
        coefficient: at the start, at least 0.
        target: KL to be kept, in nats, above 0.
        horizon: completions over which the coefficient follows, above 0.
    """

    def __init__(self, coefficient: float, target: float = 6.0, horizon: float = 10_000) -> None:
        check_number("The coefficient of KL", coefficient, 0, 1e30, "of at least 0")
        for name, value in (("target", target), ("horizon", horizon)):
            check_number(f"The {name} of KL", value, 1e-30, 1e30, "above 0")
        self.coefficient, self.target, self.horizon = coefficient, target, horizon

    def update(self, mean_kl: float, num_samples: int) -> None:
        """Take in the mean KL of `num_samples` completions; both must be the same on every process."""
        error = min(max(mean_kl / self.target - 1, -0.2), 0.2)
        self.coefficient *= 1 + error * num_samples / self.horizon

    def state_dict(self) -> dict[str, float]:
        """Return the coefficient."""
        return {"coefficient": self.coefficient}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue with the coefficient of a checkpoint."""
        self.coefficient = state["coefficient"]
