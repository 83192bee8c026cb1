"""How the completions of a prompt are compared: rewards become advantages, by one of five estimators.

Rewards are those of all processes, prompt-major. A NaN reward (no reward function applied) takes part in no mean and no
deviation, and its completion gets advantage 0. Where a formula is undefined, because fewer than two completions of a
group have a reward, the advantages are 0.
"""

from collections.abc import Callable

import torch

from vgr_trl.errors import ConfigError, DataError


def estimate_advantages(
    rewards: torch.Tensor,
    num_generations: int,
    estimator: str = "grpo",
    baseline: torch.Tensor | None = None,
    trained: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the advantage of each completion.

    With mean and standard deviation (n - 1) over the group, A[i] is

    - `grpo`: (r - mean) / (std + 1e-4), as TRL has it for `scale_rewards="group"`
      (https://huggingface.co/papers/2402.03300);
    - `rloo`: r - mean of the others of the group (https://huggingface.co/papers/2402.14740);
    - `remax`: r - reward of the prompt's greedy completion (https://huggingface.co/papers/2310.10505);
    - `reinforce_plus_plus`: c / (std of all c that are trained on + 1e-8) with c = r - mean
      (https://huggingface.co/papers/2501.03262, its variant with a baseline);
    - `grpo_passk`: for the best of the group (best - second best) / (std + 1e-6), for the others 0
      (https://huggingface.co/papers/2503.19595).

    Args:
        rewards: weighted sums of the rewards, (num_groups * G,), NaN for a completion without one.
        num_generations: G, completions per prompt, at least 1.
        estimator: one of the names above.
        baseline: for `remax`, the reward of each prompt's greedy completion, (num_groups,); else None.
        trained: for `reinforce_plus_plus`, the rewards of the groups that are trained on, where those are not the
            groups at hand, (any number of groups * G,).

    Returns:
        (num_groups * G,), finite for finite or NaN rewards.

    Raises:
        ConfigError: there is no such estimator, or a baseline is missing or not used.
        DataError: the rewards are not those of whole groups, or the baseline is not one per group.
    """
    if estimator not in _ESTIMATORS:
        raise ConfigError(f"advantage_estimator is {estimator!r}: give one of {', '.join(ESTIMATORS)}.")
    if (estimator == "remax") != (baseline is not None):
        raise ConfigError(
            f"advantage_estimator is {estimator!r} and the baseline is {'given' if baseline is not None else 'None'}: "
            "remax, and no other estimator, takes the rewards of greedy completions as its baseline."
        )
    if rewards.ndim != 1 or num_generations < 1 or len(rewards) % num_generations:
        raise DataError(
            f"The rewards have the shape {tuple(rewards.shape)} with num_generations {num_generations}: give those of "
            "whole groups, one number per completion."
        )
    # In double precision the mean of equal rewards is that reward; rounding, divided by a tiny deviation, would count.
    groups = rewards.double().view(-1, num_generations)  # (num_groups, G)
    if baseline is not None and baseline.shape != (len(groups),):
        raise DataError(
            f"The baseline has the shape {tuple(baseline.shape)} for {len(groups)} groups: give one reward per prompt."
        )
    if baseline is not None:
        advantages = _remax(groups, baseline)
    elif trained is not None and estimator == "reinforce_plus_plus":
        advantages = _reinforce_plus_plus(groups, trained.double().view(-1, num_generations))
    else:
        advantages = _ESTIMATORS[estimator](groups)
    return torch.nan_to_num(advantages, nan=0.0).view(-1).to(rewards.dtype)


def _grpo(rewards: torch.Tensor) -> torch.Tensor:
    return _centred(rewards) / (_std(rewards) + 1e-4)


def _rloo(rewards: torch.Tensor) -> torch.Tensor:
    count = _count(rewards)  # (num_groups, 1)
    # The mean of the others differs from the reward by n / (n - 1) times what the mean of all does.
    return torch.where(count > 1, _centred(rewards) * count / (count - 1), torch.nan)


def _remax(rewards: torch.Tensor, baseline: torch.Tensor) -> torch.Tensor:
    return rewards - baseline.unsqueeze(1)


def _reinforce_plus_plus(rewards: torch.Tensor, trained: torch.Tensor | None = None) -> torch.Tensor:
    deviation = _std(_centred(rewards if trained is None else trained).view(1, -1))
    return _centred(rewards) / (deviation + 1e-8)


def _grpo_passk(rewards: torch.Tensor) -> torch.Tensor:
    if rewards.size(1) < 2:
        return torch.zeros_like(rewards)
    best, which = rewards.nan_to_num(nan=-torch.inf).topk(2, dim=1)  # (num_groups, 2)
    lead = (best[:, :1] - best[:, 1:]) / (_std(rewards) + 1e-6)  # 0 where two are equally good
    return torch.zeros_like(rewards).scatter(1, which[:, :1], lead)


_ESTIMATORS: dict[str, Callable[..., torch.Tensor]] = {
    "grpo": _grpo,
    "rloo": _rloo,
    "remax": _remax,
    "reinforce_plus_plus": _reinforce_plus_plus,
    "grpo_passk": _grpo_passk,
}
ESTIMATORS = tuple(_ESTIMATORS)


def _count(rewards: torch.Tensor) -> torch.Tensor:
    """Values per row that are not NaN, (rows, 1)."""
    return (~rewards.isnan()).sum(dim=1, keepdim=True)


def _centred(rewards: torch.Tensor) -> torch.Tensor:
    return rewards - rewards.nanmean(dim=1, keepdim=True)


def _std(rewards: torch.Tensor) -> torch.Tensor:
    """Standard deviation (n - 1) along the rows, (rows, 1); NaN for fewer than two values."""
    count = _count(rewards)
    variance = (_centred(rewards) ** 2).nanmean(dim=1, keepdim=True) * (count / (count - 1))
    return torch.where(count > 1, variance.sqrt(), torch.nan)
