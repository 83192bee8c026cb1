"""From rewards to advantages inside verl and EasyR1, without either."""

import pytest
import torch

from vgr_trl import registries
from vgr_trl.integrations.verl.credit import SignalContext, estimate
from vgr_trl.integrations.verl.options import SignalOptions


def centred(token_level_rewards, response_mask, index, **_):
    each = (token_level_rewards.sum(1, keepdim=True) - 0.5) * response_mask
    return each, each


def estimated(mask, index, found, rewards=None):
    rewards = torch.zeros(mask.shape) if rewards is None else rewards
    return estimate(centred, found, token_level_rewards=rewards, response_mask=mask, index=index)[0]


def test_a_rule_that_compares_completions_knows_their_prompts(monkeypatch):
    seen = {}

    def rule(advantages, signals, mask, options, groups):
        seen["groups"] = groups.tolist()
        return torch.full(mask.shape, 2.0), {}

    monkeypatch.setitem(registries.credit_rules._own, "comparing", rule)
    found = SignalContext(SignalOptions.read({"credit_rules": ["comparing"]}))
    assert (estimated(torch.ones(4, 2), ["b", "a", "b", "c"], found) == -1).all()
    assert seen["groups"] == [0, 1, 0, 2]


def test_rows_that_fill_a_batch_take_no_part():
    """verl appends rows without tokens; those of VGR 1 and 2 are compared with each other alone: 1 and 0."""
    mask = torch.tensor([[1, 1], [1, 0], [0, 0], [0, 0]])
    vgr = torch.tensor([[1.0, 1.0], [2.0, 0.0], [0.0, 0.0], [0.0, 0.0]])
    options = SignalOptions.read({"vgr_reward_weight": 1.0, "mdi_reward_weight": 1.0})
    found = SignalContext(options, {"vgr_vision": torch.ones(4, 2), "vgr_instruction": vgr})
    advantages = estimated(mask, ["x", "x", "fill", "fill"], found)
    balance = {1.0: 1.0, 2.0: -1.0}  # of VGR 1, and of 2 with a ratio of 2
    expected = [[1 + balance[1.0] - 0.5] * 2, [0 + balance[2.0] - 0.5, 0], [0, 0], [0, 0]]
    assert advantages.tolist() == [pytest.approx(row) for row in expected]
    assert found.metrics["rewards/vgr/mean"] == pytest.approx(0.5)
    assert found.metrics["rewards/vgr/not_applicable"] == 0
