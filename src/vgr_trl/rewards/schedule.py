"""Which weights the rewards have at a step."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vgr_trl.errors import ConfigError


def reward_name(reward: Any) -> str:
    """Return the name of a reward function, or of the reward model given as a path or as a model."""
    if isinstance(reward, str):
        return reward.rstrip("/").split("/")[-1]
    name = getattr(reward, "__name__", None)
    if name is None and (path := getattr(getattr(reward, "config", None), "_name_or_path", None)):
        return str(path).split("/")[-1]
    return name or type(reward).__name__


@dataclass(frozen=True)
class RewardSchedule:
    """Weights of the rewards: `early` ones for the first steps if given, `regular` ones after (one each per reward)."""

    regular: tuple[float, ...]
    early: tuple[float, ...] | None = None

    @classmethod
    def for_rewards(
        cls,
        rewards: Sequence[Any],
        reward_weights: Sequence[float] | None = None,
        early_reward_weights: Sequence[float] | None = None,
    ) -> "RewardSchedule":
        """Return the schedule for `rewards`, in their order.

        Args:
            reward_weights: one finite weight per reward; None: 1 each.
            early_reward_weights: one finite weight per reward, for the early steps; None: `reward_weights` always.

        Raises:
            ConfigError: the number of weights is not that of the rewards, or a weight is not a finite number.
        """
        names = [reward_name(reward) for reward in rewards]
        regular = _checked("reward_weights", reward_weights, names)
        early = _checked("early_reward_weights", early_reward_weights, names)
        return cls(regular if regular is not None else (1.0,) * len(names), early)

    @property
    def changes(self) -> bool:
        """Whether the weights depend on the step."""
        return self.early is not None and self.early != self.regular

    def early_steps(self, warmup_steps: int, total_steps: int) -> int:
        """Return for how many steps the early weights hold: the warm-up, else the first 10 % of all, rounded up."""
        return int(warmup_steps) if warmup_steps > 0 else max(-(-int(total_steps) // 10), 0)

    def weights_at(self, step: int, early_steps: int) -> list[float]:
        """Return the weights that hold at the 0-based global `step`: the early ones while it is below `early_steps`."""
        return list(self.early if self.early is not None and step < early_steps else self.regular)


def _checked(option: str, weights: Sequence[float] | None, names: list[str]) -> tuple[float, ...] | None:
    if weights is None:
        return None
    listed = ", ".join(names)
    if not isinstance(weights, list | tuple):
        raise ConfigError(f"{option} is {weights!r}: give a list with a number per function ({listed}).")
    if len(weights) != len(names):
        raise ConfigError(
            f"{option} has {_count(len(weights), 'value')} but there {'is' if len(names) == 1 else 'are'} "
            f"{_count(len(names), 'reward function')} ({listed}): give one weight per function, in this order."
        )
    for weight, name in zip(weights, names, strict=True):
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
            raise ConfigError(f"{option} is {weight!r} for {name}: give a finite number per function ({listed}).")
    return tuple(float(weight) for weight in weights)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
