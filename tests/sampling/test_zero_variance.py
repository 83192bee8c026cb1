"""Groups without a gradient, online filtering, and the warning where no group has had a gradient for steps."""

from types import SimpleNamespace

import pytest
import torch

from vgr_trl.advantages import estimate_advantages, group_spread
from vgr_trl.sampling.zero_variance import ZeroVarianceStreak, filter_index, filtered_groups

NAN = float("nan")
NAMES = ["accuracy_reward", "think_format_reward", "soft_overlong_punishment_reward"]


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        # NaN: fewer than two rewards. Rewards 0 1 0 have the deviation 1 / sqrt(3).
        ("grpo", [3**-0.5, 0, 3**0.5, 0, 3**-0.5, NAN, NAN]), ("rloo", [1, 0, 3, 0, 1, 0, 0]),
        ("remax", [0.5, 1, 2.5, 1, 1, 0, 0]),  # equal rewards below the greedy completion's still say something
        ("grpo_passk", [3**0.5, 0, 0, 0, 3**0.5, 0, 0]),  # two that are equally best say nothing
    ],
)  # fmt: skip
def test_which_groups_have_no_gradient_depends_on_the_estimator(estimator, expected):
    rewards = torch.tensor([0.0, 1, 0, 2, 2, 2, 3, 0, 3, 0, 0, 0, 0.0, 0, 1, NAN, NAN, NAN, NAN, 7, NAN])
    baseline = torch.tensor([0.5, 1.0, 0.5, 1.0, 0.0, NAN, NAN]) if estimator == "remax" else None
    advantages = estimate_advantages(rewards, 3, estimator, baseline)
    found = group_spread(advantages.view(-1, 3), rewards.view(-1, 3), estimator)
    assert found.tolist() == pytest.approx(expected, abs=1e-5, nan_ok=True)


def test_groups_whose_mean_lies_outside_or_on_a_bound_are_filtered():
    means = torch.tensor([0.0, 0.25, 0.5, 1.0, NAN], dtype=torch.float64)
    assert filtered_groups(means, 0.25, 1.0) == [0, 1, 3, 4]
    assert filtered_groups(means, 0.25, 1.0, inclusive=True) == [0, 4]
    assert filtered_groups(means, -1, 2) == [4]


def test_what_is_filtered_by():
    keys = ("overall", "accuracy_reward", "accuracy", "format", "overlong")
    assert [filter_index(key, NAMES) for key in keys] == [None, 0, 0, 1, 2]
    assert filter_index("accuracy", ["blind_accuracy_reward", "accuracy_reward"]) == 1, "its exact name goes first"


def streak(**changed):
    defaults = {"steps_per_generation": 1, "num_iterations": 1, "gradient_accumulation_steps": 1}
    return ZeroVarianceStreak(SimpleNamespace(replay_buffer_size=0, online_filtering=True, **defaults | changed))


def warned(counter, kept):
    """Rollouts at which there is a warning, when so many groups have a gradient at each."""
    return [number for number, count in enumerate(kept) if counter.end_rollout(count)]


@pytest.mark.parametrize(
    ("served", "expected"),
    [({}, [9, 17]), ({"steps_per_generation": 2}, [2, 7, 15]), ({"num_iterations": 5}, [0, 5, 13])],
)
def test_a_streak_of_five_steps_is_warned_of_once(served, expected):
    assert warned(streak(**served), [0] * 4 + [1] + [0] * 7 + [2] + [0] * 5) == expected


def test_a_streak_goes_on_after_a_resume(tmp_path):
    before, after = streak(), streak()
    assert warned(before, [1, 0, 0]) == []
    before.save(tmp_path)
    after.load(tmp_path)
    assert warned(after, [0] * 5) == [2]
