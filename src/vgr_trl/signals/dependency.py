"""How much each generated token depends on what the image shows."""

import math

import torch


def visual_dependency(logps: torch.Tensor, perturbed_logps: torch.Tensor) -> torch.Tensor:
    """Return the visual dependency of each token, in [0, 10]: 0 where the image made no difference.

    With d = clamp(perturbed log-probability - original log-probability, -20, 20), it is clamp(e^d - d - 1, 0, 10), an
    estimate of the KL divergence between the two distributions (VPPO, https://huggingface.co/papers/2510.09285).

    Args:
        logps: (N, T), log-probabilities of the tokens given the image.
        perturbed_logps: (N, T), of the same tokens given the perturbed image, under the same policy.

    Returns:
        (N, T) float32. NaN (undefined) where one of the two is NaN, or both are the same infinity. Gradients flow into
        both arguments, except where the value is clamped.
    """
    difference = (perturbed_logps.float() - logps.float()).clamp(-20, 20)  # (N, T)
    return (torch.expm1(difference) - difference).clamp(0, 10)


def jensen_shannon(logits: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Return the Jensen-Shannon divergence of two distributions, half the KL of each from their mean, in [0, ln 2].

    Args:
        logits: (..., vocabulary), of one.
        others: (..., vocabulary), of the other.

    Returns:
        (...) float32, in nats.
    """
    one, other = torch.log_softmax(logits.float(), -1), torch.log_softmax(others.float(), -1)
    mean = torch.logaddexp(one, other) - math.log(2)
    lowest = torch.finfo(mean.dtype).min  # of words that both forbid, which add nothing
    halves = [(each.exp() * (each.clamp(min=lowest) - mean.clamp(min=lowest))).sum(-1) for each in (one, other)]
    return ((halves[0] + halves[1]) / 2).clamp(0, math.log(2))
