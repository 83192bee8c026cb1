"""Whether token weights work where this is run: in an environment of verl, of EasyR1, or of neither.

python -m pytest tests/integrations/test_vgr_integration.py
"""

import pytest
import torch

from vgr_trl.integrations.verl import token_vgr_weights
from vgr_trl.integrations.verl.credit import SignalContext, options_of, shape
from vgr_trl.signals.ratios import AttentionMass


def test_a_token_that_looks_at_the_image_gets_more_weight():
    """VGR 1, 2, 4: weights 12/7, 6/7, 3/7 (definitions); advantages are multiplied, the mask stays."""
    count = torch.tensor([2])
    vision = torch.full((1, 1, 3), 0.2)
    mass = AttentionMass(vision, vision * torch.tensor([1.0, 2.0, 4.0]), count, count, torch.ones(1, 3) > 0)
    weights, info = token_vgr_weights(mass, clip=None)
    assert weights[0].tolist() == pytest.approx([12 / 7, 6 / 7, 3 / 7])
    assert info["vgr"].item() == pytest.approx(7 / 3)


@pytest.mark.parametrize("apply_to", ["advantages", "mask"])
def test_weights_of_a_reward_reach_the_loss(apply_to):
    options = options_of("vgr_token_weights", {"apply_to": apply_to, "collect_attentions": True})
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    found = SignalContext(options, token_weights=torch.tensor([[1.0, 3.0, 9.0], [1.0, 1.0, 4.0]]))
    shaped = shape(torch.tensor([[2.0, 2.0, 2.0], [-1.0, -1.0, -1.0]]), mask, found)
    weights = torch.tensor([[0.5, 1.5, 0.0], [0.5, 0.5, 2.0]])
    if apply_to == "advantages":
        assert torch.allclose(shaped, weights * torch.tensor([[2.0], [-1.0]]))
        assert found.response_mask is None
    else:
        assert shaped.tolist() == [[2, 2, 0], [-1, -1, -1]]
        assert torch.allclose(found.response_mask, weights)
