"""Find zero-variance groups, and groups that online filtering leaves out."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from accelerate import PartialState
from transformers.utils import logging

from vgr_trl.advantages import estimate_advantages
from vgr_trl.checkpoints import load_shares, save_share
from vgr_trl.credit import masked_mean
from vgr_trl.patches.trl import replace_newest
from vgr_trl.rollout import ConstructedTrainer, GroupSelection, Rollout, weighted_sums
from vgr_trl.rows import Placement, valid_tokens
from vgr_trl.utils import ConfigError

if TYPE_CHECKING:
    from vgr_trl.dapo_config import DAPOConfig


logger = logging.get_logger(__name__)


def find_zero_variance(
    trainer: ConstructedTrainer, rollout: Rollout, bounds: tuple[float, float] | None = None
) -> GroupSelection:
    """Find advantages by the estimator and the groups without a gradient; correct the advantages of batch and table.

    Args:
        bounds: quantiles of online filtering, those of the first round.
    """
    args, accelerator, size = trainer.args, trainer.accelerator, int(trainer.args.num_generations or 1)
    rows = len(rollout.batch["prompt_ids"])
    placement = Placement(rows, size, accelerator.process_index, accelerator.num_processes)
    rewards = weighted_sums(rollout.rewards, trainer.reward_weights)
    tasks = rollout.rewards[:, :-1] if args.penalises_kl else rollout.rewards
    task_rewards = weighted_sums(tasks, trainer.reward_weights[: tasks.size(1)])
    selection = GroupSelection(placement, rewards, task_rewards, accelerator.gather(rollout.batch["advantages"]))
    zero_variance, baseline = list[int](), None
    if trainer.critic is not None:
        of_tokens = rollout.batch["token_advantages"].nan_to_num()  # (N, T)
        selection.advantages = accelerator.gather(masked_mean(of_tokens, valid_tokens(rollout.batch)).squeeze(1))
    elif args.advantage_estimator != "grpo":
        if args.advantage_estimator == "remax":
            baseline = greedy_baseline(trainer, rollout, placement)
        selection.advantages = estimate_advantages(rewards, size, args.advantage_estimator, baseline)
    if args.advantage_estimator != "grpo":
        rollout.batch = {**rollout.batch, "advantages": selection.local_advantages}
        replace_newest(trainer._logs["advantages"], selection.advantages.tolist())
    if trainer.critic is None:
        estimator, epsilon, advantages = args.advantage_estimator, args.replay_var_epsilon, selection.advantages
        if args.penalises_kl:  # its differences within a group say nothing about the task
            advantages = estimate_advantages(task_rewards, size, estimator, baseline)
        zero_variance = zero_variance_groups(advantages, task_rewards, size, estimator=estimator, epsilon=epsilon)
    filtered: list[int] = []
    if args.online_filtering:
        index = filter_index(args.filter_key, trainer.reward_func_names)
        compared = task_rewards if index is None else rollout.rewards[:, index]
        selection.bounds = bounds or (args.filter_low, args.filter_high)
        if args.filter_mode == "quantile" and bounds is None:
            selection.bounds = quantile_bounds(compared, size, low=args.filter_low, high=args.filter_high)
        low, high = selection.bounds
        inclusive = args.filter_mode == "quantile"
        filtered = filtered_groups(compared, size, low=low, high=high, inclusive=inclusive)
    selection.filtered = sorted(set(filtered).difference(zero_variance))
    trainer.zero_variance_streak.add(placement.num_groups, len(zero_variance), len(selection.filtered))
    selection.dropped = sorted({*zero_variance, *filtered})
    rollout.selection = selection
    return selection


def greedy_baseline(trainer: ConstructedTrainer, rollout: Rollout, placement: Placement) -> torch.Tensor:
    """Return the reward of one greedy completion per prompt for ReMax, (num_groups,), the same on every process.

    The process with a prompt's first completion generates it. Rewards that compare a group count as 0. Every process
    generates equally often and equally much; nothing of it is logged.
    """
    firsts = [
        [group for group in range(placement.num_groups) if placement.holder(group) == process]
        for process in range(placement.num_processes)
    ]
    most, first_row = max(map(len, firsts)), placement.process_index * placement.rows
    mine = [group * placement.num_generations - first_row for group in firsts[placement.process_index]]
    rows = mine + [0] * (most - len(mine))  # others generate too, so that all make the same collective calls
    rewards = trainer.greedy_rewards([rollout.rows[row] for row in rows], [rollout.messages[row] for row in rows])
    sums = weighted_sums(rewards, trainer.reward_weights).nan_to_num().view(placement.num_processes, most)
    return torch.cat([sums[process, : len(groups)] for process, groups in enumerate(firsts)])


# Zero-variance groups and online filtering


def zero_variance_groups(
    advantages: torch.Tensor,
    rewards: torch.Tensor,
    num_generations: int,
    *,
    estimator: str = "grpo",
    epsilon: float = 1e-6,
) -> list[int]:
    """Return the numbers of the groups without a gradient.

    For `grpo`, whose advantages are divided by the deviation of the rewards, that deviation is at most `epsilon`, as it
    is for fewer than two rewards; for other estimators the largest |advantage| is.

    Args:
        advantages: (num_groups * G,).
        rewards: weighted sums, (num_groups * G,), NaN for a completion without any.
        epsilon: at least 0.
    """
    return _numbers(~(group_spread(advantages, rewards, num_generations, estimator=estimator) > epsilon))


def group_spread(
    advantages: torch.Tensor, rewards: torch.Tensor, num_generations: int, *, estimator: str = "grpo"
) -> torch.Tensor:
    """Return the deviation of each group's rewards for `grpo`, else its largest |advantage|, (num_groups,)."""
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
        rewards: one number per completion, (num_groups * G,), NaN for one without.
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


def filter_index(key: str, names: Sequence[str]) -> int | None:
    """Return the position of the reward function that online filtering looks at, None for the weighted sums.

    Args:
        key: `overall`, the name of a reward function with or without its last part (`accuracy` for `accuracy_reward`),
            or a part of it between underscores that no other has.

    Raises:
        ConfigError: no reward function, or more than one, has that name.
    """
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


class ZeroVarianceStreak:
    """Counts the steps for which no generated group had a gradient, and why, and warns of the fifth in a row."""

    def __init__(self, args: "DAPOConfig") -> None:
        self._args = args
        served = (args.steps_per_generation or 1) * args.num_iterations // args.gradient_accumulation_steps
        self._steps_per_rollout = max(served, 1)
        self._start_over()

    def _start_over(self) -> None:
        self._first: int | None = None
        self._warned = False
        self._groups = self._equal = self._filtered = 0

    def add(self, groups: int, equal: int, filtered: int) -> None:
        """Count the groups of one generation: all, those with equal rewards, and others that online filtering drops."""
        self._groups += groups
        self._equal += equal
        self._filtered += filtered

    def end_rollout(self, step: int, kept: int) -> str | None:
        """Return one sentence when the streak reaches 5 steps, once for each streak.

        Args:
            step: global step of the rollout, counted from 0.
            kept: groups generated for it that have a gradient, further prompts included.
        """
        if kept:
            self._start_over()
            return None
        self._first = step if self._first is None else self._first
        steps = step - self._first + self._steps_per_rollout
        if steps < LONGEST_STREAK or self._warned:
            return None
        self._warned = True
        effect = "only replayed groups are trained on" if self._args.replay_buffer_size else "nothing is trained"
        return (
            f"No group has had a gradient for {steps} steps, so {effect}: of {self._groups} groups {self._equal} have "
            f"equal rewards, and online_filtering drops {self._filtered}. Use questions or rewards for which the "
            f"completions of a prompt differ{', or wider bounds' * self._args.online_filtering}."
        )

    def save(self, folder: Path) -> None:
        """Write a streak into a checkpoint."""
        process = PartialState()
        if self._first is not None:
            state = {name: value for name, value in vars(self).items() if name not in _FIXED}
            save_share(state, folder, process.process_index, process.num_processes, "streak")

    def load(self, folder: Path) -> None:
        """Continue the streak of a checkpoint, which any number of processes may have written."""
        if shares := load_shares(folder, "streak"):
            vars(self).update({name: shares[0][name] for name in vars(self) if name not in _FIXED})


LONGEST_STREAK = 5  # steps
_FIXED = ("_args", "_steps_per_rollout")  # by the options
