"""Signs of collapse in what a run has logged."""

import math

import pytest

from vgr_trl.reporting.records import LogEntry, first_signs


def logged(values, name="rewards/accuracy_reward/mean", mode="train", **more):
    return [LogEntry(step, mode, 0.0, {name: value, **more}) for step, value in enumerate(values, 1)]


def test_a_sign_is_told_once_at_the_step_where_it_is_first_seen():
    """The mean of eight falls below half of 1 with the fifth zero, at step 21: 3 of 8 are 1."""
    fallen = logged([1.0] * 16 + [0.0] * 12)
    assert first_signs(fallen) == [(21, "accuracy_reward fell from 1 to 0.375")]
    assert first_signs(logged([1.0] * 16 + [0.0] * 12, mode="eval")) == []
    assert first_signs(logged([1.0] * 16 + [0.0] * 4)) == []


def test_rewards_without_weight_are_passed_over():
    weightless = {"reward_weights/accuracy_reward": 0.0}
    assert first_signs(logged([1.0] * 16 + [0.0] * 12, **weightless)) == []


@pytest.mark.parametrize("value", [None, math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_a_sign_at_once(value):
    assert first_signs(logged([0.1, value, value], name="loss")) == [(2, "loss is not finite")]


def test_signs_stand_in_the_order_of_their_steps():
    entries = logged([1.0] * 16 + [0.0] * 12, **{"frac_reward_zero_std": 0.0})
    for entry in entries[20:]:
        entry.values["frac_reward_zero_std"] = 1.0
    # Of the eight newest all are 1 from step 28 on.
    assert [step for step, _ in first_signs(entries)] == [21, 28]
    assert first_signs(entries)[1][1] == "100% of the groups have equal rewards (at least 0% before)"
