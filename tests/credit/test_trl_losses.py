"""Advantages from the rewards that a real trainer of TRL has logged, against those that it computed."""

import torch
from support.trainers import STOCK

from vgr_trl.advantages import estimate_advantages


def test_grpo_is_what_trl_computes(text_trainer):
    """Two steps of TRL's trainer, with weights, ties, a completion and a group without any reward."""
    draw = torch.Generator().manual_seed(0)

    def quality(completions, **kwargs):
        scores = (torch.randint(0, 4, (len(completions),), generator=draw) / 3).tolist()
        return [None, *scores[1:8], *[None] * 4, *scores[12:]]

    def style(completions, **kwargs):
        return [None, *[0.5, 0.25] * 3, 0.5, *[None] * 4, *torch.rand(len(completions) - 12, generator=draw).tolist()]

    options = {"reward_weights": [2.5, 0.5], "scale_rewards": "group", "max_steps": 2, "max_completion_length": 4}
    trainer = text_trainer([quality, style], classes=STOCK, per_device_train_batch_size=16, **options)
    trainer.train()
    logged = [torch.tensor(list(trainer._logs["rewards"][name])) for name in ("quality", "style")]
    rewards = torch.stack(logged, dim=1)
    assert rewards.isnan().all(dim=1).sum() >= 5
    summed = (rewards * torch.tensor([2.5, 0.5])).nansum(dim=1)
    summed[rewards.isnan().all(dim=1)] = torch.nan
    expected = torch.tensor(list(trainer._logs["advantages"]))
    assert expected.abs().max() > 0.5
    torch.testing.assert_close(estimate_advantages(summed, 4), expected, rtol=0, atol=1e-6)
