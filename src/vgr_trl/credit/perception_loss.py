"""Loss terms that are no advantages: PAPO's implicit perception loss, and the entropy penalty.

All are per token, (N, T), and 0 on invalid tokens: the caller sums and divides them as it does its policy loss.
"""

import torch

from vgr_trl.config.ranges import check_number
from vgr_trl.credit.masked import check_shapes
from vgr_trl.signals.dependency import visual_dependency

_LARGEST = 1e30


def perception_divergence(logps: torch.Tensor, perturbed_logps: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the KL divergence of the policy that sees the image from itself with the perturbed one, token by token.

    It is the `visual_dependency` with gradients, which are 0 where that is clamped (at 10, or at a difference of 20).

    Args:
        logps: (N, T), log-probabilities of the completion tokens given the image.
        perturbed_logps: (N, T), of the same tokens given the perturbed image, under the same policy.
        mask: (N, T) bool, valid tokens; what stands elsewhere is not read, NaN included.

    Returns:
        (N, T) float32 in [0, 10], 0 outside `mask`.

    Raises:
        DataError: the shapes differ.
    """
    check_shapes("perception_divergence", mask, logps=logps, perturbed_logps=perturbed_logps)
    mask = mask.bool()
    return visual_dependency(logps.masked_fill(~mask, 0), perturbed_logps.masked_fill(~mask, 0))


def surprisal(logps: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return -log p of every valid token, 0 elsewhere: for tokens that the policy has sampled, a guess of its entropy.

    Args:
        logps: (N, T), log-probabilities of the completion tokens.
        mask: (N, T) bool, valid tokens.

    Raises:
        DataError: the shapes differ.
    """
    check_shapes("surprisal", mask, logps=logps)
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

    Raises:
        ConfigError: a coefficient is out of range.
        DataError: the shapes differ.
    """
    check_number("coefficient", coefficient, 0, _LARGEST, "of at least 0")
    check_number("entropy_coefficient", entropy_coefficient, 0, _LARGEST, "of at least 0")
    check_number("perturbed_entropy_coefficient", perturbed_entropy_coefficient, 0, _LARGEST, "of at least 0")
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

    Raises:
        ConfigError: `coefficient` is out of range.
        DataError: the shapes differ.
    """
    check_number("coefficient", coefficient, 0, _LARGEST, "of at least 0")
    return coefficient * surprisal(logps, mask)
