"""Rewards of attention drawn to their middle where the completions of a prompt hardly differ in accuracy."""

import math

import pytest

from vgr_trl.rewards import accuracy_reward, mdi_reward, vgr_hard_negative_reward, vgr_reward
from vgr_trl.rewards.attention import scaled_by_accuracy
from vgr_trl.utils import RewardError


def scaled(reward, values, right, size=None, **columns):
    """`right`: 1 for completions with the right answer, 0 for wrong ones, None for those that cannot be judged."""
    texts = [f"<answer>{'red' if one == 1 else 'blue'}</answer>" for one in right]
    solutions = [None if one is None else "red" for one in right]
    (changed,) = scaled_by_accuracy([reward])
    return changed(texts, vgr=values, solution=solutions, num_generations=size or len(values), **columns)


@pytest.mark.parametrize(
    ("right", "expected"),
    [
        ([1, 0, 1, 0], [1, 5 / 6, 1 / 6, 0]),  # half are right: the VGR reward itself
        ([1, 1, 1, 1], [0.5] * 4),
        ([0, 0, 0, 0], [0.5] * 4),
        # three of four: 2 sqrt(3/4 · 1/4) = sqrt(3)/2 of the distance to 0.5
        ([1, 1, 0, 1], [0.5 + s * math.sqrt(3) / 2 for s in (0.5, 1 / 3, -1 / 3, -0.5)]),
        # of the three that can be judged one is right: 2 sqrt(1/3 · 2/3) = 2 sqrt(2)/3
        ([1, None, 0, 0], [0.5 + s * math.sqrt(2) * 2 / 3 for s in (0.5, 1 / 3, -1 / 3, -0.5)]),
        ([None] * 4, [None] * 4),
    ],
)  # fmt: skip
def test_vgr_of_a_group_as_far_as_it_differs_in_accuracy(right, expected):
    assert scaled(vgr_reward, [1, 2, 3, 4], right) == pytest.approx(expected)


def test_every_group_has_its_own_scale():
    """The first group is half right, the second all right."""
    assert scaled(vgr_reward, [1, 2, 1, 2], [1, 0, 1, 1], 2) == pytest.approx([1, 0, 0.5, 0.5])


def test_hard_negatives_and_mdi_are_drawn_to_nought():
    """Quartiles of the right ones' [1, 2, 4]: 0.5, 1/6, -0.5, times sqrt(3)/2. Balance of 1 is 1, of sqrt(2) 0.5."""
    factor = math.sqrt(3) / 2
    assert scaled(vgr_hard_negative_reward, [1, 2, 3, 4], [1, 1, 0, 1]) == pytest.approx(
        [0.5 * factor, factor / 6, 0, -0.5 * factor]
    )
    balanced = [1.0, math.sqrt(2), 2.0, 1.0]
    assert scaled(mdi_reward, balanced, [1, 1, 0, 1]) == pytest.approx([factor, 0, -factor, factor])
    assert scaled(mdi_reward, balanced, [1, 1, 1, 1]) == pytest.approx([0] * 4)
    assert scaled(mdi_reward, balanced, [1, 0, 1, 0], mdi_balance_ratio=[4.0] * 4) == pytest.approx([1, 0.5, 0, 1])


def test_undefined_stays_undefined():
    assert scaled(vgr_reward, [None, 1, 2, math.inf], [1, 0, 1, 0]) == pytest.approx([None, 1, 0, 0])


def test_other_rewards_are_left_alone_and_names_stay():
    changed = scaled_by_accuracy([accuracy_reward, vgr_reward])
    assert changed[0] is accuracy_reward
    assert changed[1].__name__ == "vgr_reward"
    with pytest.raises(RewardError, match="attention_reward_scale is accuracy, but the reward functions are accuracy_"):
        scaled_by_accuracy([accuracy_reward])
