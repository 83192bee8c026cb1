"""What `test_groups.py` runs in one process and in two."""

import time

import torch.distributed as dist

from vgr_trl.patches import close_group_at_exit
from vgr_trl.rewards import gather_groups, needs_whole_groups, vgr_reward
from vgr_trl.rewards.attention import scaled_by_accuracy
from vgr_trl.rewards.loading import checked
from vgr_trl.utils import RewardError

GROUP = 4


@needs_whole_groups("value", optional=("bonus",))
def above_mean(completions, value, num_generations, bonus=None, log_extra=None, **kwargs):
    """Distance of each value, plus its bonus, to the mean of its group."""
    values = [a + (b or 0) for a, b in zip(value, bonus or [0] * len(value), strict=True)]
    starts = [i - i % num_generations for i in range(len(values))]
    if log_extra is not None:
        log_extra("seen", [f"{len(completions)} rows, {c}" for c in completions])
    return [v - sum(values[s : s + num_generations]) / num_generations for v, s in zip(values, starts, strict=True)]


def gather_object(objects):
    """Concatenate a list of each process, as accelerate's function of this name does."""
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, objects)
    return [item for part in parts for item in part]


def run(rank, world, cut):
    """Return rewards, logged rows and errors of this rank; `cut` rows go to the first of two processes."""
    rows = range(8) if world == 1 else (range(cut) if rank == 0 else range(cut, 8))
    reward = gather_groups(above_mean, gather_object, rank, num_generations=lambda: GROUP)
    logged = []
    columns = {"value": [float(i * i) for i in rows], "completions": [f"c{i}" for i in rows]}
    columns |= {"log_extra": lambda name, values: logged.extend(values), "image": [object()] * len(rows)}
    rewards = reward(**columns)
    bonus = [10.0 if i == 7 else None for i in rows]
    with_bonus = reward(**columns, **({"bonus": bonus} if any(bonus) else {}))
    try:
        reward(**{**columns, "value": None if rank == world - 1 else columns["value"]})
        error = None
    except RewardError as raised:
        error = str(raised)
    scaled = gather_groups(*scaled_by_accuracy([vgr_reward]), gather_object, rank, num_generations=GROUP)(
        completions=[f"<answer>{'blue' if i == 2 else 'red'}</answer>" for i in rows],
        solution=["red"] * len(rows),
        vgr=[float(1 + i % GROUP) for i in rows],
    )
    found = {"rewards": rewards, "with_bonus": with_bonus, "scaled": scaled, "error": error}
    return found | {"logged": logged[: len(rows)]}


def waited_for(seconds):
    """Rewards of each process under a limit of so many seconds; the second comes twice as late."""
    dist.init_process_group("gloo")
    close_group_at_exit()
    rank = dist.get_rank()
    if rank:
        time.sleep(2 * seconds)
    reward = checked(gather_groups(above_mean, gather_object, rank, GROUP), "above_mean", print, seconds=seconds)
    return reward(completions=["a", "b"], value=[[0.0, 1.0], [4.0, 9.0]][rank])


def run_in_group():
    """Of this process, by the number of rows of the first of two."""
    dist.init_process_group("gloo")
    close_group_at_exit()
    return {cut: run(dist.get_rank(), dist.get_world_size(), cut) for cut in (3, 8)}
