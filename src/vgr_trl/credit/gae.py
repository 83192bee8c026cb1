"""Advantages by a critic: generalised advantage estimation, their whitening, and the loss of the values."""

import torch

from vgr_trl.config.ranges import check_number
from vgr_trl.credit.masked import check_shapes
from vgr_trl.credit.trajectory import Gather


@torch.no_grad()
def gae(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, gamma: float = 1.0, lam: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return advantages and returns of every token (Schulman et al., 2016, https://arxiv.org/abs/1506.02438).

    A[t] = δ[t] + γ λ A[t'] with δ[t] = r[t] + γ V[t'] − V[t], where t' is the next valid token and V = A = 0 behind the
    last one; the return is A + V.

    Args:
        rewards: (N, T), of each token.
        values: (N, T), the critic's, before the token is chosen.
        mask: (N, T) bool, valid tokens; what stands elsewhere is not read, NaN included.
        gamma: discount, in [0, 1].
        lam: λ, in [0, 1].

    Returns:
        advantages and returns, (N, T) float32 each, 0 outside `mask`; not whitened.

    Raises:
        ConfigError: `gamma` or `lam` is out of range.
        DataError: the shapes differ.
    """
    check_shapes("gae", mask, rewards=rewards, values=values)
    check_number("gamma", gamma, 0, 1, "in [0, 1]")
    check_number("lam", lam, 0, 1, "in [0, 1]")
    mask = mask.bool()
    rewards, values = rewards.float().masked_fill(~mask, 0), values.float().masked_fill(~mask, 0)
    advantages = torch.zeros_like(values)  # (N, T)
    next_advantage = next_value = values.new_zeros(len(values))  # (N,)
    for token in reversed(range(values.size(1))):
        valid = mask[:, token]
        advantage = rewards[:, token] + gamma * next_value - values[:, token] + gamma * lam * next_advantage
        next_advantage = torch.where(valid, advantage, next_advantage)
        next_value = torch.where(valid, values[:, token], next_value)
        advantages[:, token] = advantage.masked_fill(~valid, 0)
    return advantages, (advantages + values).masked_fill(~mask, 0)


def token_rewards(rewards: torch.Tensor, mask: torch.Tensor, penalties: torch.Tensor | None = None) -> torch.Tensor:
    """Return the reward of every token: that of the completion at its last valid token, and a penalty at each.

    Args:
        rewards: (N,), of the completions; NaN for one without.
        mask: (N, T) bool, valid tokens.
        penalties: (N, T), added to the rewards of valid tokens; None: there are none.

    Returns:
        (N, T) float32, 0 outside `mask`.

    Raises:
        DataError: the shapes differ.
    """
    mask = mask.bool()
    last = mask & (mask.flip(1).cumsum(1).flip(1) == 1)  # (N, T)
    found = torch.zeros_like(mask, dtype=torch.float32)
    if penalties is not None:
        check_shapes("token_rewards", mask, penalties=penalties)
        found = penalties.float().masked_fill(~mask, 0)
    return torch.where(last, found + rewards.float().unsqueeze(1), found)


def value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor, cliprange: float
) -> torch.Tensor:
    """Return the loss of the values for every token: half the larger of two squared errors.

    One is that of V, the other that of V held within `cliprange` of the value at which the rollout was judged
    (PPO's clipped value loss, as in EasyR1 and verl).

    Args:
        values: (N, T), with gradients.
        old_values: (N, T), of the critic that the advantages are from.
        returns: (N, T).
        mask: (N, T) bool, valid tokens; what stands elsewhere is not read, NaN included.
        cliprange: above 0.

    Returns:
        (N, T) float32, 0 outside `mask`: the caller sums and divides as for its policy loss.

    Raises:
        ConfigError: `cliprange` is out of range.
        DataError: the shapes differ.
    """
    check_shapes("value_loss", mask, values=values, old_values=old_values, returns=returns)
    check_number("cliprange_value", cliprange, 1e-30, 1e30, "above 0")
    mask = mask.bool()
    values, old_values, returns = (tensor.float().masked_fill(~mask, 0) for tensor in (values, old_values, returns))
    clipped = values.clamp(old_values - cliprange, old_values + cliprange)
    return 0.5 * torch.maximum((values - returns).square(), (clipped - returns).square())


def whiten(values: torch.Tensor, mask: torch.Tensor, gather: Gather | None = None) -> torch.Tensor:
    """Return (x − mean) / √(variance + 1e-8) over the valid tokens of all processes, as verl whitens advantages.

    Args:
        values: (N, T).
        mask: (N, T) bool, valid tokens; what stands elsewhere is not read, NaN included.
        gather: returns the concatenation of a 1-D tensor over all processes; called three times. None: there is one.

    Returns:
        (N, T) float32, 0 outside `mask`. The variance is that of a sample (n − 1).

    Raises:
        DataError: the shapes differ.
    """
    check_shapes("whiten", mask, values=values)
    mask = mask.bool()
    values = values.double().masked_fill(~mask, 0)

    def total(local: torch.Tensor) -> torch.Tensor:
        return local if gather is None else gather(local.view(1)).sum()

    count = total(mask.sum())
    centred = values - total(values.sum()) / count.clamp(min=1)
    variance = total((centred.square() * mask).sum()) / (count - 1).clamp(min=1)
    return (centred / (variance + 1e-8).sqrt() * mask).float()
