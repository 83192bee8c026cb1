"""Estimators and policy losses, found by name in verl's own registries."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from reference import CASES, check_golden, golden, needs_golden
from verl.trainer.ppo import core_algos

from vgr_trl.advantages import estimate_advantages
from vgr_trl.credit import CreditOptions, shape_advantages
from vgr_trl.integrations.verl.credit import (
    SignalContext,
    options_of,
    set_signal_context,
)
from vgr_trl.integrations.verl.inside_verl.plugin import register
from vgr_trl.loss import perception_loss
from vgr_trl.signals.named import RolloutSignals
from vgr_trl.signals.ratios import AttentionMass


@pytest.fixture(autouse=True, scope="module")
def registered():
    register()
    register()  # a second time changes nothing


def actor_config():
    values = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.3, "clip_ratio_c": 3.0}
    return SimpleNamespace(**values, global_batch_info={}, get=lambda name, default=None: values.get(name, default))


def policy_loss(name, options, logps, old, advantages, mask, perturbed=None):
    with set_signal_context(SignalContext(options, perturbed_logps=perturbed)):
        return core_algos.get_policy_loss_fn(name)(
            old_log_prob=old,
            log_prob=logps,
            advantages=advantages,
            response_mask=mask,
            loss_agg_mode="token-mean",
            config=actor_config(),
        )


@needs_golden
@pytest.mark.parametrize("case", CASES[:8])
def test_gradients_of_the_published_code(case):
    old, logps, mask, columns, options, given = golden(case)
    core_algos.ADV_ESTIMATOR_REGISTRY["given"] = given
    options = options_of("vgr_vppo", options, "vgr_vppo")
    with set_signal_context(SignalContext(options, columns)) as found:
        shaped, _ = core_algos.get_adv_estimator_fn("vgr_vppo")(
            token_level_rewards=torch.zeros_like(old), response_mask=mask.long(), index=np.arange(len(old)), config=None
        )
    loss, metrics = policy_loss("vgr_vppo", options, logps, old, shaped, mask)
    loss.backward()
    check_golden(logps, case)
    recorded = [name for name in case["metrics"] if f"vgr/{name}" in found.metrics]
    assert len(recorded) >= 4
    for name in recorded:
        assert found.metrics[f"vgr/{name}"] == pytest.approx(case["metrics"][name], abs=1e-6), name
    assert ("actor/entropy_penalty" in metrics) == options.use_entropy_penalty


def rollout(seed=0, groups=3, size=4, length=6):
    generator = torch.Generator().manual_seed(seed)
    count = groups * size
    lengths = torch.randint(1, length + 1, (count,), generator=generator)
    mask = torch.arange(length) < lengths.unsqueeze(1)
    rewards = torch.zeros(count, length)
    rewards[torch.arange(count), lengths - 1] = torch.rand(count, generator=generator).round(decimals=1)
    rewards[:size] = 0  # a group without variance
    columns = {name: torch.rand(count, length, generator=generator) + 0.1 for name in ("vgr_vision", "vgr_instruction")}
    columns["vgr_dependency"] = torch.rand(count, length, generator=generator)
    return mask, rewards, np.array([f"prompt {row // size}" for row in range(count)], dtype=object), columns


@pytest.mark.parametrize("shuffled", [False, True])
def test_advantages_are_those_of_the_trainer(shuffled):
    """In whatever order the rows come: TRL's are prompt-major, verl balances its batches."""
    mask, rewards, index, columns = rollout()
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1)) if shuffled else torch.arange(12)
    given = {"enable_token_weights": True, "token_weight_clip": [0.5, 2.0], "positive_only": True}
    options = options_of("vgr_vppo", given)
    with set_signal_context(SignalContext(options, {name: value[order] for name, value in columns.items()})):
        found, _ = core_algos.get_adv_estimator_fn("vgr_vppo")(
            token_level_rewards=rewards[order], response_mask=mask[order].long(), index=index[order], config=None
        )
    one = torch.ones(12, dtype=torch.long)
    mass = AttentionMass(columns["vgr_vision"][None], columns["vgr_instruction"][None], one, one, mask)
    nan = torch.full(mask.shape, torch.nan)
    signals = RolloutSignals(nan, nan, mask, mass, columns["vgr_dependency"])
    advantages = estimate_advantages(rewards.sum(1), 4)
    own = CreditOptions(
        token_weights=True,
        token_weights_clip=[0.5, 2.0],
        token_weights_positive_only=True,
        enable_perception_filtering=True,
        enable_trajectory_reweighting=True,
    )
    expected, _ = shape_advantages(advantages, signals, own, shaped=torch.arange(12) >= 4)
    # verl adds 1e-6 to the deviation, TRL 1e-4
    assert torch.allclose(found, (expected * mask)[order], rtol=2e-3, atol=1e-6)
    assert found.abs().max() > 0.5


def test_loss_of_papo():
    mask, _, _, _ = rollout()
    generator = torch.Generator().manual_seed(2)
    old, logps, perturbed = (-torch.rand(mask.shape, generator=generator) - 0.1 for _ in range(3))
    advantages = torch.randn(mask.shape, generator=generator)
    options = options_of("grpo", {"perception_loss_weight": 0.02, "der_loss_weight2": 0.03}, "vgr_papo")
    gradients = {}
    for name in ("vgr_papo", "vanilla"):
        both = [tensor.clone().requires_grad_() for tensor in (logps, perturbed)]
        loss, _ = policy_loss(name, options, both[0], old, advantages, mask, both[1])
        if name == "vanilla":
            terms = perception_loss(*both, mask, coefficient=0.02, perturbed_entropy_coefficient=0.03)
            loss = loss + terms.sum() / mask.sum()
        loss.backward()
        gradients[name] = [tensor.grad for tensor in both]
    for ours, expected in zip(gradients["vgr_papo"], gradients["vanilla"], strict=True):
        assert torch.allclose(ours, expected, atol=1e-7)
        assert expected.abs().max() > 1e-4
