"""Advantages (N, T) in TRL's own loss: numbers recorded from the published code."""

from functools import partial

import pytest
import torch
from recorded import VPPO, needs_recorded, tensors
from support.trainers import STOCK
from support.trl_loss import loss_of

from vgr_trl.advantages import estimate_advantages
from vgr_trl.config import CreditOptions
from vgr_trl.credit import shape_advantages
from vgr_trl.loss.terms import entropy_penalty
from vgr_trl.signals.named import RolloutSignals
from vgr_trl.signals.ratios import visual_dependency

DEFAULTS = {"top_p_perception_tokens": 0.2, "top_p_entropy_tokens": 0.2, "trajectory_scaling_min": 0.8}


@pytest.fixture
def trainer(text_trainer):
    return partial(text_trainer, classes=STOCK)


def shape(case):
    names = ("old_logps", "perturbed_logps", "entropies", "logps", "advantages")
    old, perturbed, entropies, logps, advantages = tensors(case, *names)
    mask = torch.arange(old.size(1)) < torch.tensor(case["lengths"]).unsqueeze(1)
    options = CreditOptions(**{**DEFAULTS, **case["options"]})
    signals = RolloutSignals(old, entropies, mask, dependency=visual_dependency(old, perturbed))
    return shape_advantages(advantages, signals, options), options, logps.requires_grad_(), mask, old


@needs_recorded
@pytest.mark.parametrize("index", range(len(VPPO)))
def test_gradients_of_the_published_code(trainer, index):
    case = VPPO[index]
    (advantages, _), options, logps, mask, old = shape(case)
    stock = trainer(loss_type=("dapo", "bnpo")[index % 2], epsilon=0.2, epsilon_high=0.3, delta=3.0)
    loss = loss_of(stock, advantages, logps, mask, old)
    if options.use_entropy_penalty:
        loss = loss + entropy_penalty(logps, mask, options.entropy_penalty_coef).sum() / mask.sum()
    loss.backward()
    assert (logps.grad - torch.tensor(case["grad"])).abs().max() <= 1e-6
    assert logps.grad.abs().max() > 1e-3


@needs_recorded
def test_metrics_of_the_published_code():
    for case in VPPO:
        (_, metrics), *_ = shape(case)
        recorded = {name: value for name, value in case["metrics"].items() if name in metrics}
        assert {name: metrics[name] for name in recorded} == pytest.approx(recorded, abs=1e-6)
        assert len(recorded) >= 4


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
