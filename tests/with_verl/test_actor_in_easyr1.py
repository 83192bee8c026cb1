"""EasyR1's actor, estimators and losses with signals, on a CPU.

With `padding_free`, EasyR1 uses functions of flash-attn that only move tokens; they are replaced by ones of plain
torch, and the attention is sdpa, for which transformers tells packed sequences apart.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from actor_on_cpu import actor, data_of, replace_flash_attn
from tiny_rollout import GROUP, rollout, tiny_model
from verl.trainer import core_algos
from verl.workers.actor import dp_actor

from vgr_trl.integrations.verl.credit import SignalContext, SignalOptions, options_of, set_signal_context, token_terms
from vgr_trl.integrations.verl.inside_easyr1.actor import register
from vgr_trl.integrations.verl.signals import black_of, perturb_row
from vgr_trl.loss import entropy_penalty, perception_loss
from vgr_trl.signals import RolloutScorer, visual_dependency
from vgr_trl.signals.ratios import special_token_ids, token_vision_gain_ratio

GOLDEN = Path(__file__).parents[3] / "shared" / "golden" / "vppo.json"
cases = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else []
WANTED = {
    "enable_token_weights": True,
    "enable_perception_filtering": True,
    "use_entropy_penalty": True,
    "perception_loss_weight": 0.5,
    "der_loss_weight2": 0.1,
}


@pytest.fixture(autouse=True, scope="module")
def registered():
    register()


@pytest.fixture(scope="module")
def tiny():
    model, processor = tiny_model()
    return model.eval(), processor, *rollout(model, processor, prompts=4)


@pytest.fixture
def without_flash(monkeypatch):
    replace_flash_attn(monkeypatch)


def told(tensors, pixels, processor):
    return data_of(tensors, pixels, processor, WANTED)


def scored(tiny, pixels):
    model, processor, tensors, _ = tiny
    images = {name: torch.cat([row[name] for row in pixels]) for name in ("pixel_values", "image_grid_thw")}
    prompt, mask = tensors["prompts"].size(1), tensors["attention_mask"]
    scorer = RolloutScorer(model, special_token_ids=special_token_ids(processor))
    return scorer.score(
        tensors["prompts"], mask[:, :prompt], tensors["responses"], mask[:, prompt:], num_generations=GROUP,
        mm_token_type_ids=(tensors["prompts"] == model.config.image_token_id).long(), **images,
    )  # fmt: skip


def dark(tiny):
    options = SignalOptions.read(WANTED)
    return [perturb_row(row, options, 3, black_of(tiny[1])) for row in tiny[3]]


@pytest.mark.parametrize(
    "changed", [{}, {"dynamic_batching": True}, {"padding_free": True}], ids=["padded", "dynamic", "padding free"]
)
def test_signals_beside_log_probabilities(tiny, changed, without_flash):
    model, processor, tensors, pixels = tiny
    mask = tensors["response_mask"].bool()
    measuring = actor(model, **changed)
    logps = measuring.compute_log_prob(told(tensors, pixels, processor))
    plain, other = scored(tiny, pixels), scored(tiny, dark(tiny))
    assert (logps - plain.logps)[mask].abs().max() < 1e-5
    columns = measuring.columns
    ratio = columns["vgr_instruction"] / columns["vgr_vision"]
    assert torch.allclose(ratio[mask], token_vision_gain_ratio(plain.attention, [3])[mask], rtol=1e-4)
    dependency = visual_dependency(plain.logps, other.logps)
    assert (columns["vgr_dependency"] - dependency)[mask].abs().max() < 1e-4
    assert dependency[mask].max() > 1e-2
    reference = dp_actor.DataParallelPPOActor(measuring.config, model, None)
    assert torch.equal(reference.compute_log_prob(told(tensors, pixels, processor)), logps)


def test_a_step_with_the_terms_of_the_loss(tiny, tmp_path):
    model, processor, tensors, pixels = tiny
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    mask = tensors["response_mask"].bool()
    advantages = torch.randn(mask.shape, generator=torch.Generator().manual_seed(9)) * mask
    old = scored(tiny, pixels).logps
    batch = {**tensors, "advantages": advantages, "old_log_probs": old}
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        metrics = actor(model).update_policy(told(batch, pixels, processor))
        stepped = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    finally:
        torch.distributed.destroy_process_group()
        model.eval()
        for name, parameter in model.named_parameters():
            parameter.data = before[name].clone()
    assert {"actor/entropy_penalty", "actor/perception_loss"} <= set(metrics)
    model.zero_grad()
    logps, blind = (log_probabilities(model, tensors, rows) for rows in (pixels, dark(tiny)))
    objective = -(logps - old).masked_fill(~mask, 0).exp() * advantages
    terms = entropy_penalty(logps, mask, 0.06) + perception_loss(
        logps, blind, mask, coefficient=0.5, perturbed_entropy_coefficient=0.1
    )
    ((objective + terms) * mask).sum().div(mask.sum()).backward()
    largest = max(float(parameter.grad.abs().max()) for parameter in model.parameters() if parameter.grad is not None)
    assert largest > 1e-3
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            assert (before[name] - stepped[name] - parameter.grad).abs().max() < 1e-5 * largest + 1e-6, name


def log_probabilities(model, tensors, pixels):
    images = {name: torch.cat([row[name] for row in pixels]) for name in ("pixel_values", "image_grid_thw")}
    types = (tensors["input_ids"] == model.config.image_token_id).long()
    given = {name: tensors[name] for name in ("input_ids", "attention_mask")}
    logits = model(**given, mm_token_type_ids=types, **images).logits
    length = tensors["responses"].size(1)
    logps = logits[:, -length - 1 : -1].log_softmax(-1)
    return logps.gather(-1, tensors["responses"].unsqueeze(-1)).squeeze(-1)


@pytest.mark.skipif(not cases, reason="needs ../shared/golden/vppo.json")
@pytest.mark.parametrize("index", range(8))
def test_gradients_of_the_published_code(index):
    case = cases[index]
    names = ("old_logps", "perturbed_logps", "entropies", "logps", "advantages")
    old, perturbed, entropies, logps, advantages = (torch.tensor(case[name]) for name in names)
    mask = torch.arange(old.size(1)) < torch.tensor(case["lengths"]).unsqueeze(1)

    def given(response_mask, **_):
        each = advantages.unsqueeze(1) * response_mask
        return each, each

    core_algos.ADV_ESTIMATOR_MAP["given"] = given
    stated = {"enable_perception_filtering": False, "enable_trajectory_reweighting": False, "estimator": "given"}
    options = options_of("vgr_vppo", stated | case["options"])
    columns = {"vgr_dependency": visual_dependency(old, perturbed), "entropies": entropies}
    with set_signal_context(SignalContext(options, columns)):
        shaped, _ = core_algos.compute_advantage_return(
            "vgr_vppo", token_level_rewards=torch.zeros_like(old), response_mask=mask.long(), index=np.arange(len(old)),
            gamma=1.0, lam=1.0,
        )  # fmt: skip
    logps.requires_grad_()
    loss, _ = core_algos.compute_policy_loss(
        old_log_probs=old, log_probs=logps, advantages=shaped, response_mask=mask, clip_ratio_low=0.2,
        clip_ratio_high=0.3, clip_ratio_dual=3.0, tau_positive=1.0, tau_negative=1.0, loss_type="default",
        loss_avg_mode="token",
    )  # fmt: skip
    for term in token_terms(SignalContext(options), logps, mask).values():
        loss = loss + core_algos.average_loss(term, mask, mode="token")
    loss.backward()
    assert (logps.grad - torch.tensor(case["grad"])).abs().max() <= 1e-6
    assert logps.grad.abs().max() > 1e-3
