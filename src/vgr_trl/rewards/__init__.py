"""What a completion earned: rewards for TRL's `reward_funcs`, by name or path, weighted by step.

Read `accuracy.py` and `answers/`, which it stands on. Then `format.py`, `length.py`, and rewards within a group:
`whole_groups.py`, `attention.py`, `accuracy_scale.py`. How they come to a trainer: `registry.py`, `signatures.py`,
`schedule.py`, `outcome.py`; files of EasyR1: `scored_files.py`.
"""

from vgr_trl.rewards.accuracy import accuracy_reward
from vgr_trl.rewards.answers.solutions import Solution, resolve_solution
from vgr_trl.rewards.attention import mdi_reward, vgr_hard_negative_reward, vgr_reward
from vgr_trl.rewards.format import think_format_reward
from vgr_trl.rewards.length import get_soft_overlong_punishment
from vgr_trl.rewards.registry import load_reward, load_rewards
from vgr_trl.rewards.schedule import RewardSchedule
from vgr_trl.rewards.whole_groups import gather_groups, needs_whole_groups

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
