"""Rewards of whole groups, and those made of VGR: worked cases, ties, undefined and infinite values."""

import math
from fractions import Fraction
from itertools import islice
from pathlib import Path

import pytest
import yaml

from vgr_trl.dapo_config import DAPOConfig
from vgr_trl.errors import RewardError
from vgr_trl.rewards import (
    accuracy_reward,
    gather_groups,
    mdi_reward,
    needs_whole_groups,
    vgr_hard_negative_reward,
    vgr_reward,
)
from vgr_trl.rewards.functions import scale_by_accuracy
from vgr_trl.validate.options import plan_rewards

TABLE = yaml.safe_load(Path(__file__).with_name("attention_rewards.yaml").read_text(encoding="utf-8"))


def close_to(expected):
    """Fractions are written as such, and None is None."""
    return pytest.approx([None if each is None else float(Fraction(each)) for each in expected])


def answered(right):
    """`right`: 1 for completions with the right answer, 0 for wrong ones, None where accuracy is unknown."""
    texts = [f"<answer>{'red' if one == 1 else 'blue'}</answer>" for one in right]
    return texts, [None if one is None else "red" for one in right]


@pytest.mark.parametrize(("values", "expected"), TABLE["vgr"])
def test_vgr_by_hand(values, expected):
    assert vgr_reward(["x"] * len(values), values, len(values)) == close_to(expected)


@pytest.mark.parametrize(("values", "right", "expected"), TABLE["hard negatives"])
def test_hard_negatives(values, right, expected):
    texts, solutions = answered(right)
    assert vgr_hard_negative_reward(texts, values, solutions, len(values)) == close_to(expected)


@pytest.mark.parametrize(("value", "ratio", "expected"), TABLE["mdi"])
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


def test_hard_negatives_and_mdi_are_scaled_towards_0_and_other_rewards_are_left_alone():
    """Quartiles of the right ones' [1, 2, 4]: 0.5, 1/6, -0.5, times sqrt(3)/2. Balance of 1 is 1, of sqrt(2) 0.5."""
    factor = math.sqrt(3) / 2
    found = scaled(vgr_hard_negative_reward, [1, 2, 3, 4], [1, 1, 0, 1])
    assert found == pytest.approx([0.5 * factor, factor / 6, 0, -0.5 * factor])
    balanced = [1.0, math.sqrt(2), 2.0, 1.0]
    assert scaled(mdi_reward, balanced, [1, 1, 0, 1]) == pytest.approx([factor, 0, -factor, factor])
    assert scaled(mdi_reward, balanced, [1, 0, 1, 0], mdi_balance_ratio=[4.0] * 4) == pytest.approx([1, 0.5, 0, 1])
    assert scale_by_accuracy([accuracy_reward, vgr_reward])[0] is accuracy_reward
    with pytest.raises(RewardError):
        scale_by_accuracy([vgr_reward])[0](["a", "b"], vgr=[1.0, 2.0], num_generations=2)


def test_attention_rewards_are_scaled_unless_the_option_says_none(tmp_path):
    texts, solutions = answered([1, 0, 0, 0])
    given = {"vgr": [1.0, 2.0, 3.0, 4.0], "solution": solutions, "num_generations": 4}
    found = {}
    for scale in ("accuracy", "none"):
        args = DAPOConfig(str(tmp_path), attention_reward_scale=scale, bf16=False, use_cpu=True)
        (reward,), _ = plan_rewards("vgr", args, lambda: 4)
        found[scale] = reward([[{"role": "assistant", "content": text}] for text in texts], **given)
    assert found["none"] == pytest.approx([1, 5 / 6, 1 / 6, 0])
    assert found["accuracy"] != found["none"]


@needs_whole_groups("value", optional=("note",))
def above_mean(completions, value, num_generations, note=None, **kwargs):
    """Distance of each value to the mean of its group."""
    assert note is None or note == [None] * 3 + ["seen"] * (len(value) - 3)
    starts = [i - i % num_generations for i in range(len(value))]
    return [v - sum(value[s : s + num_generations]) / num_generations for v, s in zip(value, starts, strict=True)]


@pytest.mark.parametrize("sizes", [[3, 5], [8], [1, 0, 7]])
def test_groups_that_are_spread_over_processes(sizes):
    """Values 0 1 4 9 | 16 25 36 49 have the group means 3.5 and 31.5; of two processes the second alone has notes."""
    values, rewards = iter([0, 1, 4, 9, 16, 25, 36, 49]), []
    parts = [(["x"] * size, {"value": list(islice(values, size))}) for size in sizes]
    if len(sizes) == 2:
        parts[1][1]["note"] = ["seen"] * 5
    for rank, (completions, columns) in enumerate(parts):

        def gather(own, expected=parts[rank]):
            assert own == [expected]
            return parts

        reward = gather_groups(above_mean, gather, rank, num_generations=lambda: 4)
        rewards.append(reward(completions, **columns))
    assert [reward for local in rewards for reward in local] == [-3.5, -2.5, 0.5, 5.5, -15.5, -6.5, 4.5, 17.5]
    assert list(map(len, rewards)) == sizes


def test_whole_group_rewards_that_do_not_fit():
    """A column that one process lacks is an error on every process."""
    reward = gather_groups(above_mean, lambda own: [*own, (["c"], {})], 0, num_generations=2)
    with pytest.raises(RewardError):
        reward(completions=["a"], value=[1])
    alone = gather_groups(above_mean, list, 0, num_generations=2)
    for size in (2, 0, [1, 2, 1]):
        with pytest.raises(RewardError):
            alone(completions=["a"] * 3, value=[1] * 3, num_generations=size)
    short = needs_whole_groups()(lambda completions, num_generations: [1.0])
    with pytest.raises(RewardError):
        gather_groups(short, list, 0, num_generations=1)(completions="ab")
