"""Rewards of whole groups, over two real processes too, and every error."""

import pytest
import torch.distributed as dist
from support.launching import join_group, results_of

from vgr_trl.rewards import gather_groups, needs_whole_groups, vgr_reward
from vgr_trl.rewards.attention import scale_by_accuracy
from vgr_trl.utils import RewardError


@needs_whole_groups("value")
def best_of_group(completions, value, num_generations, **kwargs):
    """1 for the largest value of each group, 0 for the others."""
    groups = [value[i : i + num_generations] for i in range(0, len(value), num_generations)]
    return [float(v == max(group)) for group in groups for v in group]


def alone(reward=best_of_group, **options):
    return gather_groups(reward, lambda objects: objects, 0, **options)


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


def run_in_group():
    """Rewards and errors of this process, which has three rows or five."""
    join_group()
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
    scaled = gather_groups(*scale_by_accuracy([vgr_reward]), gather_object, rank, num_generations=GROUP)(
        completions=[f"<answer>{'blue' if i == 2 else 'red'}</answer>" for i in rows],
        solution=["red"] * len(rows),
        vgr=[float(1 + i % GROUP) for i in rows],
    )
    return {"rewards": rewards, "scaled": scaled, "error": error}


@pytest.fixture(scope="module")
def results():
    return results_of(run_in_group, processes=2)


def test_groups_that_are_spread_over_two_processes(results):
    """Values 0 1 4 9 | 16 25 36 49 have the group means 3.5 and 31.5.

    VGR 1 2 3 4 twice, with quartiles 1.75 and 3.25: 1, 5/6, 1/6, 0. Three of the first four are right, all of the
    others: sqrt(3)/2 of the distance to 0.5, or 0.
    """
    first, second = results
    assert first["rewards"] + second["rewards"] == [-3.5, -2.5, 0.5, 5.5, -15.5, -6.5, 4.5, 17.5]
    assert [len(first["rewards"]), len(second["rewards"])] == [3, 5]
    half = 3**0.5 / 2
    expected = [0.5 + half / 2, 0.5 + half / 3, 0.5 - half / 3, 0.5 - half / 2, 0.5, 0.5, 0.5, 0.5]
    assert first["scaled"] + second["scaled"] == pytest.approx(expected)


def test_a_marked_function_gets_what_trl_passes_and_no_local_column():
    reward = needs_whole_groups("value")(lambda completions, **kwargs: seen.append({*kwargs}) or [0.0])
    seen, passed = [], {"prompts": ["p"], "image": [object()], "trainer_state": "state", "log_extra": None}
    alone(reward, num_generations=1)(completions=["a"], value=[1], **passed)
    assert seen == [{"value", "num_generations", "trainer_state"}]


def test_rewards_that_do_not_fit(results):
    """A column that one process lacks is an error on both."""
    for each in results:
        assert each["error"] == "On process 1 above_mean lacks the column 'value': add it to the rows."
    for size in (2, 0, [1, 2, 1]):
        with pytest.raises(RewardError, match=r"There are 3 completions over all processes with num_generations"):
            alone(num_generations=2)(completions=["a"] * 3, value=[1] * 3, num_generations=size)
    with pytest.raises(RewardError, match=r"^<lambda> returned 1 rewards for 2 completions"):
        alone(needs_whole_groups()(lambda completions, num_generations: [1.0]), num_generations=1)(completions="ab")
