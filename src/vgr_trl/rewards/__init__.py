"""Rewards for TRL's `reward_funcs`, loaded by name or path, with weights per step.

Start with `functions.py`: accuracy (see `answers.py`), format and length, and rewards that compare the completions of a
prompt, such as those from VGR. `loading.py` loads and wraps reward functions, also those of EasyR1.
"""

from vgr_trl.rewards.answers import Solution, resolve_solution
from vgr_trl.rewards.calling import RewardSchedule
from vgr_trl.rewards.functions import (
    accuracy_reward,
    gather_groups,
    get_soft_overlong_punishment,
    mdi_reward,
    needs_whole_groups,
    think_format_reward,
    vgr_hard_negative_reward,
    vgr_reward,
)
from vgr_trl.rewards.loading import load_reward, load_rewards

__all__ = [
    "RewardSchedule", "Solution", "accuracy_reward", "gather_groups", "get_soft_overlong_punishment", "load_reward",
    "load_rewards", "mdi_reward", "needs_whole_groups", "resolve_solution", "think_format_reward",
    "vgr_hard_negative_reward", "vgr_reward",
]  # fmt: skip
