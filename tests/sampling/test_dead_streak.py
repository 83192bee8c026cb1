"""Steps in a row without a live group: when they are told, and what is said of the reasons."""

from types import SimpleNamespace

import pytest

from vgr_trl.sampling import ZeroVarianceStreak


def streak(**changed):
    defaults = {
        "steps_per_generation": 1, "num_iterations": 1, "gradient_accumulation_steps": 1, "replay_buffer_size": 0,
        "replay_var_epsilon": 1e-6, "filter_key": "accuracy", "filter_low": 0.2, "filter_high": 0.8,
        "filter_mode": "bounds",
    }  # fmt: skip
    return ZeroVarianceStreak(SimpleNamespace(**defaults | changed))


def told(counter, lives):
    """Steps at which something is said, when so many groups are live at each."""
    return [step for step, live in enumerate(lives) if counter.end_rollout(step, live)]


def test_once_for_each_streak_of_five():
    assert told(streak(), [0] * 4 + [1] + [0] * 7 + [2] + [0] * 5) == [9, 17]


@pytest.mark.parametrize(("served", "expected"), [({"steps_per_generation": 2}, 4), ({"num_iterations": 5}, 0)])
def test_steps_count_and_not_rollouts(served, expected):
    counter, per = streak(**served), served.get("steps_per_generation", 5)
    assert [step for step in range(0, 20, per) if counter.end_rollout(step, 0)] == [expected]


def test_several_rollouts_per_step():
    counter = streak(gradient_accumulation_steps=2)
    found = [step for step in range(8) for _ in range(2) if counter.end_rollout(step, 0)]
    assert found == [4]


def test_both_reasons_are_counted_a_group_once():
    """Of 4 groups 1 and 2 are equal, 2 and 3 outside the bounds; group 0 is alive at first."""
    counter = streak()
    counter.add(4, [1, 2], [2, 3], [0.5, 0.5, 0.0, 0.9])
    assert counter.end_rollout(0, kept=1) is None
    for step in range(1, 6):
        counter.add(4, [0, 1, 2], [2, 3], [0.5, 0.5, 0.0, 0.9 + step / 100])
        sentence = counter.end_rollout(step, kept=0)
    assert sentence == (
        "No group has had a gradient for 5 steps, so nothing is trained: of 20 groups 15 have rewards that do not "
        "differ (replay_var_epsilon 1e-06) and 5 are left out by online_filtering, because their means of filter_key "
        "accuracy (they are 0.91 to 0.95) are not between filter_low 0.2 and filter_high 0.8; use questions or rewards "
        "for which the completions of a prompt differ, or give bounds that such means lie between."
    )
