"""The baseline of ReMax: what one greedy completion of each prompt earns."""

import torch

from vgr_trl.batch.placement import Placement
from vgr_trl.training.host import Host
from vgr_trl.training.rollout import Rollout, weighted_sums


def greedy_baseline(rollout: Rollout, host: Host, placement: Placement) -> torch.Tensor:
    """Return the reward of one greedy completion per prompt, (num_groups,), the same on every process.

    The process with a prompt's first completion generates it. Rewards that compare a group count as 0. Every process
    generates equally often and equally much; nothing of it is logged.
    """
    firsts = [
        [group for group in range(placement.num_groups) if placement.holder(group) == process]
        for process in range(placement.num_processes)
    ]
    most = max(map(len, firsts))
    mine = [group * placement.num_generations - placement.process_index * placement.rows
            for group in firsts[placement.process_index]]  # fmt: skip
    rows = mine + [0] * (most - len(mine))  # others generate too, so that all make the same collective calls
    assert rollout.messages is not None
    earned = host.earn_greedily([rollout.rows[row] for row in rows], [rollout.messages[row] for row in rows])
    sums = weighted_sums(earned, host.reward_weights).nan_to_num().view(placement.num_processes, most)
    return torch.cat([sums[process, : len(groups)] for process, groups in enumerate(firsts)])
