"""Rewards made of VGR: the worked cases, ties, undefined and infinite values, whole groups."""

import math

import pytest

from vgr_trl.rewards import accuracy_reward, mdi_reward, vgr_hard_negative_reward, vgr_reward
from vgr_trl.rewards.attention import scale_by_accuracy
from vgr_trl.utils import RewardError

NAN, INF = math.nan, math.inf


def vgr(values):
    return vgr_reward(["x"] * len(values), values, len(values))


def answered(right):
    """`right`: 1 for completions with the right answer, 0 for wrong ones, None where accuracy is unknown."""
    texts = [f"<answer>{'red' if one == 1 else 'blue'}</answer>" for one in right]
    return texts, [None if one is None else "red" for one in right]


def hard(values, right):
    texts, solutions = answered(right)
    return vgr_hard_negative_reward(texts, values, solutions, len(values))


def test_vgr_worked_case():
    """Q1 = 1.75, Q3 = 3.25: (3.25 - 2) / 1.5 = 5/6, (3.25 - 3) / 1.5 = 1/6; 1 and 4 lie outside."""
    assert vgr([1, 2, 3, 4]) == pytest.approx([1, 5 / 6, 1 / 6, 0])


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0424, 1.0424 + 1e-6], [0.5] * 2),  # equal completions, whose VGR differ by rounding
        ([3, INF, INF, NAN], [0.5, 0, 0, None]),
        ([1, 2, 3, 4, INF], [1, 5 / 6, 1 / 6, 0, 0]),  # the infinite one does not move the quartiles
        ([1, 2, None, 3, NAN, 4], [1, 5 / 6, None, 1 / 6, None, 0]),
    ],
)
def test_ties_and_values_that_are_not_finite(values, expected):
    assert vgr(values) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("values", "right", "expected"),
    [
        # Quartiles of [1, 2, 4] are 1.5 and 3: 1 - 0.5, (3 - 2) / 1.5 - 0.5 = 1/6, 0 for the wrong one, 0 - 0.5.
        ([1, 2, 3, 4], [1, 1, 0, 1], [0.5, 1 / 6, 0, -0.5]),
        ([1, 2, 3, 4], [0, 1, 0, 0], [0, 0, 0, 0]),  # nothing to compare with
        ([1, 2, INF, 4], [1, 1, 1, 0], [0.5, -0.5, -0.5, 0]),
        ([None, 1, 2, 4], [1, 1, 1, 0], [None, 0.5, -0.5, 0]),
        ([None, 1, 2, 4], [0, 1, 1, 0], [0, 0.5, -0.5, 0]),  # a wrong answer needs no VGR
        ([1, 2, 4, 3], [1, 1, 1, None], [0.5, 1 / 6, -0.5, None]),
    ],
)
def test_hard_negatives(values, right, expected):
    assert hard(values, right) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("value", "ratio", "expected"),
    [
        (1.0, 2.0, 1.0), (2.0, 2.0, -1.0), (0.5, 2.0, -1.0), (math.sqrt(2), 2.0, 0.0), (2.0, 16.0, 0.5),
        (INF, 2.0, -1.0), (0.0, 2.0, -1.0), (None, 2.0, None), (NAN, 2.0, None),
    ],
)  # fmt: skip
def test_mdi_by_hand(value, ratio, expected):
    assert mdi_reward(["x"], [value], mdi_balance_ratio=ratio) == [pytest.approx(expected)]


def scaled(reward, values, right, **columns):
    texts, solutions = answered(right)
    (changed,) = scale_by_accuracy([reward])
    return changed(texts, vgr=values, solution=solutions, num_generations=len(values), **columns)


@pytest.mark.parametrize(
    ("right", "expected"),
    [
        ([1, 0, 1, 0], [1, 5 / 6, 1 / 6, 0]),  # half are right: the VGR reward itself
        ([1, 1, 1, 1], [0.5] * 4),
        # three of four: 2 sqrt(3/4 · 1/4) = sqrt(3)/2 of the distance to 0.5
        ([1, 1, 0, 1], [0.5 + s * math.sqrt(3) / 2 for s in (0.5, 1 / 3, -1 / 3, -0.5)]),
        # of the three whose accuracy is known one is right: 2 sqrt(1/3 · 2/3) = 2 sqrt(2)/3
        ([1, None, 0, 0], [0.5 + s * math.sqrt(2) * 2 / 3 for s in (0.5, 1 / 3, -1 / 3, -0.5)]),
        ([None] * 4, [None] * 4),
    ],
)  # fmt: skip
def test_vgr_is_scaled_by_how_much_the_group_differs_in_accuracy(right, expected):
    assert scaled(vgr_reward, [1, 2, 3, 4], right) == pytest.approx(expected)


def test_hard_negatives_and_mdi_are_scaled_towards_0():
    """Quartiles of the right ones' [1, 2, 4]: 0.5, 1/6, -0.5, times sqrt(3)/2. Balance of 1 is 1, of sqrt(2) 0.5."""
    factor = math.sqrt(3) / 2
    assert scaled(vgr_hard_negative_reward, [1, 2, 3, 4], [1, 1, 0, 1]) == pytest.approx(
        [0.5 * factor, factor / 6, 0, -0.5 * factor]
    )
    balanced = [1.0, math.sqrt(2), 2.0, 1.0]
    assert scaled(mdi_reward, balanced, [1, 1, 0, 1]) == pytest.approx([factor, 0, -factor, factor])
    assert scaled(mdi_reward, balanced, [1, 0, 1, 0], mdi_balance_ratio=[4.0] * 4) == pytest.approx([1, 0.5, 0, 1])


def test_other_rewards_are_left_alone():
    assert scale_by_accuracy([accuracy_reward, vgr_reward])[0] is accuracy_reward
    with pytest.raises(RewardError, match="the rows of vgr_reward have no column solution: add it, or set"):
        scale_by_accuracy([vgr_reward])[0](["a", "b"], vgr=[1.0, 2.0], num_generations=2)
