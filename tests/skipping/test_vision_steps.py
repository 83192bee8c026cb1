"""Three optimizer steps with image features computed once are three steps of TRL's `GRPOTrainer`."""

import copy
import logging

import pytest
import torch
from peft import LoraConfig
from support.steps import DAPO, STOCK, build_trainer, largest_relative_update, options, texts_of

from vgr_trl.sharing.backbone import base_of, causal_model
from vgr_trl.skipping.vision_tower import parameters_of_tower, parts_of_tower

TEXT_ONLY = {"target_modules": ["q_proj", "v_proj"]}  # no module of the tower is called so
WITH_TOWER = {"target_modules": ["q_proj", "v_proj", "qkv"]}
STEPS = 3


def frozen(model):
    model = copy.deepcopy(model)
    for parameter in parameters_of_tower(base_of(model)):
        parameter.requires_grad_(False)
    return model


def counted(classes, model, processor, rows, settings, lora=None):
    """The trainer after its steps; `trainer.calls` of the towers of policy and reference, with gradients or without."""
    peft = {} if lora is None else {"peft_config": LoraConfig(r=4, **lora)}
    trainer = build_trainer(classes, model, processor, rows, settings, **peft)
    trainer.calls = []
    for inside in filter(None, (trainer.model, trainer.ref_model)):
        tower = parts_of_tower(base_of(causal_model(inside)))[0]
        tower.register_forward_hook(lambda *call: trainer.calls.append(torch.is_grad_enabled()))
    trainer.train()
    return trainer


CASES = {
    "two iterations of plain passes": {"num_iterations": 2, "share_prompts": "off"},
    "small micro-batches": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
    "a reference model": {"beta": 0.1, "gradient_checkpointing": True},
}


@pytest.mark.parametrize("case", CASES)
def test_frozen_towers_run_once_per_rollout(case, vision, image_rows, tmp_path):
    model, processor = frozen(vision[0]), vision[1]
    model.config._name_or_path = vision[0].config._name_or_path
    iterations = CASES[case].get("num_iterations", 1)
    settings = options(tmp_path, epsilon_high=0.28, max_steps=STEPS * iterations)
    ours_only = {name: value for name, value in CASES[case].items() if name == "share_prompts"}
    settings |= {name: value for name, value in CASES[case].items() if name not in ours_only}
    stock = counted(STOCK, model, processor, image_rows, settings)
    ours = counted(DAPO, model, processor, image_rows, settings | ours_only)
    assert texts_of(ours) == texts_of(stock)
    assert largest_relative_update(model, ours, stock) < 1e-5
    assert ours.calls == [False] * STEPS  # that of the reference model not at all: its weights are the policy's
    assert len(stock.calls) >= 3 * len(ours.calls)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_adapters_elsewhere_send_no_gradients_back_through_the_tower(checkpointing, vision, image_rows, tmp_path):
    """With checkpointing, transformers marks the patches of a Qwen2.5-VL as needing gradients."""
    settings = options(tmp_path, epsilon_high=0.28, beta=0.1, gradient_checkpointing=checkpointing, learning_rate=0.5)
    stock = counted(STOCK, *vision, image_rows, settings, TEXT_ONLY)
    ours = counted(DAPO, *vision, image_rows, settings, TEXT_ONLY)
    assert texts_of(ours) == texts_of(stock)
    assert largest_relative_update(vision[0], ours, stock) < 1e-5
    assert ours.calls == [False] * STEPS
    assert True in stock.calls


def test_a_tower_that_trains_runs_in_training_passes_only(vision, image_rows, tmp_path, caplog):
    """Generation and scoring share; the reference, the policy without its adapters, has features of its own."""
    settings = options(tmp_path, epsilon_high=0.28, beta=0.1, learning_rate=0.5)
    stock = counted(STOCK, *vision, image_rows, settings, WITH_TOWER)
    with caplog.at_level(logging.WARNING):
        ours = counted(DAPO, *vision, image_rows, settings | {"compute_attention_metrics": True}, WITH_TOWER)
    assert texts_of(ours) == texts_of(stock)
    assert largest_relative_update(vision[0], ours, stock) < 1e-5
    # Generation, also for the measured pass; the reference in chunks of a group; two micro-batches.
    assert ours.calls == [False, False, False, True, True] * STEPS
    assert "training passes compute them anew (the vision tower trains)" in caplog.text


def test_perturbed_images_are_computed_once_too(vision, image_rows, tmp_path):
    """They are scored, and trained on by the perception loss; a cache of nothing is the path without one."""
    model, processor = frozen(vision[0]), vision[1]
    perceiving = {"enable_perception_filtering": True, "perception_loss_weight": 0.1}
    settings = options(tmp_path, **perceiving)
    once = counted(DAPO, model, processor, image_rows, settings)
    plain = counted(DAPO, model, processor, image_rows, settings | {"vision_cache_megabytes": 0})
    assert texts_of(once) == texts_of(plain)
    assert largest_relative_update(model, once, plain) < 1e-5
    assert once.calls == [False] * 3 * STEPS  # generated; perturbed images, which are scored in chunks of a group
    assert len(plain.calls) == (1 + 2 + 2 + 2 * 2) * STEPS  # generated, scored, perturbed, trained on with both images
