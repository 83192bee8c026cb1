"""Recipes against values worked out by hand, or recorded from the published code."""

import json
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from support.trainers import STOCK
from support.trl_loss import loss_of

from vgr_trl.config import CreditOptions
from vgr_trl.credit import shape_advantages
from vgr_trl.dapo_config import DAPOConfig
from vgr_trl.loss import gated_distillation, kl_penalty, teacher_divergence
from vgr_trl.loss.terms import entropy_penalty, perception_loss
from vgr_trl.recipes import load_recipe
from vgr_trl.rewards import get_soft_overlong_punishment, load_reward
from vgr_trl.signals.named import RolloutSignals
from vgr_trl.signals.ratios import jensen_shannon, visual_dependency
from vgr_trl.signals.scoring import rest_of

LOSS = ("loss_type", "epsilon", "epsilon_high", "delta")
RECORDED = Path(__file__).parent / "recorded"


@pytest.fixture
def stock(text_trainer):
    return lambda recipe: text_trainer(classes=STOCK, **{name: recipe[name] for name in LOSS if name in recipe})


def recorded(name):
    case = json.loads((RECORDED / f"{name}.json").read_text())
    tensors = {key: torch.tensor(value) for key, value in case.items() if key != "source"}
    scores = tensors["logps"] if "logps" in tensors else tensors["logits"]
    width = scores.requires_grad_().size(1)
    return load_recipe(name), tensors, torch.arange(width) < tensors["lengths"].unsqueeze(1)


def credit_of(recipe, case, mask, groups=None, **signals):
    known = {option.name for option in fields(CreditOptions)}
    options = CreditOptions(**{name: value for name, value in recipe.items() if name in known})
    entropies = case.get("entropies", torch.zeros_like(case["old_logps"]))
    measured = RolloutSignals(case["old_logps"], entropies, mask, **signals)
    return shape_advantages(case["advantages"], measured, options, groups=groups)[0]


def check_gradient(trainer, credit, case, mask, terms=0.0):
    loss = loss_of(trainer, credit, case["logps"], mask, case["old_logps"])
    (loss + (terms * mask).sum() / mask.sum()).backward()
    assert (case["logps"].grad - case["gradient"]).abs().max() <= 1e-6


def test_dapo_by_hand(stock):
    """Ratios 1.5, 1 and 0.7, clipped to [0.8, 1.28]: the mean of 1.28, 1 and -0.8 over three tokens is 0.4933.

    Of 2048 tokens the last fifth, 409, is punished: 204.5 tokens into it by half. Accuracy and length weigh 2 to 1.
    """
    recipe = load_recipe("dapo")
    mask, old = torch.tensor([[True, True], [True, False]]), torch.full((2, 2), -1.0)
    logps = old + torch.tensor([[1.5, 1.0], [0.7, 1.0]]).log()
    loss = loss_of(stock(recipe), torch.tensor([1.0, -1.0]), logps, mask, old)
    assert loss.item() == pytest.approx(-1.48 / 3)
    length = get_soft_overlong_punishment(recipe["max_completion_length"], 4096 * 2048 // 20480)
    punished = length(completion_ids=[[0] * count for count in (1639, 1844, 2048)], completions=[None] * 3)
    assert punished == pytest.approx([0, -205 / 409, -1])
    assert [2 * right + 1 * punished[0] for right in (0, 1)] == [0, 2]  # 2 apart, as -1 and 1 are


def test_vppo_has_the_gradients_of_the_published_code(stock):
    recipe, case, mask = recorded("vppo")
    dependency = visual_dependency(case["old_logps"], case["perturbed_logps"])
    terms = entropy_penalty(case["logps"], mask, recipe["entropy_penalty_coef"])
    check_gradient(stock(recipe), credit_of(recipe, case, mask, dependency=dependency), case, mask, terms)


def test_papo_has_the_gradients_of_the_published_code(stock):
    """There the log-probabilities given the masked image are constants."""
    recipe, case, mask = recorded("papo")
    terms = recipe["kl_coef"] * kl_penalty(case["logps"], case["ref_logps"], kind=recipe["kl_penalty"])
    terms = terms + perception_loss(
        case["logps"], case["perturbed_logps"], mask, coefficient=recipe["perception_loss_weight"],
        entropy_coefficient=recipe["der_loss_weight1"], perturbed_entropy_coefficient=recipe["der_loss_weight2"],
    )  # fmt: skip
    check_gradient(stock(recipe), case["advantages"], case, mask, terms)


def test_vgpo_has_the_gradients_of_the_published_code(stock):
    """There each run of four completions is a group, and the similarity was scaled before."""
    recipe, case, mask = recorded("vgpo")
    groups = torch.arange(len(mask)) // 4
    credit = credit_of(recipe, case, mask, groups, similarity=2 * case["similarity"] - 1)
    check_gradient(stock(recipe), credit, case, mask)


def test_vepo_keeps_the_tokens_of_the_published_code(stock):
    recipe, case, mask = recorded("vepo")
    divergence = jensen_shannon(case["logits"], case["perturbed_logits"])
    assert (divergence - case["jsd"])[mask].abs().max() <= 1e-6
    credit = credit_of(recipe, case, mask, jsd=divergence, perturbed_entropies=case["perturbed_entropies"])
    assert (credit != 0)[mask].tolist() == case["kept"].bool()[mask].tolist()
    check_gradient(stock(recipe), credit, case, mask)


@pytest.mark.parametrize("kind", ["jensen_shannon", "forward", "reverse"])
def test_vision_opd_has_the_gradients_of_the_published_code(kind):
    """There the tokens are the policy's likeliest; the recorded ones are the teacher's, as here."""
    recipe, case, mask = recorded("vision_opd")
    top, ids = case["teacher_logits"].log_softmax(-1).topk(5)
    others = torch.cat([top, rest_of(case["teacher_logits"].log_softmax(-1), ids)], -1)
    divergence = teacher_divergence(case["logits"], ids, others, kind)
    (recipe["plugin_options"]["teacher_divergence_coef"] * divergence[mask].mean()).backward()
    name = "gradient" if kind == "jensen_shannon" else f"{kind}_gradient"
    assert (case["logits"].grad - case[name]).abs().max() <= 1e-6
    assert recipe["plugin_options"]["teacher_divergence_kind"] == "jensen_shannon"


def test_sdar_has_the_gradients_of_the_published_code():
    recipe, case, mask = recorded("sdar")
    numbers = recipe["plugin_options"]
    loss = gated_distillation(case["logps"], case["teacher_logps"], numbers["gate_beta"])[mask].mean()
    (numbers["gated_distillation_coef"] * loss).backward()
    assert (case["logps"].grad - case["gradient"]).abs().max() <= 1e-7


def test_noisyrollout_has_the_noise_of_the_published_code():
    """Steps of noise in a run of 60, recorded from John-AI-Lab/NoisyRollout 000b58d (image_aug.py, augment)."""
    recipe = load_recipe("noisyrollout")
    config = DAPOConfig(use_cpu=True, bf16=False, **{name: recipe[name] for name in recipe if name != "reward_funcs"})
    left = [config.noise_left(step, 60) for step in (1, 20, 35, 40, 45, 60)]
    steps = [config.weakened_parameters("diffusion_noise", share)["steps"] for share in left]
    assert steps == [499, 499, 462, 250, 37, 0]
    assert (config.num_generations, config.noisy_generations, config.noisy_importance) == (12, 6, "clean")


def test_vision_sr1_by_hand():
    """0.9 for a right answer, 0.1 for its form, 1 for a right blind answer: 2, 1, 1.1 and 0.1."""
    recipe = load_recipe("vision_sr1")
    says = "<think><description>Two cats.</description> So B.</think><answer>{}</answer>"
    completions = [says.format("B"), says.format("B"), says.format("A"), says.format("A")]
    blind = ["<answer>B</answer>", None, "The answer is B.", "<answer>A</answer>"]
    columns = {"solution": ["B"] * 4, "choices": [["one", "two"]] * 4, "blind_answers": blind}
    values = [load_reward(name)(completions=completions, **columns) for name in recipe["reward_funcs"]]
    weights = recipe["reward_weights"]
    sums = [sum(w * r for w, r in zip(weights, row, strict=True)) for row in zip(*values, strict=True)]
    assert sums == pytest.approx([2, 1, 1.1, 0.1])
