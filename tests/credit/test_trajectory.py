"""Scales of completions: by hand, mean 1, undefined values, statistics of all processes."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vgr_trl.credit import trajectory_scale
from vgr_trl.metrics import largest_scale, masked_mean, mean_dependency, trajectory_statistics
from vgr_trl.utils import ConfigError, DataError

NAN = math.nan


def one_token_each(*means):
    return torch.tensor(means).unsqueeze(1), torch.ones(len(means), 1, dtype=torch.bool)


def test_by_hand():
    """z = 1, 2, 5: u = 0, 1/4, 1 with mean 5/12, b = 0.8 + 0.2 · 12/5 = 1.28: scales 0.8, 0.92, 1.28."""
    assert trajectory_scale(*one_token_each(1.0, 2.0, 5.0)).tolist() == pytest.approx([0.8, 0.92, 1.28])
    assert largest_scale(0.8, (1.0, 5.0, 8 / 3)) == pytest.approx(1.28)


def test_mean_over_valid_tokens():
    dependency = torch.tensor([[1.0, 3.0, 99.0], [NAN, 4.0, 2.0], [5.0, 5.0, 5.0], [NAN, NAN, 1.0]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 0], [0, 0, 0], [1, 1, 0]])
    means = mean_dependency(dependency, mask)
    assert means.tolist()[:2] == [2.0, 4.0]
    assert means[2:].isnan().all()


def test_the_mean_over_nothing_is_0():
    assert masked_mean(torch.ones(2, 2), torch.tensor([[0, 0], [1, 0]])).tolist() == [[0], [1]]


def test_means_of_half_precision_are_float32():
    """1 + 2 ** -8 is no bfloat16: the mean of 257 / 256 twice and 1 twice would be rounded."""
    dependency = torch.tensor([[1.0, 1.0078125]], dtype=torch.bfloat16)
    assert mean_dependency(dependency, torch.ones(1, 2)).tolist() == [1.00390625]


def test_completions_without_a_dependency_keep_scale_1_and_change_no_other():
    """z = 1, 2, 5 as above, beside a completion of 0 tokens and one whose dependency is undefined."""
    dependency = torch.tensor([[1.0], [9.0], [2.0], [NAN], [5.0]])
    mask = torch.tensor([[1], [0], [1], [1], [1]])
    assert trajectory_scale(dependency, mask).tolist() == pytest.approx([0.8, 1, 0.92, 1, 1.28])


@pytest.mark.parametrize("means", [(2.0, 2.0, 2.0), (3.0,), (0.0, 9e-7), (NAN, NAN), ()])
def test_nothing_to_compare_leaves_scale_1(means):
    assert trajectory_scale(*one_token_each(*means)).tolist() == [1.0] * len(means)


def test_statistics_of_all_processes_give_what_one_process_gets():
    dependency, mask = one_token_each(1.0, 2.0, 5.0, 3.0)
    together = trajectory_scale(dependency, mask, 0.9)
    for half in (slice(0, 2), slice(2, 4)):
        alone = trajectory_scale(dependency[half], mask[half], 0.9, statistics=(1.0, 5.0, 2.75))
        assert torch.allclose(alone, together[half], atol=1e-7)


def test_a_completion_outside_the_statistics_is_scaled_like_their_end():
    scale = trajectory_scale(*one_token_each(0.0, 1.0, 5.0, 9.0), statistics=(1.0, 5.0, 8 / 3))
    assert scale.tolist() == pytest.approx([0.8, 0.8, 1.28, 1.28])


def test_statistics_leave_out_undefined_completions_and_gather_once():
    calls = []

    def gather(tensor):
        calls.append(tensor)
        return torch.cat([tensor, torch.tensor([7.0, NAN])])

    assert trajectory_statistics(torch.tensor([1.0, NAN, 4.0]), gather) == (1.0, 7.0, 4.0)
    nothing = trajectory_statistics(torch.tensor([NAN]))
    assert all(map(math.isnan, nothing))
    assert len(calls) == 1


@given(st.lists(st.floats(0, 10, width=32), min_size=1, max_size=12), st.floats(0, 1))
def test_mean_scale_is_1(means, minimum):
    scale = trajectory_scale(*one_token_each(*means), minimum)
    assert scale.double().mean().item() == pytest.approx(1, abs=2e-5)
    assert scale.min() >= minimum - 1e-6


def test_close_means_are_told_apart_precisely():
    """Around 9 single precision has steps of 9.5e-7: the mean of u must not be the difference of two such numbers."""
    dependency = 9 + torch.arange(64).unsqueeze(1) * 9.5367431640625e-07
    scale = trajectory_scale(dependency, torch.ones(64, 1), 0.5)
    assert scale.double().mean().item() == pytest.approx(1, abs=1e-6)
    assert scale[0].item() == pytest.approx(0.5)
    assert scale[-1].item() == pytest.approx(1.5)


@pytest.mark.parametrize("minimum", [-0.1, 1.1, NAN])
def test_minimum_out_of_range(minimum):
    with pytest.raises(ConfigError, match=rf"^minimum is {minimum}: give a number in \[0, 1\]\.$"):
        trajectory_scale(torch.ones(2, 1), torch.ones(2, 1), minimum)


@pytest.mark.parametrize("statistics", [(1.0, 5.0, 6.0), (1.0, 5.0, 0.5)])
def test_statistics_that_cannot_be(statistics):
    with pytest.raises(
        DataError, match=r"^trajectory_scale got the statistics \(1.0, 5.0, .*\): give minimum, maximum"
    ):
        trajectory_scale(torch.ones(2, 1), torch.ones(2, 1), statistics=statistics)


def test_shapes():
    with pytest.raises(
        DataError, match=r"^mean_dependency got dependency of shape \(2, 3\) and a mask of shape \(3, 2\)"
    ):
        trajectory_scale(torch.ones(2, 3), torch.ones(3, 2))
