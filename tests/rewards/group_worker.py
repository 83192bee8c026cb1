"""What `test_groups.py` runs in one process and in two."""

import time

import torch.distributed as dist

from vgr_trl.rewards import gather_groups, needs_whole_groups, vgr_reward
from vgr_trl.rewards.attention import scaled_by_accuracy
from vgr_trl.rewards.loading import checked
from vgr_trl.utils import RewardError

GROUP = 4


@needs_whole_groups("value")
def above_mean(completions, value, num_generations, **kwargs):
    """Distance of each value to the mean of its group."""
    starts = [i - i % num_generations for i in range(len(value))]
    return [v - sum(value[s : s + num_generations]) / num_generations for v, s in zip(value, starts, strict=True)]


def gather_object(objects):
    """Concatenate a list of each process, as accelerate's function of this name does."""
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, objects)
    return [item for part in parts for item in part]


def _close_at_exit():
    from vgr_trl.patches import close_group_at_exit  # needs TRL, which what is tested here does not

    close_group_at_exit()


def waited_for(seconds):
    """Rewards of each process under a limit of so many seconds; the second comes twice as late."""
    dist.init_process_group("gloo")
    _close_at_exit()
    rank = dist.get_rank()
    if rank:
        time.sleep(2 * seconds)
    reward = checked(gather_groups(above_mean, gather_object, rank, GROUP), "above_mean", print, seconds=seconds)
    return reward(completions=["a", "b"], value=[[0.0, 1.0], [4.0, 9.0]][rank])


def run_in_group():
    """Rewards and errors of this process, which has three rows or five."""
    dist.init_process_group("gloo")
    _close_at_exit()
    rank = dist.get_rank()
    rows = range(3) if rank == 0 else range(3, 8)
    reward = gather_groups(above_mean, gather_object, rank, num_generations=lambda: GROUP)
    columns = {"value": [float(i * i) for i in rows], "completions": [f"c{i}" for i in rows]}
    rewards = reward(**columns)
    try:
        reward(**{**columns, "value": None if rank else columns["value"]})
        error = None
    except RewardError as raised:
        error = str(raised)
    scaled = gather_groups(*scaled_by_accuracy([vgr_reward]), gather_object, rank, num_generations=GROUP)(
        completions=[f"<answer>{'blue' if i == 2 else 'red'}</answer>" for i in rows],
        solution=["red"] * len(rows),
        vgr=[float(1 + i % GROUP) for i in rows],
    )
    return {"rewards": rewards, "scaled": scaled, "error": error}
