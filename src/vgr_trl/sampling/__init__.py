"""Which groups of completions are trained on: replay buffer, dynamic sampling, online filtering.

Read `dead_groups.py` (which carry no gradient), `groups.py` and `replacing.py` (taken out of a batch, put into
another), `replay_buffer.py` with `buffer_states.py` (over processes), `resampling.py` with `prompt_stream.py` (further
prompts), and `dead_streak.py` (when nothing is left to train on).
"""

from vgr_trl.batch.placement import Placement
from vgr_trl.sampling.buffer_states import merge_states, split_state
from vgr_trl.sampling.dead_groups import (
    dead_groups,
    filter_index,
    filter_rewards,
    filtered_groups,
    group_means,
    quantile_bounds,
)
from vgr_trl.sampling.dead_streak import DeadStreak
from vgr_trl.sampling.groups import Group, groups_from_batch, with_old_logps
from vgr_trl.sampling.prompt_stream import PromptStream
from vgr_trl.sampling.replacing import correct_num_items, write_groups_into_batch
from vgr_trl.sampling.replay_buffer import ReplayBuffer
from vgr_trl.sampling.resampling import Resampling, prompts_of_round, rows_of_process

__all__ = [
    "DeadStreak",
    "Group",
    "Placement",
    "PromptStream",
    "ReplayBuffer",
    "Resampling",
    "correct_num_items",
    "dead_groups",
    "filter_index",
    "filter_rewards",
    "filtered_groups",
    "group_means",
    "groups_from_batch",
    "merge_states",
    "prompts_of_round",
    "quantile_bounds",
    "rows_of_process",
    "split_state",
    "with_old_logps",
    "write_groups_into_batch",
]
