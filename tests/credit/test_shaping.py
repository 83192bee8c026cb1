"""Every rule of credit composed: by hand, options off, undefined signals, metrics, two processes in one."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vgr_trl.batch import AttentionMass, RolloutSignals
from vgr_trl.credit import CreditOptions, shape_advantages
from vgr_trl.metrics import Totals, add_weights
from vgr_trl.utils import ConfigError, DataError

NAN = math.nan
RULES = (
    {"token_weights": True, "token_weights_smooth_sigma": 0.5, "token_weights_topk_ratio": 0.5},
    {"enable_perception_filtering": True},
    {"enable_perception_filtering": True, "perception_weighting": "soft"},
    {"enable_entropy_filtering": True},
    {"enable_trajectory_reweighting": True},
)


def attention(vgr, layers=3):
    """Attention mass of `layers` layers whose VGR in every layer is the given one: one token on each side."""
    vgr = torch.tensor(vgr) if not isinstance(vgr, torch.Tensor) else vgr
    ones = torch.ones(len(vgr), dtype=torch.long)
    vision = torch.full((layers, *vgr.shape), 0.1)
    return AttentionMass(vision, vision * vgr, ones, ones, torch.ones_like(vgr, dtype=torch.bool))


def signals(mask, dependency=None, entropies=None, vgr=None):
    mask = torch.tensor(mask, dtype=torch.bool)
    empty = torch.zeros(mask.shape)
    return RolloutSignals(
        empty,
        empty if entropies is None else torch.tensor(entropies),
        mask,
        None if vgr is None else attention(vgr),
        None if dependency is None else torch.tensor(dependency),
    )


def random_signals(rows, tokens, seed=0):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, tokens + 1, (rows, 1), generator=generator)
    draw = [torch.rand(rows, tokens, generator=generator) for _ in range(4)]
    return RolloutSignals(
        -draw[0], 2 * draw[1], torch.arange(tokens) < lengths, attention(0.2 + 3 * draw[2]), 5 * draw[3] ** 4
    )


def shaped(advantages, measured, **options):
    """Advantages (N, T), and metrics."""
    return shape_advantages(torch.tensor(advantages), measured, CreditOptions(**options))


def test_without_a_rule_every_token_gets_the_advantage_of_its_completion():
    credit, metrics = shaped([1.5, -2.0], signals([[1, 1, 0], [1, 0, 0]]))
    assert credit.tolist() == [[1.5] * 3, [-2.0] * 3]
    assert metrics == {}


def test_all_rules_by_hand():
    """Two completions of 4 and 2 tokens.

    VGR 1, 2, 4, 2 has raw 2, 1, 1/2, 1 and mean 9/8; VGR 1, 1 has weights 1. Dependencies 0, 3, 1, 0 and 4, 0 with
    p = 0.5 keep the second, third and fifth token; entropies with p = 0.25 keep the last and the first token of the
    second completion. z = 1 and 2, so u = 0 and 1, a = 0.9, b = 0.9 + 0.1 / 0.5 = 1.1.
    """
    measured = signals(
        [[1, 1, 1, 1], [1, 1, 0, 0]],
        dependency=[[0.0, 3.0, 1.0, 0.0], [4.0, 0.0, 9.0, 9.0]],
        entropies=[[0.1, 0.2, 0.3, 0.4], [0.5, 0.1, 9.0, 9.0]],
        vgr=[[1.0, 2.0, 4.0, 2.0], [1.0, 1.0, NAN, NAN]],
    )
    credit, metrics = shaped(
        [2.0, -1.0],
        measured,
        token_weights=True,
        enable_perception_filtering=True,
        top_p_perception_tokens=0.5,
        enable_entropy_filtering=True,
        top_p_entropy_tokens=0.25,
        enable_trajectory_reweighting=True,
        trajectory_scaling_min=0.9,
    )
    eighth = 8 / 9
    assert credit[0].tolist() == pytest.approx([0, 1.8 * eighth, 0.9 * eighth, 1.8 * eighth])
    assert credit[1].tolist() == pytest.approx([-1.1, 0, 0, 0])
    assert metrics == pytest.approx(
        {
            "perception_token_fraction": 3 / 6,
            "low_var_kl_mean_selected": 8 / 3,
            "low_var_kl_mean_rejected": 0,
            "low_var_kl_threshold": (1 + 4) / 2,
            "entropy_token_fraction": 2 / 6,
            "entropy_mean_selected": 0.45,
            "entropy_mean_rejected": 0.7 / 4,
            "entropy_threshold": 0.45,
            "combined_token_fraction": 4 / 6,
            "sensitivity_score_mean": 1.5,
            "scaling_factor_mean": 1.0,
            "dynamic_scaling_max": 1.1,
            "token_weight_mean": 1.0,
            "token_weight_variance": (49 + 1 + 25 + 1 + 0 + 0) / 81 / 6,
            "token_weight_min": 4 / 9,
            "token_weight_max": 16 / 9,
        }
    )


def test_soft_perception_weights_instead_of_a_filter():
    """s = 0, 1, 1, 6 has weights 0.2, 0.5, 0.5, 3 over 1.05; the entropy filter still filters."""
    measured = signals([[1, 1, 1, 1]], dependency=[[0.0, 1.0, 1.0, 6.0]], entropies=[[4.0, 3.0, 2.0, 1.0]])
    soft = {"enable_perception_filtering": True, "perception_weighting": "soft"}
    credit, metrics = shaped([2.1], measured, **soft)
    assert credit[0].tolist() == pytest.approx([0.4, 1, 1, 6])
    assert set(metrics) == {f"perception_weight_{part}" for part in ("mean", "variance", "min", "max")}
    assert metrics["perception_weight_max"] == pytest.approx(3 / 1.05)
    credit, _ = shaped([2.1], measured, **soft, enable_entropy_filtering=True, top_p_entropy_tokens=0.5)
    assert credit[0].tolist() == pytest.approx([0.4, 1, 0, 0])


def test_soft_perception_weights_are_clipped_to_the_limits_of_token_weights():
    """s = 0, 1, 1, 6 over their mean 2 is 0, 1/2, 1/2, 3; clipped to [0.5, 1.5] and over the mean 3/4: 2/3, …, 2."""
    measured = signals([[1, 1, 1, 1]], dependency=[[0.0, 1.0, 1.0, 6.0]])
    soft = {"enable_perception_filtering": True, "perception_weighting": "soft"}
    credit, _ = shaped([3.0], measured, **soft, token_weights_clip=[0.5, 1.5])
    assert credit[0].tolist() == pytest.approx([2, 2, 2, 6])


def test_positive_only_leaves_completions_with_negative_advantage_alone():
    measured = signals([[1, 1, 1]] * 3, vgr=[[1.0, 2.0, 4.0]] * 3)
    credit, _ = shaped([7.0, -7.0, 0.0], measured, token_weights=True, token_weights_positive_only=True)
    assert credit[0].tolist() == pytest.approx([12, 6, 3])
    assert credit[1:].tolist() == [[-7.0] * 3, [0.0] * 3]


def test_layers_of_the_token_weights():
    """VGR is uniform in the first two of three layers and 1, 2, 4 in the last, which is the late third."""
    measured = signals([[1, 1, 1]], vgr=[[1.0, 1.0, 1.0]])
    measured.attention.instruction[2] = 0.1 * torch.tensor([[1.0, 2.0, 4.0]])
    of_all = [21 / 2.25, 21 / 3, 21 / 4.5]  # mean VGR over three layers 1, 4/3, 2, and weights go with its inverse
    for last, expected in ((None, [12, 6, 3]), (1, [12, 6, 3]), (3, of_all)):
        credit, _ = shaped([7.0], measured, token_weights=True, token_weights_last_k_layers=last)
        assert credit[0].tolist() == pytest.approx(expected)
    with pytest.raises(ConfigError, match=r"^token_weights_last_k_layers is 4, but attention was measured in 3 layers"):
        shaped([7.0], measured, token_weights=True, token_weights_last_k_layers=4)


def test_token_weights_read_the_late_segment_of_the_chosen_segments():
    """VGR is 1, 2, 4 in the last two of nine layers and uniform before: all of `ends`, two thirds of `thirds`."""
    measured = signals([[1, 1, 1]])
    measured.attention = attention([[1.0, 1.0, 1.0]], layers=9)
    measured.attention.instruction[7:] = 0.1 * torch.tensor([[1.0, 2.0, 4.0]])
    options = CreditOptions(token_weights=True, token_weights_clip=[0, 10])
    options.attention_segments = "ends"
    credit, _ = shape_advantages(torch.tensor([7.0]), measured, options)
    assert credit[0].tolist() == pytest.approx([12, 6, 3])
    options.attention_segments = "thirds"  # VGR 1, 5/3, 3
    credit, _ = shape_advantages(torch.tensor([7.0]), measured, options)
    assert credit[0].tolist() == pytest.approx([21 * weight / (1 + 3 / 5 + 1 / 3) for weight in (1, 3 / 5, 1 / 3)])


def test_a_model_of_two_layers_is_weighed_by_both():
    measured = signals([[1, 1, 1]])
    measured.attention = attention([[1.0, 2.0, 4.0]], layers=2)
    assert shaped([7.0], measured, token_weights=True)[0][0].tolist() == pytest.approx([12, 6, 3])


def test_a_completion_without_dependency_is_neither_filtered_nor_scaled():
    """Its row has no image; the others have z = 0 and 2."""
    measured = signals([[1, 1]] * 3, dependency=[[NAN, NAN], [0.0, 0.0], [4.0, 0.0]])
    filtered = {"enable_perception_filtering": True, "top_p_perception_tokens": 0.5}
    scaled = {"enable_trajectory_reweighting": True, "trajectory_scaling_min": 0.9}
    credit, metrics = shaped([1.0, 1.0, 1.0], measured, **filtered, **scaled)
    assert credit.flatten().tolist() == pytest.approx([1, 1, 0.9, 0, 1.1, 0])
    assert metrics["perception_token_fraction"] == pytest.approx(4 / 6)
    assert metrics["low_var_kl_mean_selected"] == pytest.approx(2.0)
    assert metrics["sensitivity_score_mean"] == pytest.approx(1.0)


def test_dead_rows_take_no_part_in_the_trajectory_scale():
    """z = 1, 2, 5 count; the dead rows with z = 0 and 9 do not, and keep their advantage of 0."""
    measured = signals([[1]] * 5, dependency=[[1.0], [0.0], [2.0], [9.0], [5.0]])
    options = CreditOptions(enable_trajectory_reweighting=True, trajectory_scaling_min=0.8)
    live = torch.tensor([True, False, True, False, True])
    credit, metrics = shape_advantages(torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0]), measured, options, shaped=live)
    assert credit.flatten().tolist() == pytest.approx([0.8, 0, 0.92, 0, 1.28])
    assert metrics["scaling_factor_mean"] == pytest.approx(1)
    assert metrics["sensitivity_score_mean"] == pytest.approx(8 / 3)


def test_rows_that_take_no_part_in_the_trajectory_scale_are_scaled_within_it():
    """z = 1, 2, 5 have scales 0.8, 0.92, 1.28; the others, with z = 0, 3 and 9, get those of 1, 3 and 5."""
    measured = signals([[1]] * 6, dependency=[[1.0], [0.0], [2.0], [9.0], [5.0], [3.0]])
    options = CreditOptions(enable_trajectory_reweighting=True, trajectory_scaling_min=0.8)
    live = torch.tensor([True, False, True, False, True, False])
    credit, _ = shape_advantages(torch.ones(6), measured, options, shaped=live)
    assert credit.flatten().tolist() == pytest.approx([0.8, 0.8, 0.92, 1.28, 1.28, 1.04])


@pytest.mark.parametrize("tokens", [0, 1])
def test_no_token_at_all(tokens):
    measured = signals(
        torch.zeros(2, tokens).tolist(), dependency=torch.ones(2, tokens).tolist(), vgr=torch.ones(2, tokens)
    )
    on = ("token_weights", "enable_perception_filtering", "enable_entropy_filtering", "enable_trajectory_reweighting")
    credit, metrics = shaped([1.0, -1.0], measured, **dict.fromkeys(on, True))
    assert credit.shape == (2, tokens)
    assert not credit.any(), "padding never gets credit from a filter"
    assert metrics.pop("dynamic_scaling_max") == 1
    assert all(map(math.isnan, metrics.values()))


def test_equal_dependencies_filter_by_position_and_scale_nothing():
    measured = signals([[1, 1, 1], [1, 0, 0]], dependency=[[2.0, 2.0, 2.0], [2.0, 0.0, 0.0]])
    filtered = {"enable_perception_filtering": True, "top_p_perception_tokens": 0.4}
    credit, metrics = shaped([1.0, 1.0], measured, **filtered, enable_trajectory_reweighting=True)
    assert credit.tolist() == [[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]]
    assert metrics["dynamic_scaling_max"] == metrics["scaling_factor_mean"] == 1


def all_options() -> list[CreditOptions]:
    found = []
    for chosen in itertools.chain.from_iterable(
        itertools.combinations(RULES, count) for count in range(len(RULES) + 1)
    ):
        options = {}
        for rule in chosen:
            options |= rule
        found.append(CreditOptions(**options))
    return found


@pytest.mark.parametrize("options", all_options(), ids=lambda options: "")
def test_the_number_of_gathers_depends_on_the_options_alone(options):
    counts = []
    for measured in (
        random_signals(4, 6, seed=1),
        signals([[0] * 6] * 4, [[NAN] * 6] * 4, [[NAN] * 6] * 4, [[NAN] * 6] * 4),
    ):
        calls = []

        def gather(tensor, calls=calls):
            assert tensor.ndim == 1
            calls.append(len(tensor))
            return tensor

        shape_advantages(torch.zeros(4), measured, options, gather=gather)
        counts.append(calls)
    assert counts[0] == counts[1]
    assert len(counts[0]) <= 2


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), rows=st.integers(1, 6), tokens=st.integers(1, 12))
def test_invariants(seed, rows, tokens):
    """The filter keeps ⌈p · length⌉ tokens and no padding; scales and weights have mean 1, so sums stay."""
    measured, advantages = random_signals(rows, tokens, seed), torch.ones(rows)
    options = CreditOptions(enable_perception_filtering=True, top_p_perception_tokens=0.4)
    kept, _ = shape_advantages(advantages, measured, options)
    assert (kept.sum(1) == torch.tensor([math.ceil(2 * int(length) / 5) for length in measured.mask.sum(1)])).all()
    assert not kept[~measured.mask].any()
    weighted, _ = shape_advantages(advantages, measured, CreditOptions(token_weights=True))
    assert torch.allclose((weighted * measured.mask).sum(1), measured.mask.sum(1).float(), rtol=1e-4)
    scaled, metrics = shape_advantages(advantages, measured, CreditOptions(enable_trajectory_reweighting=True))
    if measured.mask.any():
        assert scaled[measured.mask.any(1), 0].mean().item() == pytest.approx(1, abs=1e-5)
        assert metrics["scaling_factor_mean"] == pytest.approx(1, abs=1e-5)


def test_nothing_carries_a_gradient_and_the_advantages_given_stay_as_they_were():
    measured = random_signals(4, 6)
    measured.dependency.requires_grad_()
    advantages = torch.randn(4, requires_grad=True)
    before = advantages.detach().clone()
    options = CreditOptions(enable_perception_filtering=True, perception_weighting="soft")
    credit, _ = shape_advantages(advantages, measured, options)
    assert not credit.requires_grad
    assert torch.equal(advantages, before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"token_weights": True}, "token_weights is on, but the signals have no attention: measure it"),
        ({"enable_perception_filtering": True}, "enable_perception_filtering is on, but the signals have no dep"),
        ({"enable_trajectory_reweighting": True}, "enable_trajectory_reweighting is on, but the signals have no dep"),
        ({"perception_weighting": "hard"}, "perception_weighting is 'hard': give filter or soft."),
    ],
)
def test_missing_signals_and_unknown_options(options, message):
    with pytest.raises(ConfigError) as error:
        shaped([0.0], signals([[1]]), **options)
    assert str(error.value).startswith(message)


def test_missing_entropies():
    measured = signals([[1]])
    measured.entropies = None
    with pytest.raises(ConfigError, match=r"^enable_entropy_filtering is on, but the signals have no entropies: mea"):
        shaped([0.0], measured, enable_entropy_filtering=True)


def test_tokens_may_have_advantages_of_their_own():
    """The two of highest entropy keep theirs."""
    measured = signals([[1, 1, 1, 0]])
    measured.entropies = torch.tensor([[0.1, 0.3, 0.2, 9.0]])
    credit, _ = shaped([[1.0, -2.0, 3.0, 0.0]], measured, enable_entropy_filtering=True, top_p_entropy_tokens=0.5)
    assert credit.tolist() == [[0, -2, 3, 0]]


def test_shapes():
    for advantages, shape in (([0.0, 0.0], r"\(2,\)"), ([[0.0, 0.0]], r"\(1, 2\)")):
        message = rf"^shape_advantages got advantages of shape {shape} and a mask of shape \(1, 3\)"
        with pytest.raises(DataError, match=message):
            shaped(advantages, signals([[1, 1, 1]]))
    with pytest.raises(DataError, match=r"^shape_advantages got shaped of shape \(2,\) and a mask of shape \(1, 3\)"):
        shape_advantages(torch.zeros(1), signals([[1, 1, 1]]), CreditOptions(), shaped=torch.ones(2))
    measured = signals([[1, 1, 1]], dependency=[[1.0]])
    with pytest.raises(DataError, match=r"dependency of shape \(1, 1\) and a mask of shape \(1, 3\)"):
        shaped([0.0], measured, enable_perception_filtering=True)


@pytest.mark.parametrize(
    ("changed", "weights"),
    [
        ({"token_weights_clip": (0.8, 1.25)}, [1.25, 1.0, 0.8]),
        ({"token_weights_clip": (0.01, 100.0)}, [2.0, 1.0, 0.5]),
        ({"token_weights_clip": (0.01, 100.0), "token_weights_topk_ratio": 0.3}, [2.0, 1.0, 1.0]),
    ],
)
def test_limits_and_share_of_token_weights_are_the_options(changed, weights):
    """VGR 1, 2, 4 has raw weights 2, 1, 1/2 before limits and mean."""
    credit, _ = shaped([1.0], signals([[1, 1, 1]], vgr=[[1.0, 2.0, 4.0]]), token_weights=True, **changed)
    mean = sum(weights) / 3
    assert credit[0].tolist() == pytest.approx([weight / mean for weight in weights])


def test_a_token_without_dependency_is_not_kept_beside_others_that_have_one():
    measured = signals([[1, 1, 1, 1], [1, 1, 0, 0]], dependency=[[NAN, 1.0, 3.0, 2.0], [NAN] * 4])
    credit, _ = shaped([1.0, 1.0], measured, enable_perception_filtering=True, top_p_perception_tokens=0.5)
    assert credit.tolist() == [[0, 0, 1, 1], [1, 1, 0, 0]]


def test_wide_smoothing_is_the_option():
    """Every token gets the mean of all: weights 1."""
    measured = signals([[1, 1, 1]], vgr=[[1.0, 2.0, 4.0]])
    credit, _ = shaped([1.0], measured, token_weights=True, token_weights_smooth_sigma=1000.0)
    assert credit[0].tolist() == pytest.approx([1, 1, 1], abs=1e-4)


@pytest.mark.parametrize(
    ("weights", "variance"), [([2.0, 2.0, 2.0], 0.0), ([1.0, 3.0, 2.0], 2 / 3), ([0.5, 1.5], 0.25)]
)
def test_the_variance_of_weights_is_about_their_own_mean(weights, variance):
    totals, given = Totals(), torch.tensor([[*weights, 9.0]])
    add_weights(totals, "weight", given, given < 9)
    metrics = totals.metrics(lambda row: torch.cat([row, row]))  # two processes with the same
    assert metrics["weight_mean"] == pytest.approx(sum(weights) / len(weights))
    assert metrics["weight_variance"] == pytest.approx(variance, abs=1e-7)
