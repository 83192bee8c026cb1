"""The arithmetic of the bench of the VGR reward's drift, by hand."""

import sys

import pytest
import torch


@pytest.fixture
def looks(module):
    return module("drift.looks")


def test_values_that_follow_the_words_are_explained_by_them(looks):
    """Every `red` adds 1 in all groups: a ridge of 1 among 14 centred squares leaves little; drawn values stay."""
    texts = [f"<think>a {'red' if place % 2 else 'blue'}</think>" for _ in range(8) for place in range(looks.GROUP)]
    follows = looks.centred(torch.tensor([float("red" in text) for text in texts]).double())
    explained, left = looks.by_words(follows, texts)
    assert explained > 0.98
    assert left.abs().max() < 0.1
    drawn = looks.centred(torch.randn(len(texts), generator=torch.Generator().manual_seed(0)).double())
    assert looks.by_words(drawn, texts)[0] < 0.2


def test_correlation_of_centred_values(looks):
    one = torch.tensor([1.0, -1.0, 0.0, 0.0]).double()
    assert looks.correlation(one, -2 * one) == pytest.approx(-1)
    assert looks.correlation(one, torch.tensor([1.0, 0.0, -1.0, 0.0]).double()) == pytest.approx(0.5)
    assert looks.correlation(one, 0 * one) == 0


def test_advantages_of_a_group_that_is_all_right_are_those_of_vgr(looks):
    """The first group is all right: its advantages have the deviation 1, however small the weight of VGR."""
    vgr = torch.arange(1, 17).double()
    right = torch.tensor([1.0] * 8 + [1.0, 0.0] * 4).double()
    advantages = looks.advantages_with_vgr(right, vgr).view(2, 8)
    assert advantages.std(1).tolist() == pytest.approx([1, 1], abs=2e-3)
    assert advantages[0].tolist() == sorted(advantages[0].tolist(), reverse=True)
    assert (advantages[1, ::2] > 0.7).all()
    assert (advantages[1, 1::2] < -0.7).all()


def test_bias_is_the_distance_of_frequencies(looks):
    """Truth: red and blue, half each; said: red alone, 1/2 off; shapes and corners as they are."""
    rows = [{"thought": "a red cross northeast"}, {"thought": "a blue cross northeast"}]
    texts = ["<think>a red cross northeast</think><answer>red</answer>"] * 16
    assert looks.bias(texts, rows) == pytest.approx(0.5 / 3)


def test_other_images_are_of_the_same_question(looks):
    rows = [{"family": family, "image": index} for index, family in enumerate(["colour", "shape", "colour", "shape"])]
    shown = looks.with_other_images(rows)
    assert [row["image"] for row in shown] == [2, 3, 0, 1]
    assert [row["family"] for row in shown] == ["colour", "shape", "colour", "shape"]


def test_the_settings_without_flags_are_those_of_the_recorded_runs(module, monkeypatch):
    drift = module("drift.__main__")
    settings = []
    monkeypatch.setattr(drift, "write", settings.append)
    monkeypatch.setattr(sys, "argv", ["drift", "--write"])
    drift.main()
    assert drift.read(*settings)
