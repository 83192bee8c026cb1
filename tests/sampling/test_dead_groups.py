import pytest
import torch

from vgr_trl.advantages import ESTIMATORS, estimate_advantages
from vgr_trl.sampling import filter_index, filtered_groups, quantile_bounds, zero_variance_groups
from vgr_trl.utils import ConfigError

NAN = float("nan")
NAMES = ["accuracy_reward", "think_format_reward", "soft_overlong_punishment_reward"]


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("grpo", [1, 3]),
        ("rloo", [1, 3]),
        ("remax", []),  # equal rewards below the greedy completion's still say something
        ("reinforce_plus_plus", [1, 3]),
        ("grpo_passk", [1, 2, 3]),  # two that are equally best say nothing
    ],
)
def test_which_groups_are_dead_depends_on_the_estimator(estimator, expected):
    rewards = torch.tensor([0.0, 1, 0, 2, 2, 2, 3, 0, 3, 0, 0, 0, 0.0, 0, 1])
    baseline = torch.tensor([0.5, 1.0, 0.5, 1.0, 0.0]) if estimator == "remax" else None
    advantages = estimate_advantages(rewards, 3, estimator, baseline)
    assert zero_variance_groups(advantages, rewards, 3, estimator=estimator) == expected


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_group_of_completions_without_rewards_is_dead(estimator):
    rewards = torch.tensor([NAN, NAN, 0.0, 1.0])
    baseline = torch.tensor([0.5, 0.5]) if estimator == "remax" else None
    advantages = estimate_advantages(rewards, 2, estimator, baseline)
    assert zero_variance_groups(advantages, rewards, 2, estimator=estimator) == [0]


def test_a_single_reward_has_no_deviation():
    rewards = torch.tensor([NAN, 1.0, 0.0, 1.0])
    assert zero_variance_groups(torch.zeros(4), rewards, 2) == [0]


def test_epsilon_is_compared_with_the_deviation_for_grpo_and_else_with_the_largest_advantage():
    """0 and 1 have the deviation 0.7071; the advantages are 0.3 and -0.3."""
    rewards, advantages = torch.tensor([0.0, 1.0]), torch.tensor([0.3, -0.3])
    assert zero_variance_groups(advantages, rewards, 2, epsilon=0.5) == []
    assert zero_variance_groups(advantages, rewards, 2, epsilon=0.71) == [0]
    assert zero_variance_groups(advantages, rewards, 2, estimator="rloo", epsilon=0.5) == [0]
    assert zero_variance_groups(advantages, rewards, 2, estimator="rloo", epsilon=0.29) == []


def test_with_epsilon_0_only_groups_without_any_gradient_are_dead():
    """Rewards 1 and 1; 1 and the next float32 above it. Advantages 0 and 0; 0 and the smallest float32 there is."""
    rewards = torch.tensor([1.0, 1.0, 1.0, 1.0 + 2.0**-23])
    assert zero_variance_groups(torch.zeros(4), rewards, 2, epsilon=0.0) == [0]
    advantages = torch.tensor([0.0, 0.0, 0.0, -(2.0**-149)])
    assert zero_variance_groups(advantages, rewards, 2, estimator="rloo", epsilon=0.0) == [0]


def test_the_largest_advantage_decides_and_not_the_others():
    """|0.6|, 0, 0 and 0 have the mean 0.15; -0.3 and three times 0.1 are around 0.25 as well."""
    advantages = torch.tensor([0.6, 0, 0, 0, 0.1, 0.1, 0.1, -0.3, 0.25, 0.25, -0.25, -0.25])
    for epsilon, dead in ((0.2, []), (0.25, [2]), (0.29, [2]), (0.31, [1, 2]), (0.59, [1, 2]), (0.61, [0, 1, 2])):
        assert zero_variance_groups(advantages, torch.zeros(12), 4, estimator="rloo", epsilon=epsilon) == dead


def test_a_deviation_of_rounding_errors_is_no_gradient():
    """0.1 + 0.2 and 0.3 differ in the last bit of a float32."""
    rewards = torch.tensor([0.1, 0.3]) + torch.tensor([0.2, 0.0])
    assert zero_variance_groups(torch.zeros(2), rewards, 2) == [0]


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


def test_a_completion_without_a_reward_does_not_count_in_the_mean():
    assert filtered_groups(torch.tensor([NAN, 0.5, 0.9]), 3, low=0.4, high=0.6) == [0]
    assert filtered_groups(torch.tensor([NAN, 0.5, 0.6]), 3, low=0.4, high=0.6) == []


def test_what_is_filtered_by():
    keys = ("overall", "accuracy_reward", "accuracy", "format", "overlong")
    assert [filter_index(key, NAMES) for key in keys] == [None, 0, 0, 1, 2]


@pytest.mark.parametrize(("key", "count"), [("reward", 3), ("beauty", 0)])
def test_a_key_that_names_none_or_several(key, count):
    with pytest.raises(
        ConfigError, match=f"filter_key is '{key}', which names {count} reward functions: give overall or one of accur"
    ):
        filter_index(key, NAMES)


def test_the_name_of_a_function_is_nearer_than_a_part_of_it():
    """The default, accuracy, is the accuracy reward, although that of blind answers has it in its name."""
    assert filter_index("accuracy", ["blind_accuracy_reward", "accuracy_reward"]) == 1
    assert filter_index("accuracy", ["blind_accuracy_reward", "think_format_reward"]) == 0
    assert filter_index("blind_accuracy", ["accuracy_reward", "blind_accuracy_reward"]) == 1
