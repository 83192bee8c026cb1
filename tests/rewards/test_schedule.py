"""Which reward weights hold at a step, by hand from `Reward weights` in definitions.md."""

from functools import partial
from types import SimpleNamespace

import pytest

from vgr_trl.rewards import RewardSchedule, accuracy_reward, get_soft_overlong_punishment, think_format_reward
from vgr_trl.rewards.loading import reward_name
from vgr_trl.utils import ConfigError

REWARDS = [accuracy_reward, "models/judge-7b/", think_format_reward, get_soft_overlong_punishment(10, 2)]
NAMES = r"\(accuracy_reward, judge-7b, think_format_reward, soft_overlong_punishment_reward\)"


def test_early_weights_hold_while_the_step_is_below_the_early_steps():
    schedule = RewardSchedule.for_rewards(REWARDS[:2], [1, 0.5], [0, 1])
    assert schedule.changes
    assert [schedule.weights_at(step, 3) for step in (0, 2, 3, 100)] == [[0.0, 1.0], [0.0, 1.0], [1.0, 0.5], [1.0, 0.5]]


def test_without_early_weights_the_regular_ones_always_hold():
    assert RewardSchedule.for_rewards(REWARDS, [1, 2, 3, 4]).weights_at(0, 5) == [1.0, 2.0, 3.0, 4.0]
    assert RewardSchedule.for_rewards(REWARDS[:2]).weights_at(0, 5) == [1.0, 1.0]
    assert not RewardSchedule.for_rewards(REWARDS[:2]).changes
    assert not RewardSchedule.for_rewards(REWARDS[:2], None, [1, 1]).changes


@pytest.mark.parametrize(
    ("warmup", "total", "early"),
    [(7, 100, 7), (0, 100, 10), (0, 30, 3), (0, 101, 11), (0, 5, 1), (0, 0, 0), (0, -1, 0)],
)
def test_early_steps_are_the_warm_up_or_a_tenth_of_all(warmup, total, early):
    assert RewardSchedule((1.0,), (2.0,)).early_steps(warmup, total) == early


def test_wrong_number_of_weights_names_the_functions_in_order():
    with pytest.raises(
        ConfigError,
        match=rf"^reward_weights has 3 values but there are 4 reward functions {NAMES}: give one weight per function, "
        r"in this order\.$",
    ):
        RewardSchedule.for_rewards(REWARDS, [1, 1, 1])
    with pytest.raises(
        ConfigError, match=rf"^early_reward_weights has 5 values but there are 4 reward functions {NAMES}"
    ):
        RewardSchedule.for_rewards(REWARDS, None, [1] * 5)
    with pytest.raises(
        ConfigError, match=r"^reward_weights has 0 values but there is 1 reward function \(accuracy_reward\)"
    ):
        RewardSchedule.for_rewards(REWARDS[:1], [])
    with pytest.raises(ConfigError, match=r"^reward_weights is 1: give a list with a number per function \(accuracy_r"):
        RewardSchedule.for_rewards(REWARDS[:1], 1)


@pytest.mark.parametrize("weight", [float("nan"), float("inf"), None, "1", True])
def test_weight_that_is_no_finite_number(weight):
    with pytest.raises(
        ConfigError, match=rf"^early_reward_weights is {weight!r} for judge-7b: give a finite number per"
    ):
        RewardSchedule.for_rewards(REWARDS, None, [1, weight, 1, 1])


class Judge:
    """A reward that is an instance: a model, or an object that can be called."""

    def __init__(self, path=None):
        self.config = SimpleNamespace(_name_or_path=path)

    def __call__(self, completions, **kwargs):
        return [0.0 for _ in completions]


@pytest.mark.parametrize(
    ("reward", "name"),
    [
        (accuracy_reward, "accuracy_reward"),
        ("folder/models/judge-7b/", "judge-7b"),
        ("judge", "judge"),
        (Judge("folder/models/judge-7b"), "judge-7b"),
        (Judge(""), "Judge"),
        (Judge(), "Judge"),
        (partial(accuracy_reward), "partial"),
    ],
)
def test_names_of_functions_paths_models_and_instances(reward, name):
    assert reward_name(reward) == name
