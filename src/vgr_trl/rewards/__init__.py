"""Rewards for TRL's `reward_funcs`, by name or path, weighted by step.

Begin with `simple.py`: accuracy, format and length, made of what a completion says (`answers.py`). `attention.py`: what
is made of VGR. `groups.py`: rewards that compare the completions of a prompt. `loading.py` brings them to a trainer,
and `reward_files.py` those in the form of EasyR1.
"""

from vgr_trl.rewards.answers import Solution, resolve_solution
from vgr_trl.rewards.attention import mdi_reward, vgr_hard_negative_reward, vgr_reward
from vgr_trl.rewards.groups import gather_groups, needs_whole_groups
from vgr_trl.rewards.loading import RewardSchedule, load_reward, load_rewards
from vgr_trl.rewards.simple import accuracy_reward, get_soft_overlong_punishment, think_format_reward

__all__ = [
    "RewardSchedule",
    "Solution",
    "accuracy_reward",
    "gather_groups",
    "get_soft_overlong_punishment",
    "load_reward",
    "load_rewards",
    "mdi_reward",
    "needs_whole_groups",
    "resolve_solution",
    "think_format_reward",
    "vgr_hard_negative_reward",
    "vgr_reward",
]
