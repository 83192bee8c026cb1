"""Three optimizer steps with image features computed once are three steps of TRL's `GRPOTrainer`."""

import copy

import pytest
import torch
from peft import LoraConfig
from support.models.families import with_frozen_tower
from support.steps import DAPO, STOCK, build_trainer, largest_relative_update, options, texts_of
from support.trainers import logged

from vgr_trl.efficiency.vision_cache import parameters_of_tower, parts_of_tower
from vgr_trl.sharing.model_support import base_of, causal_model

TEXT_ONLY = {"target_modules": ["q_proj", "v_proj"]}  # no module of the tower is called so
STEPS = 3


def frozen(model):
    changed = with_frozen_tower(copy.deepcopy(model))
    changed.config._name_or_path = model.config._name_or_path
    return changed


def counted(classes, model, processor, rows, settings, lora=None, change_reference=None):
    """The trainer after its steps; `trainer.calls` of the policy's tower, with gradients or without."""
    peft = {} if lora is None else {"peft_config": LoraConfig(r=4, **lora)}
    trainer = build_trainer(classes, model, processor, rows, settings, **peft)
    trainer.calls = []
    tower = parts_of_tower(base_of(causal_model(trainer.model)))[0]
    tower.register_forward_hook(lambda *call: trainer.calls.append(torch.is_grad_enabled()))
    if change_reference is not None:
        change_reference(base_of(causal_model(trainer.ref_model)))
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
    iterations = CASES[case].get("num_iterations", 1)
    settings = options(tmp_path, epsilon_high=0.28, max_steps=STEPS * iterations)
    ours_only = {name: value for name, value in CASES[case].items() if name == "share_prompts"}
    settings |= {name: value for name, value in CASES[case].items() if name not in ours_only}
    stock = counted(STOCK, model, processor, image_rows, settings)
    ours = counted(DAPO, model, processor, image_rows, settings | ours_only)
    assert texts_of(ours) == texts_of(stock)
    assert largest_relative_update(model, ours, stock) < 1e-5
    assert ours.calls == [False] * STEPS
    assert len(stock.calls) >= 2 * len(ours.calls)


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


def test_the_kl_of_a_tower_that_trains_is_trls(vision, image_rows, tmp_path):
    """With the default optimizer, fused, which leaves the version counters of weights as they are."""
    settings = options(tmp_path, epsilon_high=0.28, beta=0.1, max_steps=4, learning_rate=2e-3, num_iterations=1)
    del settings["optim"]
    stock = counted(STOCK, *vision, image_rows, settings)
    ours = counted(DAPO, *vision, image_rows, settings)
    assert texts_of(ours) == texts_of(stock)
    assert logged(ours, "kl")[1:] == pytest.approx(logged(stock, "kl")[1:], rel=0.1)


def test_a_reference_with_another_tower_reads_its_own_features(vision, image_rows, tmp_path):
    """As one that was loaded from elsewhere; it is written to in place where it follows the policy."""

    def change(base):
        with torch.no_grad():
            for parameter in parameters_of_tower(base):
                parameter.mul_(1.5)

    model, processor = frozen(vision[0]), vision[1]
    settings = options(tmp_path, epsilon_high=0.28, beta=0.1, sync_ref_model=True, ref_model_sync_steps=2)
    stock = counted(STOCK, model, processor, image_rows, settings, None, change)
    ours = counted(DAPO, model, processor, image_rows, settings, None, change)
    assert largest_relative_update(model, ours, stock) < 1e-5
    assert logged(ours, "kl") == pytest.approx(logged(stock, "kl"), rel=0.02)  # means of other micro-batches
    assert ours.calls == [False] * STEPS


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
