"""A buffer of groups that had a gradient, to take the place of groups that have none."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from vgr_trl.config.ranges import is_number
from vgr_trl.errors import ConfigError
from vgr_trl.sampling.dead_groups import group_std, signal
from vgr_trl.sampling.groups import Group


@dataclass(frozen=True, eq=False)
class _Entry:
    number: int  # in the order of being added
    priority: float
    group: Group


class ReplayBuffer:
    """Keeps the groups of highest priority and draws from them.

    The priority of a group is the sum of |advantage| times the standard deviation of its rewards. A group that is dead
    or whose mean reward is too low does not enter. When the buffer is full the group of lowest priority leaves, of
    equal ones the oldest, so that a new group takes the place of an old one of the same priority.

    With several processes each has a buffer that knows all groups, adds and draws the same ones (as long as it is
    called with the same arguments everywhere) and has the rows of those groups that the process is the holder of.

    Args:
        size: groups to keep at most, at least 1.
        min_reward: mean reward that a group needs to enter. None: any.
        variance_epsilon: when a group is dead, see `dead_groups`; at least 0.
        max_age: steps after which a group leaves, at least 1. None: never.
        seed: of what is drawn.
        estimator: of the groups' advantages.

    Raises:
        ConfigError: an argument is out of range.
    """

    def __init__(
        self,
        size: int,
        *,
        min_reward: float | None = None,
        variance_epsilon: float = 1e-6,
        max_age: int | None = None,
        seed: int = 0,
        estimator: str = "grpo",
    ) -> None:
        for name, value in (("size", size), ("max_age", max_age)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name} of the replay buffer is {value!r}: give an integer of at least 1.")
        if min_reward is not None and not is_number(min_reward):
            raise ConfigError(f"min_reward of the replay buffer is {min_reward!r}: give a finite number, or None.")
        if not (is_number(variance_epsilon) and variance_epsilon >= 0):
            raise ConfigError(f"variance_epsilon is {variance_epsilon!r}: give a number of at least 0.")
        self.size, self.min_reward, self.variance_epsilon = size, min_reward, variance_epsilon
        self.max_age, self.estimator = max_age, estimator
        self.step = 0
        self._added = 0
        self._entries: list[_Entry] = []  # oldest first
        self._generator = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def megabytes(self) -> float:
        """Millions of bytes that the rows on this process take, each prompt's images counted once."""
        return sum(entry.group.nbytes for entry in self._entries) / 1e6

    @property
    def mean_age(self) -> float:
        """Steps since the groups were generated, on average; 0 for an empty buffer."""
        ages = [self.step - entry.group.step for entry in self._entries]
        return sum(ages) / len(ages) if ages else 0.0

    def advance(self, step: int) -> None:
        """Say that `step` is the global step; groups older than `max_age` leave."""
        self.step = step
        if self.max_age is not None:
            self._entries = [entry for entry in self._entries if step - entry.group.step <= self.max_age]

    def admits(self, advantages: torch.Tensor, rewards: torch.Tensor) -> list[bool]:
        """Whether each of the groups would enter by itself; cheaper than making them.

        Args:
            advantages: (num_groups, G).
            rewards: weighted sums, (num_groups, G).
        """
        return [value is not None for value in self._admitted(advantages, rewards)]

    def _admitted(self, advantages: torch.Tensor, rewards: torch.Tensor) -> list[float | None]:
        """The priorities of the groups that would enter, None for the others; (num_groups, G) each."""
        values = priority(advantages, rewards)
        found = signal(advantages.flatten(), rewards.flatten(), rewards.size(-1), estimator=self.estimator)
        enters = (found > self.variance_epsilon) & values.isfinite()
        if self.min_reward is not None:
            enters &= rewards.double().nanmean(dim=-1) >= self.min_reward
        if len(self) >= self.size:
            enters &= values >= min(entry.priority for entry in self._entries)
        return [value if one else None for value, one in zip(values.tolist(), enters.tolist(), strict=True)]

    def add(self, group: Group) -> bool:
        """Add a group, unless it is not admitted; return whether it was."""
        (value,) = self._admitted(group.advantages.unsqueeze(0), group.rewards.unsqueeze(0))
        if value is None:
            return False
        self._entries.append(_Entry(self._added, value, group))
        self._added += 1
        self.step = max(self.step, group.step)
        self._keep_best()
        return True

    def _keep_best(self) -> None:
        while len(self) > self.size:
            self._entries.remove(min(self._entries, key=lambda entry: (entry.priority, entry.number)))

    def sample(self, count: int) -> list[Group]:
        """Draw `count` different groups, each with probability proportional to its priority among those left.

        Groups of priority 0 are drawn, with equal probabilities, when no others are left. All stay in the buffer.

        Args:
            count: at least 0; where it is more than there are, all are returned.
        """
        if count < 0:
            raise ConfigError(f"{count} groups are to be drawn from the replay buffer: give a number of at least 0.")
        draws = torch.rand(len(self), generator=self._generator, dtype=torch.float64).tolist()
        # The largest u ** (1 / priority) are a draw without replacement (Efraimidis and Spirakis, 2006); in logarithms.
        keys = [
            (1, math.log(draw or 5e-324) / entry.priority) if entry.priority > 0 else (0, draw)
            for draw, entry in zip(draws, self._entries, strict=True)
        ]
        order = sorted(range(len(self)), key=lambda index: keys[index], reverse=True)
        return [self._entries[index].group for index in order[:count]]

    def state_dict(self) -> dict[str, Any]:
        """Return what this process has, as tensors, numbers, lists and dictionaries (for `torch.save`)."""
        return {
            "step": self.step,
            "estimator": self.estimator,
            "added": self._added,
            "generator": self._generator.get_state(),
            "numbers": [entry.number for entry in self._entries],
            "groups": [entry.group.state_dict() for entry in self._entries],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken; the options of this buffer hold for the groups too.

        For another number of processes see `merge_states` and `split_state`.
        """
        self.step, self._added = state["step"], state["added"]
        self._generator.set_state(state["generator"])
        self._entries = []
        for number, saved in zip(state["numbers"], state["groups"], strict=True):
            group = Group.from_state(saved)
            (value,) = self._admitted(group.advantages.unsqueeze(0), group.rewards.unsqueeze(0))
            if value is not None:
                self._entries.append(_Entry(number, value, group))
                self._keep_best()
        self.advance(self.step)


def priority(advantages: torch.Tensor, rewards: torch.Tensor) -> torch.Tensor:
    """Return the sum of |advantages| (num_groups, G) times the deviation of the rewards, (num_groups,) float64."""
    return advantages.double().abs().sum(dim=-1) * group_std(rewards.flatten(), rewards.size(-1))
