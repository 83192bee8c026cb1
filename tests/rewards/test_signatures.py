import functools

import pytest

from vgr_trl.rewards import accuracy_reward, gather_groups, get_soft_overlong_punishment, needs_whole_groups
from vgr_trl.rewards.loading import check_callable
from vgr_trl.utils import RewardError


def without_kwargs(completions):
    return [0.0 for _ in completions]


def with_a_column(completions, depth, **kwargs):
    return [0.0 for _ in completions]


def good(completions, **kwargs):
    return [0.0 for _ in completions]


@pytest.mark.parametrize(
    "reward", [good, functools.partial(good), get_soft_overlong_punishment(10, 2), accuracy_reward, object()]
)
def test_rewards_that_can_be_called(reward):
    check_callable(reward, ["prompt", "solution"])


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (without_kwargs, "The reward without_kwargs cannot be called .*unexpected keyword argument"),
        (with_a_column, "The reward with_a_column cannot be called .*missing a required argument: 'depth'"),
        (get_soft_overlong_punishment, "The reward get_soft_overlong_punishment cannot be called"),
    ],
)
def test_rewards_that_cannot(reward, message):
    with pytest.raises(RewardError, match=message):
        check_callable(reward, ["prompt", "solution"])


def test_an_accuracy_reward_without_a_solution_would_only_give_none():
    for reward in (accuracy_reward, functools.partial(accuracy_reward)):
        with pytest.raises(RewardError, match="accuracy_reward|partial"):
            check_callable(reward, ["prompt", "answer"])
        check_callable(reward, ["prompt", "label_idx"])


def test_columns_of_whole_groups_are_known_before_the_first_generation():
    @needs_whole_groups("vgr")
    def rank(completions, vgr, num_generations, **kwargs):
        return vgr

    with pytest.raises(RewardError, match="The reward rank needs the column 'vgr'"):
        check_callable(gather_groups(rank, list, 0), ["prompt"])
    check_callable(gather_groups(rank, list, 0), ["prompt", "vgr"])
