import math
from contextlib import nullcontext
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.trainers import begin, emitted, logged, scored_passes, weights

from vgr_trl.errors import ConfigError
from vgr_trl.loss.kl import PENALTY, FullKL
from vgr_trl.passes.run_pass import run_pass
from vgr_trl.run import read_facts
from vgr_trl.trl_bridge import from_trl
from vgr_trl.validate.options import refuse_unfit_options


def logps_by_hand(model, inputs):
    with torch.no_grad():
        logps = emitted(model, inputs).log_softmax(-1)
    return logps.gather(-1, inputs["completion_ids"].unsqueeze(-1)).squeeze(-1)


@pytest.mark.parametrize(("kind", "slope"), [("kl", 1), ("abs", 1), ("mse", math.log(2)), ("low_var_kl", 0.5)])
def test_the_gradient_of_the_loss_is_that_of_the_kind(make, kind, slope):
    """With d = ln 2 on every token the slopes are 1, sign d, d and 1 - exp(-d); a token's share is 1 / all tokens."""
    trainer = make(kl_coef=0.5, kl_penalty=kind)
    inputs = trainer._prepare_inputs(begin(trainer))
    trainer.accelerator.gradient_state._set_sync_gradients(True)
    inputs["advantages"] = torch.zeros_like(inputs["advantages"])
    inputs["ref_per_token_logps"] = logps_by_hand(trainer.model, inputs) - math.log(2)
    with scored_passes(trainer) as scored:
        trainer._compute_loss(trainer.model, inputs).backward()
    mask = from_trl(inputs).valid
    expected = mask * 0.5 * slope / inputs["num_items_in_batch"].item()
    assert torch.allclose(scored[0].grad * mask, expected, rtol=1e-4, atol=1e-9)
    value = {"kl": math.log(2), "abs": math.log(2), "mse": math.log(2) ** 2 / 2, "low_var_kl": math.log(2) - 0.5}[kind]
    metrics = trainer._metrics["train"]
    for name in ("kl/mean", "kl/max", "kl/completion"):
        assert metrics[name] == [pytest.approx(value, rel=1e-4)]
    assert metrics["kl/coefficient"] == [0.5]


@pytest.mark.parametrize("adapter", [None, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)])
def test_low_var_kl_in_the_loss_trains_as_trls_beta(make, adapter):
    """Also against the policy without its adapter, from which a random adapter differs from the start."""
    trained = []
    for changed in ({"beta": 2.0, "use_bias_correction_kl": False}, {"kl_coef": 2.0}):
        torch.manual_seed(0)
        trainer = make(peft_config=adapter, max_steps=2, optim="sgd", learning_rate=0.3, **changed)
        trainer.train()
        trained.append((weights(trainer), torch.tensor(logged(trainer, "kl") + logged(trainer, "kl/mean"))))
    (beta, kl), (ours, other) = trained
    assert kl.max() > 1e-4
    assert torch.allclose(beta, ours, atol=1e-6)
    assert torch.allclose(kl, other, atol=1e-6)


def test_among_the_rewards_it_is_taken_from_each_completion_before_groups_are_compared(make):
    """r - coefficient · Σ d, then (r - mean) / (std + 1e-4); and the coefficient follows: KL far above its target."""
    trainer = make(
        kl_coef=0.5, kl_penalty="abs", use_kl_loss=False, kl_type="adaptive", kl_target=1e-3, kl_horizon=100,
        reward_weights=[2.0], gradient_accumulation_steps=1, steps_per_generation=1,
    )  # fmt: skip
    trainer.model.train()
    with torch.no_grad():
        trainer.model.lm_head.weight.add_(torch.randn_like(trainer.model.lm_head.weight) * 0.2)
    inputs = trainer._generate_and_score_completions([trainer.train_dataset[0]] * 4)
    mask = inputs["completion_mask"]
    kl = (logps_by_hand(trainer.model, inputs) - logps_by_hand(trainer.ref_model, inputs)).abs() * mask
    assert kl.sum() > 0.5
    rewards = torch.tensor(trainer._logs["rewards"]["letters_reward"]) * 2 - 0.5 * kl.sum(1)
    expected = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    assert inputs["advantages"].tolist() == pytest.approx(expected.tolist(), abs=1e-3)
    metrics = trainer._metrics["train"]
    assert metrics[f"rewards/{PENALTY}/mean"] == [pytest.approx(-0.5 * kl.sum(1).mean().item(), rel=1e-4)]
    assert metrics["kl/mean"] == [pytest.approx((kl.sum() / mask.sum()).item(), rel=1e-4)]
    assert metrics["kl/coefficient"] == [0.5]
    assert trainer.kl.controller.coefficient == pytest.approx(0.5 * (1 + 0.2 * 4 / 100))


def test_over_all_words_among_the_rewards_a_training_pass_returns_no_hidden_states(make):
    trainer = make(kl_coef=0.5, kl_penalty="full", use_kl_loss=False)
    with patch("vgr_trl.trainer.run_pass", wraps=run_pass) as passes:
        trainer._compute_loss(trainer.model, trainer._prepare_inputs(begin(trainer)))
    assert [call.args[3].hidden for call in passes.call_args_list] == [False]


@pytest.mark.parametrize("adapter", [None, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)])
def test_over_all_words_in_the_loss(make, adapter):
    trainer = make(peft_config=adapter, kl_coef=0.5, kl_penalty="full", temperature=0.7)
    if adapter is None:
        with torch.no_grad():
            trainer.model.lm_head.weight.add_(torch.randn_like(trainer.model.lm_head.weight) * 0.2)
    inputs = trainer._prepare_inputs(begin(trainer))
    inputs["advantages"] = torch.zeros_like(inputs["advantages"])
    with trainer.model.disable_adapter() if adapter is not None else nullcontext(), torch.no_grad():
        theirs = emitted(trainer.ref_model or trainer.model, inputs)
    ours = emitted(trainer.model, inputs)
    logps, reference_logps = ((logits / 0.7).log_softmax(-1) for logits in (ours, theirs))
    kl = (logps.exp() * (logps - reference_logps)).sum(-1) * from_trl(inputs).valid
    values = {name: value for name, value in trainer.model.named_parameters() if value.requires_grad}
    expected = torch.autograd.grad(0.5 * kl.sum() / inputs["num_items_in_batch"], values.values(), allow_unused=True)
    trainer._compute_loss(trainer.model, inputs).backward()
    mean = kl.sum() / from_trl(inputs).valid.sum()
    assert trainer._metrics["train"]["kl/mean"] == [pytest.approx(mean.item(), rel=1e-4)]
    assert kl.sum() > 0.01
    pairs = [(name, values[name].grad, grad) for name, grad in zip(values, expected, strict=True) if grad is not None]
    assert max(grad.abs().max() for *_, grad in pairs) > 1e-4
    for name, found, grad in pairs:
        assert torch.allclose(found, grad, rtol=1e-3, atol=1e-6), name


def test_over_all_words_the_heads_must_be_whole_and_those_of_the_start(make, text_model):
    model = get_peft_model(text_model, LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]))
    with pytest.raises(ConfigError):
        FullKL(model, None, 1.0)
    trainer = make(kl_coef=0.5, kl_penalty="full")
    facts = read_facts(trainer)
    refuse_unfit_options(replace(facts, zero_stage=3), ())
    with pytest.raises(ConfigError):
        refuse_unfit_options(replace(facts, fsdp_version=1), ())
    trainer.args.kl_penalty = "low_var_kl"
    refuse_unfit_options(replace(facts, fsdp_version=1), ())
