"""Rewards of attention that count as far as the completions of a prompt differ in accuracy."""

import statistics
from collections.abc import Iterable, Sequence
from functools import wraps
from types import FunctionType
from typing import Any

from vgr_trl.errors import RewardError
from vgr_trl.rewards.accuracy import accuracy_reward
from vgr_trl.rewards.attention import mdi_reward, vgr_hard_negative_reward, vgr_reward
from vgr_trl.rewards.whole_groups import needs_whole_groups, read_num_generations

_MIDDLES: dict[Any, float] = {vgr_reward: 0.5, vgr_hard_negative_reward: 0.0, mdi_reward: 0.0}


def scaled_by_accuracy(rewards: Iterable[Any]) -> list[Any]:
    """Return reward functions, those of attention drawn to their middle where accuracy differs little in a group.

    A reward v becomes m + 2·s·(v - m), with m the middle of its range (0.5 for VGR, else 0) and s the standard
    deviation (over G) of the group's accuracy: 2·s is 1 where half of the completions are right, 0 where all or none
    are. Those whose accuracy cannot be judged do not count in s; where none can be, the reward is None.

    Args:
        rewards: among them `vgr_reward`, `vgr_hard_negative_reward` or `mdi_reward`.

    Raises:
        RewardError: none of them is.
    """
    rewards = list(rewards)
    changed = [_scaled(reward) if _is_of_attention(reward) else reward for reward in rewards]
    if changed == rewards:
        shown = " ".join(getattr(reward, "__name__", type(reward).__name__) for reward in rewards)
        raise RewardError(
            f"attention_reward_scale is accuracy, but the reward functions are {shown or 'none'}: name vgr, "
            "vgr_hard_negative or mdi there, or give none."
        )
    return changed


def _is_of_attention(reward: Any) -> bool:
    return isinstance(reward, FunctionType) and reward in _MIDDLES


def _scaled(reward: Any) -> Any:
    middle = _MIDDLES[reward]

    @needs_whole_groups("vgr", optional=("solution", "choices", "label_idx", "mdi_balance_ratio"))
    @wraps(reward)
    def scaled(completions: Sequence[Any], num_generations: int | Sequence[int], **kwargs: Any) -> list[float | None]:
        rewards: list[float | None] = reward(completions, num_generations=num_generations, **kwargs)
        accuracy = accuracy_reward(completions, **kwargs)
        size = read_num_generations(num_generations) or 1
        scales = [_spread(accuracy[start : start + size]) for start in range(0, len(accuracy), size)]
        return [_drawn(value, middle, scales[row // size]) for row, value in enumerate(rewards)]

    return scaled


def _spread(accuracy: Sequence[float | None]) -> float | None:
    """Twice the standard deviation of what is known of a group's accuracy, in [0, 1]."""
    known = [value for value in accuracy if value is not None]
    return 2 * statistics.pstdev(known) if known else None


def _drawn(value: float | None, middle: float, scale: float | None) -> float | None:
    return None if value is None or scale is None else middle + scale * (value - middle)
