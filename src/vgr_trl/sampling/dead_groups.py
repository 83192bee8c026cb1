"""Which groups of a rollout batch carry no gradient, or are not wanted.

All tensors are of all processes, prompt-major, so that every process finds the same groups.
"""

from collections.abc import Sequence

import torch

from vgr_trl.errors import ConfigError


def dead_groups(
    advantages: torch.Tensor,
    rewards: torch.Tensor,
    num_generations: int,
    *,
    estimator: str = "grpo",
    epsilon: float = 1e-6,
) -> list[int]:
    """Return the numbers of the groups without a gradient.

    A group is dead when its largest |advantage| is at most `epsilon`; for `grpo`, whose advantages are divided by the
    deviation of the rewards, when that deviation is. A group with fewer than two rewards is dead for `grpo`.

    Args:
        advantages: (num_groups * G,).
        rewards: weighted sums, (num_groups * G,), NaN for a completion without any.
        epsilon: at least 0.
    """
    return _numbers(~(signal(advantages, rewards, num_generations, estimator=estimator) > epsilon))


def signal(
    advantages: torch.Tensor, rewards: torch.Tensor, num_generations: int, *, estimator: str = "grpo"
) -> torch.Tensor:
    """Return what a dead group has none of, (num_groups,): the deviation of its rewards, or its largest |advantage|.

    Args: as for `dead_groups`.
    """
    if estimator == "grpo":
        return group_std(rewards, num_generations)
    return advantages.detach().double().view(-1, num_generations).abs().amax(dim=1)


def group_std(rewards: torch.Tensor, num_generations: int) -> torch.Tensor:
    """Return the standard deviation (n - 1) of rewards per group, (num_groups,): NaN left out, 0 for fewer than 2."""
    groups = rewards.detach().double().view(-1, num_generations)
    count = (~groups.isnan()).sum(dim=1)
    squares = (groups - groups.nanmean(dim=1, keepdim=True)).square().nansum(dim=1)
    return torch.where(count > 1, (squares / (count - 1)).sqrt(), 0.0)


def filtered_groups(
    rewards: torch.Tensor, num_generations: int, *, low: float, high: float, inclusive: bool = False
) -> list[int]:
    """Return the numbers of the groups whose mean reward is not between `low` and `high`.

    A group without any reward is among them. The filter of PRIME (https://huggingface.co/papers/2502.01456).

    Args:
        rewards: one number per completion, (num_groups * G,), NaN for one without; see `filter_rewards`.
        inclusive: whether a mean at a bound is between them.
    """
    means = group_means(rewards, num_generations)
    inside = (means >= low) & (means <= high) if inclusive else (means > low) & (means < high)
    return _numbers(~inside)


def quantile_bounds(rewards: torch.Tensor, num_generations: int, *, low: float, high: float) -> tuple[float, float]:
    """Return two quantiles of the mean rewards of groups, interpolated linearly; NaN if no group has a reward.

    Args:
        rewards: as for `filtered_groups`, of the groups that are compared.
        low: in [0, 1].
        high: in [0, 1].
    """
    means = group_means(rewards, num_generations)
    return means.nanquantile(low).item(), means.nanquantile(high).item()


def group_means(rewards: torch.Tensor, num_generations: int) -> torch.Tensor:
    """Return the mean reward of each group, (num_groups,) float64; NaN left out, and NaN for a group without any."""
    return rewards.detach().double().view(-1, num_generations).nanmean(dim=1)


def filter_rewards(
    key: str, names: Sequence[str], rewards_per_func: torch.Tensor, rewards: torch.Tensor
) -> torch.Tensor:
    """Return the rewards that online filtering looks at, (num_groups * G,).

    Args:
        key: `overall`, the name of a reward function with or without its last part (`accuracy` for `accuracy_reward`),
            or a part of it between underscores that no other has.
        rewards_per_func: unweighted, (num_groups * G, number of functions).
        rewards: weighted sums, (num_groups * G,).

    Raises:
        ConfigError: no reward function, or more than one, has that name.
    """
    index = filter_index(key, names)
    return rewards if index is None else rewards_per_func[:, index]


def filter_index(key: str, names: Sequence[str]) -> int | None:
    """Return the position of the reward function that `key` names, None for `overall`; see `filter_rewards`."""
    if key == "overall":
        return None
    found = [index for index, name in enumerate(names) if name in (key, f"{key}_reward")]
    found = found or [index for index, name in enumerate(names) if key in name.split("_")]
    if len(found) != 1:
        raise ConfigError(
            f"filter_key is {key!r}, which names {len(found)} reward functions: give overall or one of "
            f"{', '.join(names)}."
        )
    return found[0]


def _numbers(chosen: torch.Tensor) -> list[int]:
    return chosen.nonzero().flatten().tolist()
