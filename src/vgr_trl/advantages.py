"""Advantages from rewards: five estimators that compare the completions of a prompt, and GAE with a critic.

Rewards of all processes come prompt by prompt. Means and deviations leave out NaN rewards (no reward function applied),
whose completions get advantage 0. Where a formula is undefined, because fewer than two completions of a group have a
reward, the advantages are 0.
"""

from typing import cast

import torch
from torch import Tensor

from vgr_trl.metrics.step_metrics import Gather


def estimate_advantages(
    rewards: Tensor,
    num_generations: int,
    estimator: str = "grpo",
    baseline: Tensor | None = None,
    trained: Tensor | None = None,
) -> Tensor:
    """Estimate the advantage of each completion.

    With mean and standard deviation (n - 1) over the group, A[i] is

    - `grpo`: (r - mean) / (std + 1e-4), as TRL computes it for `scale_rewards="group"`
      (https://huggingface.co/papers/2402.03300), or with the std of all `trained` rewards, as for `"batch"`;
    - `rloo`: r - mean of the others of the group (https://huggingface.co/papers/2402.14740);
    - `remax`: r - reward of the prompt's greedy completion (https://huggingface.co/papers/2310.10505);
    - `reinforce_plus_plus`: c / (std of c over all trained groups + 1e-8) with c = r - mean
      (https://huggingface.co/papers/2501.03262, its variant with a baseline);
    - `grpo_passk`: for the best of the group (best - second best) / (std + 1e-6), for the others 0
      (https://huggingface.co/papers/2503.19595).

    Args:
        rewards: weighted sums of the rewards, (num_groups * G,), NaN for a completion without a reward.
        num_generations: G, completions per prompt, at least 1.
        estimator: one of the names above.
        baseline: reward of each prompt's greedy completion, (num_groups,), for `remax`; else None.
        trained: rewards of the groups that are trained on, (any number of groups * G,). For `reinforce_plus_plus`,
            None means `rewards`; for `grpo`, None means one deviation per group.

    Returns:
        (num_groups * G,), finite for finite or NaN rewards.
    """
    # In double precision the mean of equal rewards equals them; a rounding error would be divided by a tiny deviation.
    groups = rewards.double().view(-1, num_generations)  # (num_groups, G)
    centred, count = _centre(groups), _count(groups)
    if estimator == "grpo":
        advantages = centred / (row_std(groups if trained is None else trained.double().view(1, -1)) + 1e-4)
    elif estimator == "rloo":
        # The distance to the mean of the others is n / (n - 1) times the distance to the mean of all.
        advantages = torch.where(count > 1, centred * count / (count - 1), torch.nan)
    elif estimator == "remax":
        advantages = groups - cast("Tensor", baseline).unsqueeze(1)
    elif estimator == "reinforce_plus_plus":
        batch = groups if trained is None else trained.double().view(-1, num_generations)
        advantages = centred / (row_std(_centre(batch).view(1, -1)) + 1e-8)
    elif num_generations < 2:
        advantages = torch.zeros_like(groups)
    else:
        best, which = groups.nan_to_num(nan=-torch.inf).topk(2, dim=1)  # (num_groups, 2)
        lead = (best[:, :1] - best[:, 1:]) / (row_std(groups) + 1e-6)  # 0 where two are equally good
        advantages = torch.zeros_like(groups).scatter(1, which[:, :1], lead)
    return torch.nan_to_num(advantages, nan=0.0).view(-1).to(rewards.dtype)


def _count(rewards: Tensor) -> Tensor:
    return (~rewards.isnan()).sum(dim=1, keepdim=True)


def _centre(rewards: Tensor) -> Tensor:
    return rewards - rewards.nanmean(dim=1, keepdim=True)


def row_std(rewards: Tensor) -> Tensor:
    """Return each row's standard deviation (n - 1), ignoring NaN, (rows, 1); NaN for fewer than two values."""
    count = _count(rewards)
    variance = (_centre(rewards) ** 2).nanmean(dim=1, keepdim=True) * (count / (count - 1))
    return torch.where(count > 1, variance.sqrt(), torch.nan)


def priority(advantages: Tensor, rewards: Tensor) -> Tensor:
    """Multiply each group's sum of |advantages| (num_groups, G) by its reward deviation, (num_groups,) float64."""
    return advantages.double().abs().sum(dim=1) * row_std(rewards.double()).squeeze(1)


def group_spread(advantages: Tensor, rewards: Tensor, estimator: str = "grpo") -> Tensor:
    """Return each group's spread: std of the rewards or max |advantage|, (num_groups,); 0 without a gradient.

    Args:
        advantages: (num_groups, G).
        rewards: weighted sums, (num_groups, G), NaN for a completion without a reward; the deviation of fewer than two
            rewards is NaN.
        estimator: `grpo` takes the standard deviation, the others the largest |advantage|.
    """
    return row_std(rewards.double()).squeeze(1) if estimator == "grpo" else advantages.double().abs().amax(dim=1)


@torch.no_grad()
def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float = 1.0, lam: float = 1.0) -> tuple[Tensor, Tensor]:
    """Estimate advantages and returns of every token (Schulman et al., 2016, https://arxiv.org/abs/1506.02438).

    A[t] = δ[t] + γ λ A[t'] with δ[t] = r[t] + γ V[t'] − V[t], where t' is the next valid token and V = A = 0 after the
    last valid token; the return is A + V.

    Args:
        rewards: (N, T), reward of each token.
        values: (N, T), the critic's value before each token is chosen.
        mask: (N, T) bool, valid tokens; other entries are not read, NaN included.
        gamma: discount, in [0, 1].
        lam: λ, in [0, 1].

    Returns:
        Advantages and returns, (N, T) float32 each, 0 outside `mask`; not whitened.
    """
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


def token_rewards(rewards: Tensor, mask: Tensor, penalties: Tensor | None = None) -> Tensor:
    """Place each completion's reward at its last valid token, and add a penalty per token.

    Args:
        rewards: (N,), rewards of the completions; NaN for a completion without a reward.
        mask: (N, T) bool, valid tokens.
        penalties: (N, T), added to the rewards of valid tokens; None: no penalties.

    Returns:
        (N, T) float32, 0 outside `mask`.
    """
    mask = mask.bool()
    last = mask & (mask.flip(1).cumsum(1).flip(1) == 1)  # (N, T)
    rewards_of_tokens = torch.zeros_like(mask, dtype=torch.float32)
    if penalties is not None:
        rewards_of_tokens = penalties.float().masked_fill(~mask, 0)
    return torch.where(last, rewards_of_tokens + rewards.float().unsqueeze(1), rewards_of_tokens)


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, cliprange: float) -> Tensor:
    """Return the clipped value loss of every token (PPO's, as in EasyR1 and verl).

    The loss is half the larger of two squared errors: of V, and of V clamped to within `cliprange` of the rollout's V.

    Args:
        values: (N, T), with gradients.
        old_values: (N, T), values of the critic that the advantages were computed with.
        returns: (N, T), targets of the values.
        mask: (N, T) bool, valid tokens; other entries are not read, NaN included.
        cliprange: largest change of a value, above 0.

    Returns:
        (N, T) float32, 0 outside `mask`: the caller sums and divides as for its policy loss.
    """
    mask = mask.bool()
    values, old_values, returns = (tensor.float().masked_fill(~mask, 0) for tensor in (values, old_values, returns))
    clipped = values.clamp(old_values - cliprange, old_values + cliprange)
    return 0.5 * torch.maximum((values - returns).square(), (clipped - returns).square())


def whiten(values: Tensor, mask: Tensor, gather: Gather | None = None) -> Tensor:
    """Whiten values as verl whitens advantages: (x − mean) / √(variance + 1e-8) over all processes' valid tokens.

    Args:
        values: (N, T).
        mask: (N, T) bool, valid tokens; other entries are not read, NaN included.
        gather: concatenates a 1-D tensor over all processes; called three times. None: there is one process.

    Returns:
        (N, T) float32, 0 outside `mask`. The variance divides by n − 1.
    """
    mask = mask.bool()
    values = values.double().masked_fill(~mask, 0)

    def total(local: Tensor) -> Tensor:
        return local if gather is None else gather(local.view(1)).sum()

    count = total(mask.sum())
    centred = values - total(values.sum()) / count.clamp(min=1)
    variance = total((centred.square() * mask).sum()) / (count - 1).clamp(min=1)
    return (centred / (variance + 1e-8).sqrt() * mask).float()
