"""Weights of tokens from VGR and from visual dependency: worked cases, undefined values, mean 1."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from vgr_trl.credit import dependency_weights, token_weights
from vgr_trl.utils import ConfigError, DataError

INF, NAN = math.inf, math.nan


def weigh(*rows, mask=None, **options):
    vgr = torch.tensor(rows)
    mask = torch.ones_like(vgr, dtype=torch.bool) if mask is None else torch.tensor(mask, dtype=torch.bool)
    return token_weights(vgr, mask, **options).tolist()


@pytest.mark.parametrize("clip", [None, (0.0, INF), (0.2, 3.0), [0.5, 2.0]])
def test_worked_case(clip):
    """VGR 1, 2, 4: raw 2, 1, 0.5, whose mean is 7/6; none of these limits cuts anything."""
    assert weigh([1.0, 2.0, 4.0], clip=clip)[0] == pytest.approx([12 / 7, 6 / 7, 3 / 7])


def test_clip_comes_before_the_division():
    """VGR 1, 1, 16: mean s is -4/3 ln 2, raw is 2^(4/3) twice and 2^(-8/3); clipped to [0.5, 2]: 2, 2, 0.5."""
    assert weigh([1.0, 1.0, 16.0], clip=(0.5, 2.0))[0] == pytest.approx([4 / 3, 4 / 3, 1 / 3])


def test_padding_and_tool_tokens_take_no_part():
    result = weigh([1.0, 999.0, 2.0, NAN, 4.0, 0.0], mask=[[1, 0, 1, 0, 1, 0]])[0]
    assert result == pytest.approx([12 / 7, 1, 6 / 7, 1, 3 / 7, 1])


def test_infinite_scores_become_the_finite_extremes():
    """VGR inf counts as 4, VGR 0 as 1: raw of [2, 1/2, 1, 2, 1/2] times e^mean, with mean s = -ln 2."""
    result = weigh([1.0, INF, 2.0, 0.0, 4.0], clip=None)[0]
    assert result == pytest.approx([10 / 6, 5 / 12, 5 / 6, 10 / 6, 5 / 12])


def test_one_finite_score_makes_all_equal():
    assert weigh([2.0, INF, 0.0]) == [[1.0, 1.0, 1.0]]


@pytest.mark.parametrize("row", [[INF, INF, 0.0], [NAN, NAN, NAN], [NAN, INF, 0.0]])
def test_nothing_finite_leaves_all_weights_1(row):
    assert weigh(row, smooth_sigma=1.0, topk_ratio=0.5) == [[1.0, 1.0, 1.0]]


def test_undefined_tokens_have_weight_1_and_the_others_mean_1():
    assert weigh([1.0, NAN, 2.0, 4.0])[0] == pytest.approx([12 / 7, 1, 6 / 7, 3 / 7])


def test_one_token_and_none():
    assert weigh([8.0, 3.0], [8.0, 3.0], mask=[[1, 0], [0, 0]], topk_ratio=0.5) == [[1.0, 1.0], [1.0, 1.0]]
    assert token_weights(torch.zeros(2, 0), torch.zeros(2, 0), smooth_sigma=1.0).shape == (2, 0)
    assert token_weights(torch.zeros(0, 3), torch.zeros(0, 3), smooth_sigma=1.0).shape == (0, 3)


def test_equal_scores_are_equal_weights():
    assert weigh([3.0, 3.0, 3.0], smooth_sigma=0.7) == [[1.0, 1.0, 1.0]]


def test_extreme_ratios_stay_finite():
    assert weigh([1e-38, 1e38], clip=None)[0] == pytest.approx([2.0, 0.0], abs=1e-6)


def test_one_extreme_ratio_among_many_stays_finite():
    """The mean score lies near that of the many, so the one is 140 above it, and e^140 is no float32."""
    assert weigh([1e-38, 1e38, 1e38, 1e38, 1e38], clip=None)[0] == pytest.approx([5.0, 0, 0, 0, 0], abs=1e-6)


def test_undefined_tokens_are_not_among_the_largest_weights():
    """VGR 4 and 1 have raw 1/2 and 2; one token of three keeps its weight, the other 1; over their mean 3/2."""
    assert weigh([NAN, 4.0, 1.0], topk_ratio=1 / 3)[0] == pytest.approx([1, 2 / 3, 4 / 3])


def test_smoothing_by_hand():
    """sigma 1/3 reaches ⌈3 · 1/3⌉ = 1 token with weight k = e^(-9/2); raw of VGR 1, 2, 4 is 2, 1, 1/2."""
    k = math.exp(-4.5)
    smooth = [(2 + k) / (1 + k), (2 * k + 1 + k / 2) / (1 + 2 * k), (k + 0.5) / (1 + k)]
    mean = sum(smooth) / 3
    assert weigh([1.0, 2.0, 4.0], clip=None, smooth_sigma=1 / 3)[0] == pytest.approx([s / mean for s in smooth])


def test_smoothing_skips_invalid_tokens_and_reaches_three_sigma():
    """sigma 0.5 reaches 2 tokens: k1 = e^-2, k2 = e^-8; the second token is invalid, the last is beyond reach."""
    k1, k2 = math.exp(-2), math.exp(-8)
    raw = [2.0, None, 1.0, 0.5, 1.0]  # VGR 1, -, 2, 4, 2: mean s is -ln 2
    smooth = [
        (raw[0] + k2 * raw[2]) / (1 + k2),
        (raw[2] + k2 * raw[0] + k1 * raw[3] + k2 * raw[4]) / (1 + k2 + k1 + k2),
        (raw[3] + k1 * raw[2] + k1 * raw[4]) / (1 + 2 * k1),
        (raw[4] + k1 * raw[3] + k2 * raw[2]) / (1 + k1 + k2),
    ]
    mean = sum(smooth) / 4
    result = weigh([1.0, 77.0, 2.0, 4.0, 2.0], mask=[[1, 0, 1, 1, 1]], clip=None, smooth_sigma=0.5)[0]
    assert [result[i] for i in (0, 2, 3, 4)] == pytest.approx([s / mean for s in smooth], rel=1e-5)


def test_wide_smoothing_makes_weights_equal():
    assert weigh([1.0, 2.0, 4.0], smooth_sigma=1e5)[0] == pytest.approx([1, 1, 1], abs=1e-6)


def test_topk_by_hand():
    """k = 0.5 of 4 tokens keeps raw 2 and 1; the others get 1 before the division by 5/4."""
    vgr = [4.0, 1.0, 4.0, 2.0]  # mean s is -5/4 ln 2: raw 2^(-3/4), 2^(5/4), 2^(-3/4), 2^(1/4)
    largest, second = 2**1.25, 2**0.25
    mean = (largest + second + 2) / 4
    assert weigh(vgr, topk_ratio=0.5)[0] == pytest.approx([1 / mean, largest / mean, 1 / mean, second / mean])
    assert weigh(vgr, topk_ratio=1.0) == weigh(vgr)


@given(
    vgr=arrays("float32", (2, 9), elements=st.one_of(st.floats(0, INF, width=32), st.just(NAN))),
    valid=arrays("bool", (2, 9)),
    sigma=st.sampled_from([0.0, 0.4, 2.0]),
    topk=st.sampled_from([None, 0.3, 1.0]),
)
def test_mean_weight_is_1(vgr, valid, sigma, topk):
    vgr, mask = torch.from_numpy(vgr), torch.from_numpy(valid)
    weights = token_weights(vgr, mask, smooth_sigma=sigma, topk_ratio=topk)
    assert weights.isfinite().all()
    assert (weights[~mask] == 1).all()
    assert (weights > 0).all()
    assert weights.max() <= 3.0 / 0.2 + 1e-4
    for row in range(2):
        if mask[row].any():
            assert weights[row, mask[row]].mean().item() == pytest.approx(1, abs=1e-5)


def test_dependency_weights_by_hand():
    """s = 0, 1, 1, 6 has mean 2: 0, 1/2, 1/2, 3, clipped from below to 0.2; their mean is 1.05."""
    result = dependency_weights(torch.tensor([[0.0, 1.0, 1.0, 6.0]]), torch.ones(1, 4))[0].tolist()
    assert result == pytest.approx([0.2 / 1.05, 0.5 / 1.05, 0.5 / 1.05, 3 / 1.05])
    unclipped = dependency_weights(torch.tensor([[0.0, 1.0, 1.0, 6.0]]), torch.ones(1, 4), clip=None)[0].tolist()
    assert unclipped == pytest.approx([0, 0.5, 0.5, 3])


def test_dependency_weights_where_undefined():
    """No dependence at all, no defined dependency, one undefined token, padding, one token, no token."""
    dependency = torch.tensor([[0.0, 0.0], [NAN, NAN], [NAN, 2.0], [2.0, 9.0], [9.0, 9.0]])
    mask = torch.tensor([[1, 1], [1, 1], [1, 1], [1, 0], [0, 0]])
    assert dependency_weights(dependency, mask).tolist() == [[1.0, 1.0]] * 5
    assert dependency_weights(torch.tensor([[NAN, 1.0, 3.0]]), torch.ones(1, 3)).tolist() == [[1.0, 0.5, 1.5]]


@given(
    dependency=arrays("float32", (2, 9), elements=st.one_of(st.floats(0, 10, width=32), st.just(NAN))),
    valid=arrays("bool", (2, 9)),
)
def test_mean_dependency_weight_is_1(dependency, valid):
    mask = torch.from_numpy(valid)
    weights = dependency_weights(torch.from_numpy(dependency), mask)
    assert weights.isfinite().all()
    assert (weights > 0).all()
    for row in range(2):
        if mask[row].any():
            assert weights[row, mask[row]].mean().item() == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("clip", [(3.0, 0.2), (-0.1, 1.0), (0.0, 0.0), (1.0,), 3.0, "ab", (NAN, 1.0), (0.2, NAN)])
def test_clip_out_of_range(clip):
    for weights in (token_weights, dependency_weights):
        with pytest.raises(
            ConfigError, match=r"^clip is .*: give None or two numbers with 0 <= low <= high and high ab"
        ):
            weights(torch.ones(1, 1), torch.ones(1, 1), clip=clip)


@pytest.mark.parametrize(("option", "value"), [("smooth_sigma", -1), ("smooth_sigma", INF), ("topk_ratio", 0)])
def test_options_out_of_range(option, value):
    with pytest.raises(ConfigError, match=rf"^{option} is {value}: give a number "):
        token_weights(torch.ones(1, 1), torch.ones(1, 1), **{option: value})


def test_shapes():
    with pytest.raises(DataError, match=r"^token_weights got token_vgr of shape \(1, 3\) and a mask of shape \(1, 4\)"):
        token_weights(torch.ones(1, 3), torch.ones(1, 4))
    with pytest.raises(DataError, match=r"^dependency_weights got dependency of shape \(1, 3\) and a mask of shape"):
        dependency_weights(torch.ones(1, 3), torch.ones(1, 4))


def test_limits_if_none_are_given():
    """VGR 1, 1, 1000: scores 0, 0, -6.9, so raw 10, 10, 0.01; held in [0.2, 3], mean 6.2 / 3."""
    found = token_weights(torch.tensor([[1.0, 1.0, 1000.0]]), torch.ones(1, 3))[0].tolist()
    assert found == pytest.approx([9 / 6.2, 9 / 6.2, 0.6 / 6.2])


def test_no_dependency_at_all_leaves_all_weights_1_without_limits_too():
    assert dependency_weights(torch.zeros(1, 3), torch.ones(1, 3), clip=None).tolist() == [[1.0, 1.0, 1.0]]


def test_smoothing_ends_after_three_sigma():
    """Sigma 1: the fifth token, 10,000 times the others, reaches the second at distance 3, and not the first."""
    found = token_weights(torch.tensor([[1.0, 1.0, 1.0, 1.0, 1e-4]]), torch.ones(1, 5), clip=None, smooth_sigma=1.0)
    near = [math.exp(-distance * distance / 2) for distance in range(4)]
    others = near[1] + near[0] + near[1] + near[2]
    second = (others + 1e4 * near[3]) / (others + near[3])
    assert (found[0, 1] / found[0, 0]).item() == pytest.approx(second, rel=1e-4)
