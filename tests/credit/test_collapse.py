"""Signs of collapse: all of them together, none of them alone."""

import math

import pytest

from vgr_trl.loss import coefficient_warning, collapse_warning

HEALTHY = {"perception_loss": -0.1, "entropy": 0.5, "perturbed_entropy": 0.8, "clip_ratio/high_mean": 0.01}
COLLAPSING = {"perception_loss": -1.5, "entropy": 2.0, "perturbed_entropy": 2.5, "clip_ratio/high_mean": 0.2}


def history(last, steps=12, newest=3):
    wobbling = [{name: value * (1 + 0.1 * (-1) ** step) for name, value in HEALTHY.items()} for step in range(steps)]
    return wobbling[: steps - newest] + [last] * newest


def test_all_signs_together_are_named_in_one_sentence():
    sentence = collapse_warning(history(COLLAPSING))
    assert sentence == (
        "The policy shows the signs of a collapse caused by the perception loss: perception_loss fell from -0.101 to "
        "-1.5, entropy rose from 0.506 to 2, perturbed_entropy rose from 0.809 to 2.5, clip_ratio/high_mean rose from "
        "0.0101 to 0.2; go back to an earlier checkpoint with a lower coefficient, or with higher weights of both "
        "entropy terms."
    )


@pytest.mark.parametrize("name", COLLAPSING)
def test_one_sign_missing_is_no_collapse(name):
    assert collapse_warning(history({**COLLAPSING, name: HEALTHY[name]})) is None


def test_a_loss_that_falls_slowly_is_what_training_is_for():
    assert collapse_warning(history({**COLLAPSING, "perception_loss": -0.2})) is None


def test_a_loss_that_is_always_0_has_not_fallen():
    assert collapse_warning([{**step, "perception_loss": 0.0} for step in history(COLLAPSING)]) is None


def test_nothing_to_clip_is_no_sign_either_way():
    steps = [{**step, "clip_ratio/high_mean": 0.0} for step in history(COLLAPSING)]
    assert "clip_ratio" not in collapse_warning(steps)
    for step in steps:
        del step["clip_ratio/high_mean"]
    assert "perturbed_entropy rose" in collapse_warning(steps)


def test_cispo_has_its_own_clipped_fraction():
    steps = [{"cispo_clip_ratio": step.pop("clip_ratio/high_mean"), **step} for step in map(dict, history(COLLAPSING))]
    assert "cispo_clip_ratio rose" in collapse_warning(steps)


def test_short_and_broken_histories():
    assert collapse_warning([]) is None
    assert collapse_warning(history(COLLAPSING, steps=7, newest=2)) is None
    assert collapse_warning([{"loss": 1.0}] * 20) is None
    broken = [{**HEALTHY, "entropy": math.nan}] * 5 + history(COLLAPSING)
    assert "entropy rose from 0.506 to 2" in collapse_warning(broken)


@pytest.mark.parametrize(
    ("coefficients", "start"),
    [
        ((0.04, 0.05, 0.05), "The coefficient of the perception loss is 0.04, and runs collapsed at 0.04: use 0.02"),
        ((0.02,), "The coefficient of the perception loss is 0.02 without both entropy terms, and 7B models"),
        ((0.03, 0.03, 0.0), "The coefficient of the perception loss is 0.03 without both entropy terms"),
    ],
)
def test_coefficient_at_which_runs_collapsed(coefficients, start):
    assert coefficient_warning(*coefficients).startswith(start)


@pytest.mark.parametrize("coefficients", [(0.0,), (0.01,), (0.02, 0.05, 0.05)])
def test_coefficient_that_was_used(coefficients):
    assert coefficient_warning(*coefficients) is None
