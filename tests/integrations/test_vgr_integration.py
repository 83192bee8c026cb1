"""Whether token weights work where this is run: in an environment of verl, of EasyR1, or of neither.

python -m pytest tests/integrations/test_vgr_integration.py
"""

import pytest
import torch

from vgr_trl.integrations.verl.credit import SignalContext, resolve_options, shape_credit


@pytest.mark.parametrize("apply_to", ["advantages", "mask"])
def test_weights_of_a_reward_reach_the_loss(apply_to):
    options = resolve_options("vgr_token_weights", {"apply_to": apply_to, "collect_attentions": True})
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    found = SignalContext(options, token_weights=torch.tensor([[1.0, 3.0, 9.0], [1.0, 1.0, 4.0]]))
    shaped = shape_credit(torch.tensor([[2.0, 2.0, 2.0], [-1.0, -1.0, -1.0]]), mask, found)
    weights = torch.tensor([[0.5, 1.5, 0.0], [0.5, 0.5, 2.0]])
    if apply_to == "advantages":
        assert torch.allclose(shaped, weights * torch.tensor([[2.0], [-1.0]]))
        assert found.response_mask is None
    else:
        assert shaped.tolist() == [[2, 2, 0], [-1, -1, -1]]
        assert torch.allclose(found.response_mask, weights)
