"""Groups without a gradient, online filtering, and the warning where no group has had a gradient for steps."""

from types import SimpleNamespace

import pytest
import torch

from vgr_trl.advantages import ESTIMATORS, estimate_advantages
from vgr_trl.sampling.zero_variance import (
    ZeroVarianceStreak,
    filter_index,
    filtered_groups,
    quantile_bounds,
    zero_variance_groups,
)

NAN = float("nan")
NAMES = ["accuracy_reward", "think_format_reward", "soft_overlong_punishment_reward"]


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("grpo", [1, 3]), ("rloo", [1, 3]), ("reinforce_plus_plus", [1, 3]),
        ("remax", []),  # equal rewards below the greedy completion's still say something
        ("grpo_passk", [1, 2, 3]),  # two that are equally best say nothing
    ],
)  # fmt: skip
def test_which_groups_have_no_gradient_depends_on_the_estimator(estimator, expected):
    rewards = torch.tensor([0.0, 1, 0, 2, 2, 2, 3, 0, 3, 0, 0, 0, 0.0, 0, 1])
    baseline = torch.tensor([0.5, 1.0, 0.5, 1.0, 0.0]) if estimator == "remax" else None
    advantages = estimate_advantages(rewards, 3, estimator, baseline)
    assert zero_variance_groups(advantages, rewards, 3, estimator=estimator) == expected


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_group_of_completions_without_rewards_has_no_gradient(estimator):
    rewards = torch.tensor([NAN, NAN, 0.0, 1.0])
    baseline = torch.tensor([0.5, 0.5]) if estimator == "remax" else None
    advantages = estimate_advantages(rewards, 2, estimator, baseline)
    assert zero_variance_groups(advantages, rewards, 2, estimator=estimator) == [0]


def test_epsilon_is_compared_with_the_deviation_for_grpo_and_else_with_the_largest_advantage():
    """0 and 1 have the deviation 0.7071; the advantages are 0.3 and -0.3."""
    rewards, advantages = torch.tensor([0.0, 1.0]), torch.tensor([0.3, -0.3])
    assert zero_variance_groups(advantages, rewards, 2, epsilon=0.5) == []
    assert zero_variance_groups(advantages, rewards, 2, epsilon=0.71) == [0]
    assert zero_variance_groups(advantages, rewards, 2, estimator="rloo", epsilon=0.5) == [0]
    assert zero_variance_groups(advantages, rewards, 2, estimator="rloo", epsilon=0.29) == []


def test_groups_whose_mean_lies_outside_or_on_a_bound_are_filtered():
    """Means 0, 0.25, 0.5, 1 and none."""
    rewards = torch.tensor([0.0, 0.0, 0.0, 0.5, 0.0, 1.0, 1.0, 1.0, NAN, NAN])
    assert filtered_groups(rewards, 2, low=0.25, high=1.0) == [0, 1, 3, 4]
    assert filtered_groups(rewards, 2, low=-1, high=2) == [4]


def test_quantiles_of_the_means_are_bounds_that_belong_to_what_is_kept():
    """Means 0, 0.2, 0.4, 0.6, 1 and none: a quarter of the way is 0.2, three quarters 0.6, an eighth 0.1."""
    rewards = torch.tensor([0.0, 0.2, 0.4, 0.6, 1.0, NAN])
    assert quantile_bounds(rewards, 1, low=0.25, high=0.75) == pytest.approx((0.2, 0.6))
    assert quantile_bounds(rewards, 1, low=0.125, high=1.0) == pytest.approx((0.1, 1.0))
    low, high = quantile_bounds(rewards, 1, low=0.25, high=0.75)
    assert filtered_groups(rewards, 1, low=low, high=high, inclusive=True) == [0, 4, 5]
    equal = torch.ones(4)
    low, high = quantile_bounds(equal, 2, low=0.01, high=0.99)
    assert filtered_groups(equal, 2, low=low, high=high, inclusive=True) == []


def test_what_is_filtered_by():
    keys = ("overall", "accuracy_reward", "accuracy", "format", "overlong")
    assert [filter_index(key, NAMES) for key in keys] == [None, 0, 0, 1, 2]
    assert filter_index("accuracy", ["blind_accuracy_reward", "accuracy_reward"]) == 1, "its exact name goes first"


def streak(**changed):
    defaults = {
        "steps_per_generation": 1, "num_iterations": 1, "gradient_accumulation_steps": 1, "replay_buffer_size": 0,
        "replay_var_epsilon": 1e-6, "filter_key": "accuracy", "filter_low": 0.2, "filter_high": 0.8,
        "filter_mode": "bounds", "online_filtering": True,
    }  # fmt: skip
    return ZeroVarianceStreak(SimpleNamespace(**defaults | changed))


def warned(counter, kept):
    """Steps at which there is a warning, when so many groups have a gradient at each."""
    return [step for step, count in enumerate(kept) if counter.end_rollout(step, count)]


def test_a_streak_of_five_is_warned_of_once():
    assert warned(streak(), [0] * 4 + [1] + [0] * 7 + [2] + [0] * 5) == [9, 17]


def test_a_streak_goes_on_after_a_resume(tmp_path):
    before, after = streak(), streak()
    assert warned(before, [1, 0, 0]) == []
    before.save(tmp_path)
    after.load(tmp_path)
    assert [step for step in range(3, 8) if after.end_rollout(step, 0)] == [5]


@pytest.mark.parametrize(("served", "expected"), [({"steps_per_generation": 2}, 4), ({"num_iterations": 5}, 0)])
def test_a_streak_counts_steps_and_not_rollouts(served, expected):
    counter, per = streak(**served), served.get("steps_per_generation", 5)
    assert [step for step in range(0, 20, per) if counter.end_rollout(step, 0)] == [expected]
