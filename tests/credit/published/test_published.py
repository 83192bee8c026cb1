"""Rules of published methods: worked cases, and what is undefined."""

import pytest
import torch

from vgr_trl.batch import AttentionMass, RolloutSignals
from vgr_trl.credit import AnchorOptions, PGPOOptions, VGPOOptions, anchor_tokens, pgpo, vgpo
from vgr_trl.utils import ConfigError

NAN = float("nan")


def weigh(similarity, mask, groups=None, **options):
    similarity, mask = torch.tensor(similarity), torch.tensor(mask, dtype=torch.bool)
    signals = RolloutSignals(torch.zeros_like(similarity), torch.zeros_like(similarity), mask, similarity=similarity)
    return vgpo(torch.ones(len(mask)), signals, mask, VGPOOptions(**options), groups=groups)[0]


def test_vgpo_by_hand():
    """Scores 0.5, 1, 0.5, 0.75 of one completion; of the last two the largest, 0.75, is raised by 1 + 1 · 3/3 to 1.5.

    Scaled to [0, 1]: 0, 0.5, 0, 1 with mean 0.375, so weights 0.625, 1.125, 0.625, 1.625. Alone it is worth 1.
    """
    weights = weigh([[0.0, 1.0, 0.0, 0.5]], [[1, 1, 1, 1]], vgpo_compensation=1.0)
    assert torch.allclose(weights, torch.tensor([[0.625, 1.125, 0.625, 1.625]]), atol=1e-6)


def test_vgpo_compares_completions_of_a_prompt():
    """Scaled scores 0, 1 and 0, 1, 1 have sums 1 and 2, so u is 0 and 1: 0.5, clamped to 0.9, and 1.5.

    Tokens weigh 0.5, 1.5 and 1/3, 4/3, 4/3. The completions of the other prompt are equal and weigh 1 each.
    """
    similarity = [[0.0, 1.0, NAN], [0.0, 1.0, 1.0], [0.0, 0.5, 0.0], [0.5, 0.0, 0.0]]
    mask = [[1, 1, 0], [1, 1, 1], [1, 1, 0], [1, 1, 0]]
    weights = weigh(similarity, mask, torch.tensor([4, 4, 7, 7]), vgpo_compensation=0.0)
    expected = [[0.45, 1.35, 0.9], [0.5, 2.0, 2.0], [0.5, 1.5, 1.0], [1.5, 0.5, 1.0]]
    valid = torch.tensor(mask).bool()
    assert torch.allclose(weights[valid], torch.tensor(expected)[valid], atol=1e-6)


def test_vgpo_leaves_a_completion_without_image_as_it_is():
    weights = weigh([[NAN, NAN], [0.0, 1.0]], [[1, 1], [1, 1]])
    assert torch.allclose(weights, torch.tensor([[1.0, 1.0], [0.5, 1.5]]), atol=1e-6)


@pytest.mark.parametrize("wrong", [{"vgpo_compensation": -1.0}, {"vgpo_gate_share": 0.0}, {"vgpo_gate_start": 1.0}])
def test_numbers_of_vgpo_out_of_range(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        VGPOOptions(**wrong)


def test_pgpo_by_hand():
    """ln(1 + S) 0, 0.2, 0.4, 1 is the importance; weights 0, 0.5, 1, 3 with sum 4.5, which is brought to 4 tokens."""
    dependency = torch.tensor([[0.0, 0.2, 0.4, 1.0]]).expm1()
    weights = pgpo_weights(dependency, torch.ones(1, 4, dtype=torch.bool))
    assert torch.allclose(weights, torch.tensor([[0.0, 0.5, 1.0, 3.0]]) * 4 / 4.5, atol=1e-5)


def test_pgpo_leaves_tokens_that_are_alike_or_undefined_as_they_are():
    mask = torch.tensor([[True, True, False], [True, True, True], [True, True, True]])
    dependency = torch.tensor([[0.3, 0.3, 5.0], [NAN, NAN, NAN], [NAN, 0.0, 1.0]])
    weights = pgpo_weights(dependency, mask)
    assert torch.allclose(weights, torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 1.0], [1.0, 0.0, 2.0]]), atol=1e-6)


@pytest.mark.parametrize("wrong", [{"pgpo_threshold": 0.0}, {"pgpo_threshold": 1.0}, {"pgpo_boost": -1.0}])
def test_numbers_of_pgpo_out_of_range(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        PGPOOptions(**wrong)


def pgpo_weights(dependency, mask):
    signals = RolloutSignals(torch.zeros(mask.shape), torch.zeros(mask.shape), mask, dependency=dependency)
    return pgpo(torch.ones(len(mask)), signals, mask, PGPOOptions())[0]


def test_anchor_tokens_by_hand():
    """Of three layers the last is late. Half of the tokens, those of largest attention there; all without an image."""
    vision = torch.zeros(3, 2, 4)
    vision[2, 0] = torch.tensor([0.1, 0.4, 0.2, 0.3])
    vision[0, 0] = torch.tensor([0.9, 0.0, 0.0, 0.0])
    mask = torch.tensor([[True, True, True, True], [True, True, False, False]])
    mass = AttentionMass(vision, torch.zeros(3, 2, 4), torch.tensor([5, 0]), torch.tensor([3, 3]), mask)
    signals = RolloutSignals(torch.zeros(2, 4), torch.zeros(2, 4), mask, mass)
    kept, _ = anchor_tokens(torch.ones(2), signals, mask, AnchorOptions(top_p_anchor_tokens=0.5))
    assert kept.tolist() == [[False, True, False, True], [True, True, False, False]]


def test_a_share_of_anchors_out_of_range():
    with pytest.raises(ConfigError, match="top_p_anchor_tokens"):
        AnchorOptions(top_p_anchor_tokens=0.0)
