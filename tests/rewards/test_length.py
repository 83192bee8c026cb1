"""The soft overlong reward, by hand from `Rewards` in definitions.md."""

import pickle

import pytest

from vgr_trl.rewards import get_soft_overlong_punishment
from vgr_trl.utils import RewardError


def test_worked_case():
    """Lmax = 100, c = 20: free up to 80; 85 is a quarter of the way, 90 half, 100 all of it."""
    reward = get_soft_overlong_punishment(100, 20)
    ids = [[1] * length for length in (0, 80, 85, 90, 100, 101, 500)]
    assert reward(ids) == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0, -1.0]
    assert reward(prompts=None, completions=None, completion_ids=ids[:1], trainer_state=None, log_extra=print) == [0.0]


def test_without_a_cache_only_what_is_too_long_is_punished():
    assert get_soft_overlong_punishment(10, 0)([[1] * 10, [1] * 11]) == [0.0, -1.0]


def test_whole_length_as_cache():
    assert get_soft_overlong_punishment(4, 4)([[], [1], [1] * 4]) == [0.0, -0.25, -1.0]


def test_name_and_pickle():
    reward = pickle.loads(pickle.dumps(get_soft_overlong_punishment(max_completion_len=100, soft_punish_cache=20)))
    assert reward.__name__ == "soft_overlong_punishment_reward"
    assert reward([[1] * 90]) == [-0.5]


@pytest.mark.parametrize("value", [0, -1, 1.5, None, True, "100"])
def test_max_completion_len_out_of_range(value):
    with pytest.raises(
        RewardError, match=rf"^max_completion_len is {value!r}: give a number of tokens, an integer of at"
    ):
        get_soft_overlong_punishment(value, 0)


@pytest.mark.parametrize("value", [-1, 101, 0.5, None, True])
def test_soft_punish_cache_out_of_range(value):
    with pytest.raises(
        RewardError, match=rf"^soft_punish_cache is {value!r}: .* in \[0, max_completion_len = 100\]\.$"
    ):
        get_soft_overlong_punishment(100, value)
