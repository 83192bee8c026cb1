import math
from fractions import Fraction
from pathlib import Path

import pytest
import torch
import yaml

from vgr_trl import credit as rules
from vgr_trl.config import CreditOptions
from vgr_trl.errors import ConfigError
from vgr_trl.recipes import load_recipe
from vgr_trl.signals.named import RolloutSignals
from vgr_trl.signals.ratios import AttentionMass

NAN = math.nan
ON = ("token_weights", "enable_perception_filtering", "enable_entropy_filtering", "enable_trajectory_reweighting")
SOFT = {"enable_perception_filtering": True, "perception_weighting": "soft"}
WEIGHTS = yaml.safe_load(Path(__file__).with_name("token_weights.yaml").read_text(encoding="utf-8"))


def signals(mask, *, entropies=None, vgr=None, **measured):
    """Signals by name; the VGR is the same in each of three layers, of one token on each side."""
    mask = torch.tensor(mask, dtype=torch.bool)
    found = {name: torch.tensor(values) for name, values in measured.items()}
    if vgr is not None:
        vision, ones = torch.full((3, *mask.shape), 0.1), torch.ones(len(mask), dtype=torch.long)
        found["attention"] = AttentionMass(vision, vision * torch.tensor(vgr), ones, ones, torch.ones_like(mask))
    empty = torch.zeros(mask.shape)
    return RolloutSignals(empty, empty if entropies is None else torch.tensor(entropies), mask, **found)


def shaped(advantages, measured, **options):
    return rules.shape_advantages(torch.tensor(advantages), measured, CreditOptions(**options))


def test_all_rules_by_hand():
    """Two completions of 4 and 2 tokens.

    VGR 1, 2, 4, 2 has raw 2, 1, 1/2, 1 and mean 9/8; VGR 1, 1 has weights 1. Dependencies 0, 3, 1, 0 and 4, 0 with
    p = 0.5 keep the second, third and fifth token; entropies with p = 0.25 keep the last and the first token of the
    second completion. z = 1 and 2, so u = 0 and 1, a = 0.9, b = 0.9 + 0.1 / 0.5 = 1.1.
    """
    measured = signals(
        [[1, 1, 1, 1], [1, 1, 0, 0]], dependency=[[0.0, 3.0, 1.0, 0.0], [4.0, 0.0, 9.0, 9.0]],
        entropies=[[0.1, 0.2, 0.3, 0.4], [0.5, 0.1, 9.0, 9.0]], vgr=[[1.0, 2.0, 4.0, 2.0], [1.0, 1.0, NAN, NAN]],
    )  # fmt: skip
    credit, metrics = shaped(
        [2.0, -1.0], measured, **dict.fromkeys(ON, True),
        top_p_perception_tokens=0.5, top_p_entropy_tokens=0.25, trajectory_scaling_min=0.9,
    )  # fmt: skip
    eighth = 8 / 9
    assert credit[0].tolist() == pytest.approx([0, 1.8 * eighth, 0.9 * eighth, 1.8 * eighth])
    assert credit[1].tolist() == pytest.approx([-1.1, 0, 0, 0])
    assert metrics == pytest.approx(
        {
            "perception_token_fraction": 3 / 6, "low_var_kl_mean_selected": 8 / 3, "low_var_kl_mean_rejected": 0,
            "low_var_kl_threshold": (1 + 4) / 2, "entropy_token_fraction": 2 / 6, "entropy_mean_selected": 0.45,
            "entropy_mean_rejected": 0.7 / 4, "entropy_threshold": 0.45, "combined_token_fraction": 4 / 6,
            "sensitivity_score_mean": 1.5, "scaling_factor_mean": 1.0, "dynamic_scaling_max": 1.1,
            "token_weight_mean": 1.0, "token_weight_variance": (49 + 1 + 25 + 1 + 0 + 0) / 81 / 6,
            "token_weight_min": 4 / 9, "token_weight_max": 16 / 9,
        }
    )  # fmt: skip


def test_soft_perception_weights_instead_of_a_filter():
    """s = 0, 1, 1, 6 has weights 0.2, 0.5, 0.5, 3 over 1.05, of advantages per token; the entropy filter filters."""
    measured = signals([[1, 1, 1, 1]], dependency=[[0.0, 1.0, 1.0, 6.0]], entropies=[[4.0, 3.0, 2.0, 1.0]])
    advantages = [[2.1, -2.1, 4.2, 2.1]]
    credit, metrics = shaped(advantages, measured, **SOFT)
    assert credit[0].tolist() == pytest.approx([0.4, -1, 2, 6])
    assert metrics["perception_weight_max"] == pytest.approx(3 / 1.05)
    credit, _ = shaped(advantages, measured, **SOFT, enable_entropy_filtering=True, top_p_entropy_tokens=0.5)
    assert credit[0].tolist() == pytest.approx([0.4, -1, 0, 0])


def test_weights_of_a_reward_come_before_those_measured():
    """3 and 1 over their mean; none given: VGR 1, 2 has raw √2, √½, over 3 / (2√2); all 0: 1."""
    measured = signals([[1, 1]] * 3, vgr=[[1.0, 2.0]] * 3)
    measured.extra[rules.REWARD_FILE_WEIGHTS] = torch.tensor([[3.0, 1.0], [NAN, NAN], [0.0, 0.0]])
    credit, metrics = shaped([2.0, 3.0, 5.0], measured, token_weights=True)
    assert credit.flatten().tolist() == pytest.approx([3.0, 1.0, 4.0, 2.0, 5.0, 5.0])
    assert metrics["token_weight_max"] == pytest.approx(1.5)


def test_layers_and_signs_of_the_token_weights():
    """VGR is uniform in the first two of three layers and 1, 2, 4 in the last, which is the late third."""
    measured = signals([[1, 1, 1]] * 3, vgr=[[1.0, 1.0, 1.0]] * 3)
    measured.attention.instruction[2] = 0.1 * torch.tensor([1.0, 2.0, 4.0])
    of_all = [21 / 2.25, 21 / 3, 21 / 4.5]  # mean VGR over three layers 1, 4/3, 2, and weights go with its inverse
    positive = {"token_weights": True, "token_weights_positive_only": True}
    for last, expected in ((None, [12, 6, 3]), (3, of_all)):
        credit, _ = shaped([7.0, -7.0, 0.0], measured, **positive, token_weights_last_k_layers=last)
        assert credit[0].tolist() == pytest.approx(expected)
        assert credit[1:].tolist() == [[-7.0] * 3, [0.0] * 3]


def test_a_completion_without_dependency_is_neither_filtered_nor_scaled():
    """Its row has no image; the others have z = 0 and 2."""
    measured = signals([[1, 1]] * 3, dependency=[[NAN, NAN], [0.0, 0.0], [4.0, 0.0]])
    filtered = {"enable_perception_filtering": True, "top_p_perception_tokens": 0.5}
    scaled = {"enable_trajectory_reweighting": True, "trajectory_scaling_min": 0.9}
    credit, metrics = shaped([1.0, 1.0, 1.0], measured, **filtered, **scaled)
    assert credit.flatten().tolist() == pytest.approx([1, 1, 0.9, 0, 1.1, 0])
    assert metrics["perception_token_fraction"] == pytest.approx(4 / 6)
    assert metrics["sensitivity_score_mean"] == pytest.approx(1.0)


@pytest.mark.parametrize("options", [*({name: True} for name in ON), SOFT, dict.fromkeys(ON, True)])
def test_the_number_of_gathers_depends_on_the_options_alone(options):
    counts = []
    for valid, value in ((1, 2.0), (0, NAN)):
        found = dict.fromkeys(("dependency", "entropies", "vgr"), [[value, 1.0, 3 * value]] * 4)
        measured, calls = signals([[valid, 0, valid]] * 4, **found), []

        def gather(tensor, calls=calls):
            assert tensor.ndim == 1
            calls.append(len(tensor))
            return tensor

        rules.shape_advantages(torch.zeros(4), measured, CreditOptions(**options), gather=gather)
        counts.append(calls)
    assert counts[0] == counts[1]
    assert len(counts[0]) <= 2


def test_the_trajectory_scale_compares_the_shaped_completions_of_all_processes():
    """z = 1 and 3 here, 5 not compared; 2 elsewhere: u = 0, 1, mean 1/2, so 0.8 and 1.2; 5 gets the largest."""
    measured = signals([[1]] * 3, dependency=[[1.0], [3.0], [5.0]])
    credit, metrics = rules.shape_advantages(
        torch.ones(3), measured, CreditOptions(enable_trajectory_reweighting=True),
        shaped=torch.tensor([True, True, False]),
        gather=lambda local: torch.cat([local, torch.tensor([2.0])]) if len(local) == 3 else local,
    )  # fmt: skip
    assert credit.flatten().tolist() == pytest.approx([0.8, 1.2, 1.2])
    assert metrics["dynamic_scaling_max"] == pytest.approx(1.2)


def test_equal_scores_keep_the_earlier_token_and_undefined_ones_come_last():
    scores = torch.tensor([[0.1, 0.9, 0.3, 0.7, 0.2], [0.4, 9.0, 0.5, 9.0, 9.0], [9.0] * 5])
    valid = torch.tensor([[1] * 5, [1, 0, 1, 0, 0], [0] * 5])  # tool outputs are invalid in the middle
    expected = [[0, 1, 0, 1, 0], [0, 0, 1, 0, 0], [0] * 5]
    assert rules.top_fraction_mask(scores, valid, 0.4).int().tolist() == expected
    scores = torch.tensor([[1.0, 1.0, 1.0, 1.0], [NAN, 0.0, NAN, -torch.inf]])
    mask = torch.ones(2, 4, dtype=torch.bool)
    assert rules.top_fraction_mask(scores, mask, 0.5).int().tolist() == [[1, 1, 0, 0], [1, 1, 0, 0]]
    assert rules.top_fraction_mask(scores[1:], mask[1:], 0.25).int().tolist() == [[0, 1, 0, 0]]


@pytest.mark.parametrize(("fraction", "length", "kept"), [(0.07, 100, 7), (0.55, 100, 55), (1e-12, 9, 1)])
def test_fraction_is_the_decimal_number_that_was_written(fraction, length, kept):
    """In floating point 0.07 · 100 is 7.000000000000001 and 0.55 · 100 is 55.00000000000001."""
    mask = torch.ones(1, length, dtype=torch.bool)
    assert rules.top_fraction_mask(torch.randn(1, length), mask, fraction).sum() == kept


def weigh(vgr, mask, **options):
    return rules.token_weights(torch.tensor([vgr]).float(), torch.tensor([mask]).bool(), **options)[0].tolist()


@pytest.mark.parametrize(("vgr", "mask", "options", "expected"), WEIGHTS)
def test_token_weights_by_hand(vgr, mask, options, expected):
    assert weigh(vgr, mask, **options) == pytest.approx([float(Fraction(each)) for each in expected], abs=1e-6)


def test_smoothing_skips_invalid_tokens_and_reaches_three_sigma():
    """sigma 0.5 reaches 2 tokens: k1 = e^-2, k2 = e^-8; the second token is invalid, the last is beyond reach."""
    k1, k2 = math.exp(-2), math.exp(-8)
    smooth = [  # raw 2, -, 1, 0.5, 1 of VGR 1, -, 2, 4, 2, whose mean s is -ln 2
        (2 + k2) / (1 + k2),
        (1 + 3 * k2 + 0.5 * k1) / (1 + k1 + 2 * k2),
        (0.5 + 2 * k1) / (1 + 2 * k1),
        (1 + 0.5 * k1 + k2) / (1 + k1 + k2),
    ]
    result = weigh([1, 77, 2, 4, 2], [1, 0, 1, 1, 1], clip=None, smooth_sigma=0.5)
    assert [result[i] for i in (0, 2, 3, 4)] == pytest.approx([4 * each / sum(smooth) for each in smooth], rel=1e-5)


def test_completions_without_a_dependency_keep_scale_1_and_change_no_other():
    """z = 1, 2, 5: u = 0, 1/4, 1 with mean 5/12, b = 0.8 + 0.2 · 12/5 = 1.28: scales 0.8, 0.92, 1.28; two undefined."""
    dependency = torch.tensor([[1.0], [9.0], [2.0], [NAN], [5.0]])
    mask = torch.tensor([[1], [0], [1], [1], [1]])
    assert rules.trajectory_scale(dependency, mask).tolist() == pytest.approx([0.8, 1, 0.92, 1, 1.28])
    for means in ((3.0, 3.0), (0.0, 9e-7), (NAN, NAN), ()):
        alone = torch.tensor(means).unsqueeze(1)
        assert rules.trajectory_scale(alone, torch.ones_like(alone)).tolist() == [1.0] * len(means), "none to compare"
    of_all = rules.trajectory_scale(dependency[:3], mask[:3], statistics=(1.0, 5.0, 8 / 3))
    assert of_all.tolist() == pytest.approx([0.8, 1, 0.92])


def vgpo_weights(similarity, mask, groups=None, **options):
    measured = signals(mask, similarity=similarity)
    return rules.vgpo(torch.ones(len(mask)), measured, measured.mask, rules.VGPOOptions(**options), groups=groups)[0]


def test_vgpo_compares_completions_of_a_prompt():
    """Scaled scores 0, 1 and 0, 1, 1 have sums 1 and 2, so u is 0 and 1: 0.5, clamped to 0.9, and 1.5.

    Tokens weigh 0.5, 1.5 and 1/3, 4/3, 4/3. The completions of the other prompt are equal and weigh 1 each.
    """
    similarity = [[0.0, 1.0, NAN], [0.0, 1.0, 1.0], [0.0, 0.5, 0.0], [0.5, 0.0, 0.0], [NAN, NAN, 0.0]]
    mask = [[1, 1, 0], [1, 1, 1], [1, 1, 0], [1, 1, 0], [1, 1, 0]]
    weights = vgpo_weights(similarity, mask, torch.tensor([4, 4, 7, 7, 7]), vgpo_compensation=0.0)
    expected = [[0.45, 1.35, 0.9], [0.5, 2.0, 2.0], [0.5, 1.5, 1.0], [1.5, 0.5, 1.0], [1.0, 1.0, 1.0]]
    valid = torch.tensor(mask).bool()
    assert torch.allclose(weights[valid], torch.tensor(expected)[valid], atol=1e-6)


def test_pgpo_by_hand():
    """ln(1 + S) 0, 0.2, 0.4, 1 is the importance; weights 0, 0.5, 1, 3 with sum 4.5, which is brought to 4 tokens.

    Tokens that are alike, or whose dependency is undefined, keep weight 1.
    """
    dependency = torch.tensor([[0.0, 0.2, 0.4, 1.0], [0.3, 0.3, 5.0, 5.0], [NAN, 0.0, 1.0, 0.0]]).expm1()
    measured = signals([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]], dependency=dependency.tolist())
    weights = rules.pgpo(torch.ones(3), measured, measured.mask, rules.PGPOOptions())[0]
    expected = torch.tensor([[0.0, 4 / 9, 8 / 9, 24 / 9], [1.0, 1.0, 1.0, 1.0], [1.0, 0.0, 2.0, 1.0]])
    assert torch.allclose(weights, expected, atol=1e-5)


def test_vepo_by_hand():
    """Scaled divergences 0, 1/2, 1, changes of entropy 1, 1/2, 0 and entropies 0, 1/2, 1, with alpha 1/2.

    Scores (1 - √((1 - j)(1 - g))) · h are 0, 1/4, 1; of three tokens two are kept. All tokens of the
    completion without an image are kept, and 5 tokens over 4 are 1.25.
    """
    measured = signals(
        [[1, 1, 1], [1, 1, 0]],
        entropies=[[1.0, 2.0, 3.0], [1.0, 1.0, 1.0]],
        jsd=[[0.0, 0.2, 0.4], [NAN, NAN, NAN]],
        perturbed_entropies=[[3.0, 1.0, 3.0], [NAN, NAN, NAN]],
    )
    options = rules.VEPOOptions(top_p_vepo_tokens=0.4, vepo_alpha=0.5)
    weights, metrics = rules.vepo(torch.ones(2), measured, measured.mask, options)
    assert weights.tolist() == [[0, 1.25, 1.25], [1.25, 1.25, 0]]
    assert metrics["score"][0].tolist() == pytest.approx([0, 0.25, 1], abs=1e-6)


def test_anchor_tokens_by_hand():
    """Of three layers the last is late. Half of the tokens, those of largest attention there; all without an image."""
    vision = torch.zeros(3, 2, 4)
    vision[2, 0] = torch.tensor([0.1, 0.4, 0.2, 0.3])
    vision[0, 0] = torch.tensor([0.9, 0.0, 0.0, 0.0])
    measured = signals([[1, 1, 1, 1], [1, 1, 0, 0]])
    mask = measured.mask
    measured.attention = AttentionMass(vision, vision, torch.tensor([5, 0]), torch.tensor([3, 3]), mask)
    kept, _ = rules.anchor_tokens(torch.ones(2), measured, mask, rules.AnchorOptions(top_p_anchor_tokens=0.5))
    assert kept.tolist() == [[False, True, False, True], [True, True, False, False]]


def test_rules_of_a_teacher_by_hand():
    """Policy 1/4 each; the teacher 1/2, 1/8 and 2/5 of it, then a row without a view, then one without variance.

    Gaps ln 2, −ln 2 and ln 8/5. Of A = 2 the weights are 2, 1/2 and 8/5 within 1 ± 1/2, so 3/2, 1/2 and 3/2; of A = −2
    the second becomes 2, so 3/2. With c = 1/2 and d = ln 8/5, ± ln(8/5) / 2 are added to each, filtered or not.
    """
    quarter, (up, down, more) = math.log(1 / 4), (math.log(1 / 2), math.log(1 / 8), math.log(2 / 5))
    measured = signals([[1, 1, 1], [0, 1, 0], [1, 1, 0], [1, 1, 0]])
    measured.logps = torch.full((4, 3), quarter)
    measured.views["teacher"] = torch.tensor([[up, down, more], [NAN, down, NAN], [NAN] * 3, [down, up, NAN]])
    options = {"rlsd_clip": 0.5, "distil_coef": 0.5, "distil_clip": math.log(8 / 5)}
    weighed, _ = shaped([2.0, -2.0, 2.0, 0.0], measured, credit_rules=["rlsd"], plugin_options={"rlsd_clip": 0.5})
    assert weighed[0].tolist() == pytest.approx([3, 1, 3])
    assert (weighed[1, 1].item(), *weighed[2, :2], *weighed[3, :2]) == pytest.approx((-3, 2, 2, 0, 0))
    recipe = load_recipe("rlsd")["plugin_options"] | {"rlsd_clip": 0.5}  # a half of the weights, and a half of 1
    assert shaped([2.0] * 4, measured, credit_rules=["rlsd"], plugin_options=recipe)[0][0].tolist() == [2.5, 1.5, 2.5]
    both, metrics = shaped([2.0, -2.0, 2.0, 0.0], measured, credit_rules=["rlsd", "distil"], plugin_options=options)
    half = math.log(8 / 5) / 2
    assert both[0].tolist() == pytest.approx([3 + half, 1 - half, 3 + half])
    assert (both[1, 1].item(), *both[2, :2], *both[3, :2]) == pytest.approx((-3 - half, 2, 2, -half, half))
    assert not both[~measured.mask].isfinite().logical_not().any()
    assert metrics["credit/distil/gap"] == pytest.approx((math.log(2) - math.log(2) + 2 * half - math.log(2)) / 6)
    assert metrics["credit/distil/added"] == pytest.approx(0.0, abs=1e-6)


def test_prpo_and_tor_by_hand():
    """Dependencies e - 1, 0 and sqrt(e) - 1 have importances 1, 0 and 1/2; changes by ln 2 and ln 4 halve and quarter.

    Of four tokens the quarters of largest entropy and of largest change are the second and the first.
    """
    half = math.log(2)
    measured = signals(
        [[1, 1, 1, 1], [1, 1, 0, 0]],
        entropies=[[0.1, 0.9, 0.5, 0.2], [1.0, 2.0, 0.0, 0.0]],
        dependency=[[math.e - 1, 0, math.e**0.5 - 1, 0], [NAN] * 4],
    )
    measured.views["add_gaussian_noise"] = torch.tensor([[-half, 0, 2 * half, 0], [NAN] * 4])
    measured.views["remove_image"] = torch.tensor([[-2.0, 0.1, 0, 1], [NAN] * 4])
    credit, metrics = shaped([1.0, -1.0], measured, credit_rules=["prpo"], plugin_options={"prpo_boost": 2.0})
    assert credit[0].tolist() == pytest.approx([2, 1, 1.25, 1])
    assert credit[1, :2].tolist() == [-1, -1]  # no image
    assert metrics["credit/prpo/robust_dependency"] == pytest.approx((0.5 + 0.125) / 4)
    for share, expected in ((0.25, [0.5, 1, 0, 0]), (0.5, [0.5, 1, 0, 0.5])):
        shares = {"tor_reasoning_share": 0.25, "tor_perception_share": share}
        credit, _ = shaped([1.0, -1.0], measured, credit_rules=["tor"], plugin_options=shares)
        assert (credit[0].tolist(), credit[1, :2].tolist()) == (expected, [-1, -1])


def test_a_named_rule_that_is_not_switched_on_is_no_silence():
    options = CreditOptions(credit_rules=["trajectory_scale"])
    measured = signals([[1, 1, 1]] * 2, dependency=[[1.0, 1.0, 1.0]] * 2)
    with pytest.raises(ConfigError, match="check_plugins"):
        rules.shape_advantages(torch.ones(2), measured, options)
    options.check_plugins()
    assert rules.shape_advantages(torch.ones(2), measured, options)[0].shape == (2, 3)
