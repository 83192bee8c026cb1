"""What is kept while a rollout batch is made: where attention is measured, and how it fits the batch."""

import pytest
import torch

from vgr_trl.signals import AttentionMass, RolloutSignals
from vgr_trl.wants import _limit_kept_rows, pad_signals


@pytest.mark.parametrize("length", [3, 1])
def test_attention_of_generation_is_padded_and_cut_to_the_batch(length):
    """Tokens that are masked and columns that padding adds do not count, columns that are cut off are gone."""
    side, count = torch.full((2, 1, 2), 0.4), torch.tensor([8])
    mask = torch.arange(length).unsqueeze(0) < 1
    made = torch.ones(1, 2).bool()
    signals = RolloutSignals(-side[0], side[0], made, AttentionMass(side, side, count, count, made))
    padded = pad_signals(signals, mask)
    assert padded.logps.tolist() == [[pytest.approx(-0.4), 0, 0][:length]]
    found = padded.attention
    assert found.vision.tolist() == found.instruction.tolist() == [[[pytest.approx(0.4), 0, 0][:length]]] * 2
    assert torch.equal(found.mask, mask)
    assert found.num_vision.tolist() == [8]


def test_maps_are_kept_of_as_many_rows_as_fit(monkeypatch):
    """2 layers, 12 tokens, vision tokens as the rows have them, 4 bytes each; a smaller row behind a large one fits."""
    vision = torch.zeros(4, 40, dtype=torch.bool)
    for row, tokens in enumerate((16, 32, 16, 8)):
        vision[row, :tokens] = True
    rows = (0, 1, 2, 3)
    one = 4 * 2 * 12 * 16
    for most, kept in ((one - 1, [3]), (one, [0]), (2 * one - 1, [0, 3]), (2 * one, [0, 2]), (3 * one, [0, 1])):
        monkeypatch.setattr("vgr_trl.wants.MOST_KEPT", most)
        assert _limit_kept_rows(vision, 2 * 12, rows) == kept
    assert _limit_kept_rows(vision, 2 * 12, ()) == []
