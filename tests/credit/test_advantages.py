"""Advantages of five estimators, derived by hand; `grpo` also against TRL's own trainer."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.trainers import STOCK

from vgr_trl.advantages import ESTIMATORS, estimate_advantages
from vgr_trl.utils import ConfigError, DataError

NAN = float("nan")


def estimate(rewards, group, estimator, baseline=None):
    baseline = None if baseline is None else torch.tensor(baseline)
    return estimate_advantages(torch.tensor(rewards, dtype=torch.float32), group, estimator, baseline).tolist()


def test_grpo():
    """[0 1 2] has mean 1 and deviation 1; [4 4 4] has deviation 0."""
    expected = [-1 / 1.0001, 0, 1 / 1.0001, 0, 0, 0]
    assert estimate([0, 1, 2, 4, 4, 4], 3, "grpo") == pytest.approx(expected, abs=1e-6)


def test_rloo():
    """The others of 0 1 2 have the means 1.5, 1 and 0.5."""
    assert estimate([0, 1, 2, 4, 4, 4], 3, "rloo") == pytest.approx([-1.5, 0, 1.5, 0, 0, 0], abs=1e-6)


def test_remax_keeps_a_group_alive_whose_rewards_are_equal():
    """A group of equal rewards that all beat the greedy completion has equal positive advantages."""
    assert estimate([0, 1, 2, 4, 4, 4], 3, "remax", [1.5, 3.0]) == pytest.approx([-1.5, -0.5, 0.5, 1, 1, 1])


def test_reinforce_plus_plus():
    """Centred: -1 0 1 and 0 0 0, with deviation sqrt(2 / 5) over the batch; 1 / sqrt(0.4) = 1.5811388."""
    expected = [-1.5811388, 0, 1.5811388, 0, 0, 0]
    assert estimate([0, 1, 2, 4, 4, 4], 3, "reinforce_plus_plus") == pytest.approx(expected, abs=1e-6)


def test_grpo_passk():
    """The best of 2 0 1 leads by 1 with deviation 1; that of 0 3 0 by 3 with mean 1, variance (1 + 4 + 1) / 2 = 3."""
    expected = [1 / (1 + 1e-6), 0, 0, 0, 3 / (3**0.5 + 1e-6), 0]
    assert estimate([2, 0, 1, 0, 3, 0], 3, "grpo_passk") == pytest.approx(expected, abs=1e-6)


def test_grpo_passk_with_two_that_are_equally_good_says_nothing():
    assert estimate([2, 0, 2, 0], 4, "grpo_passk") == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("grpo", [0.7071068 / 1.0001414, -0.7071068 / 1.0001414]),  # 0.5 / (0.7071068 + 1e-4)
        ("rloo", [1, -1]),
        ("reinforce_plus_plus", [0.7071068, -0.7071068]),
        ("grpo_passk", [1.4142116, 0]),  # 1 / (0.7071068 + 1e-6)
    ],
)
def test_groups_of_two(estimator, expected):
    """1 and 0 have mean 0.5 and deviation sqrt(0.5) = 0.7071068."""
    assert estimate([1, 0], 2, estimator) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("grpo", [-0.7071068 / 1.0001414, 0, 0.7071068 / 1.0001414]),
        ("rloo", [-1, 0, 1]),
        ("remax", [-0.5, 0, 0.5]),
        ("reinforce_plus_plus", [-0.7071068, 0, 0.7071068]),
        ("grpo_passk", [0, 0, 1.4142116]),
    ],
)
def test_a_completion_without_a_reward_is_left_out(estimator, expected):
    """What remains is the group of two of the test above."""
    baseline = [0.5] if estimator == "remax" else None
    assert estimate([0, NAN, 1], 3, estimator, baseline) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce_plus_plus", "grpo_passk"])
@pytest.mark.parametrize("generations", [3, 6, 7, 8, 12])
def test_equal_rewards_are_no_advantage_to_the_last_bit(estimator, generations):
    """In single precision the mean of eight times 0.7 is not 0.7, and that rounding is all there is to divide by."""
    rewards = torch.tensor([0.1, 0.7, 2.6, 3.9]).repeat_interleave(generations)
    assert estimate_advantages(rewards, generations, estimator).tolist() == [0.0] * (4 * generations)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("rewards", [[NAN, NAN, NAN], [0.0, 0.0, 0.0], [NAN, 5.0, NAN]])
def test_nothing_to_compare_is_no_advantage(estimator, rewards):
    """With a greedy completion that has no reward either, for `remax`."""
    baseline = [NAN] if estimator == "remax" else None
    assert estimate(rewards, 3, estimator, baseline) == [0, 0, 0]


@pytest.mark.parametrize("estimator", sorted({*ESTIMATORS} - {"remax", "grpo_passk"}))
@given(
    rewards=st.lists(st.integers(-40, 40), min_size=8, max_size=8),
    shift=st.integers(-8, 8),
    scale=st.sampled_from([0.25, 4.0]),
)
def test_advantages_of_a_group_sum_to_zero_and_ignore_a_shift(estimator, rewards, shift, scale):
    plain = estimate([reward * scale for reward in rewards], 4, estimator)
    shifted = estimate([(reward + shift) * scale for reward in rewards], 4, estimator)
    assert shifted == pytest.approx(plain, abs=1e-3)
    assert [sum(plain[:4]), sum(plain[4:])] == pytest.approx([0, 0], abs=1e-3)


@given(st.permutations([0.0, 1.0, 1.0, 5.0]))
def test_the_best_of_a_group_is_found_wherever_it_is(rewards):
    """Mean 1.75, squares 3.0625 + 2 * 0.5625 + 10.5625 = 14.75, deviation sqrt(14.75 / 3) = 2.2173558."""
    advantages = estimate(list(rewards), 4, "grpo_passk")
    assert advantages[rewards.index(5.0)] == pytest.approx(4 / 2.2173558, abs=1e-5)
    assert sorted(advantages)[:3] == [0, 0, 0]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([1.0, 2.0], 2, "gae"), ConfigError, "advantage_estimator is 'gae': give one of grpo, rloo, remax, reinf"),
        (([1.0, 2.0], 2, "remax"), ConfigError, "advantage_estimator is 'remax' and the baseline is None: remax"),
        (([1.0, 2.0], 2, "rloo", [1.0]), ConfigError, "advantage_estimator is 'rloo' and the baseline is given"),
        (([1.0, 2.0, 3.0], 2, "rloo"), DataError, r"The rewards have the shape \(3,\) with num_generations 2: give"),
        (([[1.0, 2.0]], 2, "rloo"), DataError, r"The rewards have the shape \(1, 2\) with num_generations 2: give"),
        (([1.0, 2.0], 0, "rloo"), DataError, r"The rewards have the shape \(2,\) with num_generations 0: give"),
        (([1.0, 2.0], 2, "remax", [1.0, 1.0]), DataError, r"The baseline has the shape \(2,\) for 1 groups: give one"),
    ],
)
def test_bad_input_is_one_sentence(arguments, error, message):
    with pytest.raises(error, match=message):
        estimate(*arguments)


def test_grpo_is_what_trl_computes(text_trainer):
    """Two steps of TRL's trainer, with weights, ties, a completion and a group without any reward."""
    draw = torch.Generator().manual_seed(0)

    def quality(completions, **kwargs):
        scores = (torch.randint(0, 4, (len(completions),), generator=draw) / 3).tolist()
        return [None, *scores[1:8], *[None] * 4, *scores[12:]]

    def style(completions, **kwargs):
        return [None, *[0.5, 0.25] * 3, 0.5, *[None] * 4, *torch.rand(len(completions) - 12, generator=draw).tolist()]

    options = {"reward_weights": [2.5, 0.5], "scale_rewards": "group", "max_steps": 2, "max_completion_length": 4}
    trainer = text_trainer([quality, style], classes=STOCK, per_device_train_batch_size=16, **options)
    trainer.train()
    logged = [torch.tensor(list(trainer._logs["rewards"][name])) for name in ("quality", "style")]
    rewards = torch.stack(logged, dim=1)
    assert rewards.isnan().all(dim=1).sum() >= 5
    summed = (rewards * torch.tensor([2.5, 0.5])).nansum(dim=1)
    summed[rewards.isnan().all(dim=1)] = NAN
    expected = torch.tensor(list(trainer._logs["advantages"]))
    assert expected.abs().max() > 0.5
    torch.testing.assert_close(estimate_advantages(summed, 4), expected, rtol=0, atol=1e-6)


def test_a_group_of_one_has_no_second_best():
    assert estimate([3.0, 5.0], 1, "grpo_passk") == [0, 0]


def test_reinforce_plus_plus_over_what_is_trained_on():
    """Centred 1/2 and -1/2 here; 1/2, -1/2, 3/2, -3/2 are trained on: variance 5 / 3."""
    found = estimate_advantages(
        torch.tensor([1.0, 0.0]), 2, "reinforce_plus_plus", trained=torch.tensor([1.0, 0.0, 3.0, 0.0])
    )
    assert found.tolist() == pytest.approx([0.5 / (5 / 3) ** 0.5, -0.5 / (5 / 3) ** 0.5])
