"""Loss terms beside TRL's: KL divergences of all kinds, perception loss, entropy penalty; and signs of a collapse.

Terms are per token, (N, T), and 0 on invalid tokens: the caller sums and divides them as it does its policy loss.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import mean

import torch

from vgr_trl.signals.dependency import visual_dependency
from vgr_trl.utils import ConfigError, DataError

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
        DataError: the tensors do not fit `kind`.
    """
    if kind not in KINDS:
        raise ConfigError(f"The kind of KL is {kind!r}: give one of {', '.join(KINDS)}.")
    if (logps.ndim == 3) != (kind == "full"):
        wanted = "logits (N, T, vocabulary)" if kind == "full" else "log-probabilities (N, T)"
        raise DataError(f"kl_penalty got a tensor of shape {tuple(logps.shape)} for {kind}: give {wanted}.")
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


def perception_divergence(logps: torch.Tensor, perturbed_logps: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the KL divergence of the policy that sees the image from itself with the perturbed one, token by token.

    It is the `visual_dependency` with gradients, which are 0 where that is clamped (at 10, or at a difference of 20).

    Args:
        logps: (N, T), log-probabilities of the completion tokens given the image.
        perturbed_logps: (N, T), of the same tokens given the perturbed image, under the same policy.
        mask: (N, T) bool, valid tokens; what stands elsewhere is not read, NaN included.

    Returns:
        (N, T) float32 in [0, 10], 0 outside `mask`.
    """
    mask = mask.bool()
    return visual_dependency(logps.masked_fill(~mask, 0), perturbed_logps.masked_fill(~mask, 0))


def surprisal(logps: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return -log p of every valid token, 0 elsewhere: for tokens that the policy has sampled, a guess of its entropy.

    Args:
        logps: (N, T), log-probabilities of the completion tokens.
        mask: (N, T) bool, valid tokens.
    """
    return -logps.float().masked_fill(~mask.bool(), 0)


def perception_loss(
    logps: torch.Tensor,
    perturbed_logps: torch.Tensor,
    mask: torch.Tensor,
    *,
    coefficient: float = 0.01,
    entropy_coefficient: float = 0.0,
    perturbed_entropy_coefficient: float = 0.0,
) -> torch.Tensor:
    """Return the implicit perception loss and double entropy loss of PAPO (https://huggingface.co/papers/2507.06448).

    -gamma · KL(original, perturbed) - eta_1 · log p_original - eta_2 · log p_perturbed: minimising it makes the
    completion depend on the image, while the entropy terms keep both distributions sharp, without which the policy can
    win by writing unrelated tokens. Gradients flow through both log-probabilities. In the published code the perturbed
    ones carry none by default, so that its entropy term on them trains nothing.

    Args:
        logps: (N, T), log-probabilities of the completion tokens given the image.
        perturbed_logps: (N, T), of the same tokens given the perturbed image, under the same policy.
        mask: (N, T) bool, valid tokens; what stands elsewhere is not read, NaN included.
        coefficient: gamma, at least 0. The paper uses 0.01 and 0.02 and saw collapse at 0.04.
        entropy_coefficient: eta_1, at least 0. The paper uses 0.03 and 0.05.
        perturbed_entropy_coefficient: eta_2, at least 0, likewise.

    Returns:
        (N, T) float32, the loss of each token, 0 outside `mask`.
    """
    divergence = perception_divergence(logps, perturbed_logps, mask)
    return (
        entropy_coefficient * surprisal(logps, mask)
        + perturbed_entropy_coefficient * surprisal(perturbed_logps, mask)
        - coefficient * divergence
    )


def entropy_penalty(logps: torch.Tensor, mask: torch.Tensor, coefficient: float = 0.06) -> torch.Tensor:
    """Return the entropy penalty of VPPO per token, coefficient · -log p (https://huggingface.co/papers/2510.09285).

    Args:
        logps: (N, T), log-probabilities of the completion tokens.
        mask: (N, T) bool, valid tokens.
        coefficient: at least 0.

    Returns:
        (N, T) float32, the loss of each token, 0 outside `mask`; its mean over the valid tokens is the penalty.
    """
    return coefficient * surprisal(logps, mask)


# What PAPO (https://huggingface.co/papers/2507.06448) calls early signs of KL hacking: the perception loss is won by
# breaking the policy.
_CLIPPED = ("clip_ratio/high_mean", "cispo_clip_ratio")

_SHORTEST_HISTORY = 8
_COLLAPSES = 0.04
_COLLAPSES_WITHOUT_ENTROPY_TERMS = 0.02  # 7B models did, 3B models did not


def coefficient_warning(
    coefficient: float, entropy_coefficient: float = 0.0, perturbed_entropy_coefficient: float = 0.0
) -> str | None:
    """Return one sentence if the perception loss has a coefficient at which the paper saw collapse, else None.

    Args:
        coefficient: weight of the perception loss (gamma), at least 0.
        entropy_coefficient: weight of the entropy of the original tokens (eta_1), at least 0.
        perturbed_entropy_coefficient: weight of the entropy given the perturbed image (eta_2), at least 0.
    """
    if coefficient >= _COLLAPSES:
        return (
            f"The coefficient of the perception loss is {coefficient}, and runs collapsed at {_COLLAPSES}: use "
            f"{_COLLAPSES_WITHOUT_ENTROPY_TERMS} or less."
        )
    if coefficient >= _COLLAPSES_WITHOUT_ENTROPY_TERMS and min(entropy_coefficient, perturbed_entropy_coefficient) <= 0:
        return (
            f"The coefficient of the perception loss is {coefficient} without both entropy terms, and 7B models "
            f"collapsed so at {_COLLAPSES_WITHOUT_ENTROPY_TERMS}: lower it, or set both entropy coefficients to about "
            "0.03."
        )
    return None


def collapse_warning(history: Sequence[Mapping[str, float]]) -> str | None:
    """Return one sentence naming the signs of collapse in the newest quarter of the history, or None.

    All signs must be there: the mean perception loss of the newest quarter has fallen below twice the lowest value
    before (it is the negative divergence), and the means of both entropies and of the clipped fraction have risen
    above the highest values before. A clipped fraction that is missing, or 0 throughout (one optimizer step per
    rollout has no ratio to clip), is no sign either way.

    Args:
        history: metrics of consecutive steps, oldest first; at least 8, better 20 to 50. Read are `perception_loss`
            (negative mean divergence, without its coefficient), `entropy`, `perturbed_entropy` and
            `clip_ratio/high_mean` (or `cispo_clip_ratio`). Steps that lack a value or have NaN do not count for it.
    """
    signs = []
    for name in ("perception_loss", "entropy", "perturbed_entropy", *_CLIPPED):
        values = [step[name] for step in history if not math.isnan(step.get(name, math.nan))]
        if name in _CLIPPED and (len(values) < _SHORTEST_HISTORY or not any(values)):
            continue
        if len(values) < _SHORTEST_HISTORY:
            return None
        newest = len(values) // 4
        before, now = values[:-newest], mean(values[-newest:])
        fell = name == "perception_loss"
        if not (now < 2 * min(*before, 0.0) if fell else now > max(before)):
            return None
        signs.append(f"{name} {'fell' if fell else 'rose'} from {mean(before):.3g} to {now:.3g}")
    return (
        f"The policy shows the signs of a collapse caused by the perception loss: {', '.join(signs)}; go back to an "
        "earlier checkpoint with a lower coefficient, or with higher weights of both entropy terms."
    )
