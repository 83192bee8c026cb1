from functools import partial

import pytest
import torch
from peft import LoraConfig
from support.trainers import begin, emitted, logged, weights


@pytest.fixture
def make(make):
    return partial(make, advantage_estimator="gae")


def rollout_batch(trainer, rows=8):
    return trainer._generate_and_score_completions(begin(trainer, rows))


def hidden_by_hand(base, inputs):
    with torch.no_grad():
        return emitted(base, inputs, "last_hidden_state")


def set_head(trainer):
    head = trainer.critic.module if trainer.args.critic == "head" else trainer.critic.module.head
    with torch.no_grad():
        head.linear.weight.copy_(torch.linspace(-0.3, 0.3, head.linear.in_features).unsqueeze(0))
        head.linear.bias.fill_(0.1)
    return head.linear


@pytest.mark.parametrize("critic", ["head", "model"])
def test_values_advantages_and_returns_of_a_rollout(make, critic):
    """V = w·h + b of the token's emitting position; with γ = 1 and λ = 0, A = V of the next token, or r, minus V."""
    trainer = make(critic=critic, lam=0.0)
    linear = set_head(trainer)
    batch = rollout_batch(trainer)
    mask = batch["completion_mask"].bool()
    values = linear(hidden_by_hand(trainer.model.model, batch)).squeeze(-1).detach() * mask
    assert torch.allclose(batch["values"], values, atol=1e-5)
    next_values = torch.nn.functional.pad(values[:, 1:], (0, 1))
    rewards = torch.tensor(trainer._logs["rewards"]["letters_reward"])
    for row, length in enumerate(mask.sum(1).tolist()):
        next_values[row, length - 1] = rewards[row]
    assert torch.allclose(batch["returns"], next_values * mask, atol=1e-5)
    advantages = (next_values - values)[mask]
    expected = (advantages - advantages.mean()) / advantages.std()
    assert torch.allclose(batch["advantages"][mask], expected, atol=1e-4)
    assert (batch["advantages"][~mask] == 0).all()
    errors, returns = advantages, batch["returns"][mask]
    explained = 1 - errors.var(correction=0) / returns.var(correction=0)
    assert trainer._metrics["train"]["critic/explained_variance"] == [pytest.approx(explained.item(), abs=1e-3)]
    means = [((next_values - values) * mask)[row].sum().item() / mask[row].sum().item() for row in range(8)]
    assert list(trainer._logs["advantages"]) == pytest.approx(means, abs=1e-4)


@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
def test_the_gradient_of_the_value_loss(make, loss_type):
    """At V = V_old the loss is half the squared error, so its slope is V - R, times the hidden state."""
    trainer = make(loss_type=loss_type, gradient_accumulation_steps=1, steps_per_generation=1)
    linear = set_head(trainer)
    before = linear.weight.detach().clone()
    inputs = rollout_batch(trainer, rows=4)
    hidden, mask = hidden_by_hand(trainer.model.model, inputs), inputs["completion_mask"].bool()
    errors = (inputs["values"] - inputs["returns"]) * mask
    share = mask / mask.sum() if loss_type == "dapo" else mask / mask.sum(1, keepdim=True) / len(mask)
    expected = (errors * share).unsqueeze(-1).mul(hidden).sum((0, 1))
    kept = {}
    trainer.critic.optimizer.register_step_post_hook(lambda *_: kept.update(grad=linear.weight.grad.clone()))
    trainer.accelerator.gradient_state._set_sync_gradients(True)
    policy = weights(trainer)
    loss = trainer._compute_loss(trainer.model, inputs)
    norm = trainer._metrics["train"]["critic/grad_norm"][0]
    grad = kept["grad"] * max(norm, 1.0)  # clipped to max_grad_norm 1
    assert torch.allclose(grad[0], expected, rtol=1e-3, atol=1e-5)
    assert (linear.weight - before).abs().max() > 0
    assert all(value.grad is None for value in trainer.model.parameters())  # what is read trains nothing
    assert loss.requires_grad
    assert torch.equal(policy, weights(trainer))


def test_the_policy_waits_for_the_critic(make):
    adapter = LoraConfig(r=2, target_modules=["q_proj"])
    trainer = make(critic="model", critic_warmup=2, critic_warmup_steps=1, critic_learning_rate=1e-2, max_steps=2,
                   peft_config=adapter)  # fmt: skip

    def values():
        modules = trainer.model, trainer.critic.module
        return [torch.cat([value.detach().flatten() for value in module.parameters()]) for module in modules]

    before = values()
    trainer.train()
    assert [torch.equal(*pair) for pair in zip(before, values(), strict=True)] == [True, False]
    assert logged(trainer, "critic/learning_rate") == pytest.approx([5e-3, 1e-2])
    assert logged(trainer, "critic/value_mean")[0] == 0


def test_the_kl_is_taken_from_each_token(make):
    trainer = make(kl_coef=0.5, kl_penalty="abs", use_kl_loss=False, gamma=0.0)
    trainer.model.train()
    with torch.no_grad():
        trainer.model.lm_head.weight.add_(torch.randn_like(trainer.model.lm_head.weight) * 0.2)
    batch = rollout_batch(trainer)
    mask, lengths = batch["completion_mask"].bool(), batch["completion_mask"].sum(1)
    returns = batch["returns"].clone()  # with γ = 0 each token's own reward
    last = torch.nn.functional.one_hot(lengths - 1, mask.size(1)).bool()
    rewards = torch.tensor(trainer._logs["rewards"]["letters_reward"])
    returns[last] -= rewards
    assert (returns[mask] < 0).all()
    assert returns.sum(1).tolist() == pytest.approx(trainer._logs["rewards"]["kl_penalty_reward"], abs=1e-4)
