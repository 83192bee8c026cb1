"""What is kept while a rollout batch is made: where attention is measured, and how it fits the batch."""

import torch

from vgr_trl.measure import _limit_kept_rows


def test_maps_are_kept_of_as_many_rows_as_fit(monkeypatch):
    """2 layers, 12 tokens, vision tokens as the rows have them, 4 bytes each; a smaller row behind a large one fits."""
    vision = torch.zeros(4, 40, dtype=torch.bool)
    for row, tokens in enumerate((16, 32, 16, 8)):
        vision[row, :tokens] = True
    rows = (0, 1, 2, 3)
    one = 4 * 2 * 12 * 16
    for most, kept in ((one - 1, [3]), (one, [0]), (2 * one - 1, [0, 3]), (2 * one, [0, 2]), (3 * one, [0, 1])):
        monkeypatch.setattr("vgr_trl.measure.MOST_KEPT", most)
        assert _limit_kept_rows(vision, 2 * 12, rows) == kept
    assert _limit_kept_rows(vision, 2 * 12, ()) == []
