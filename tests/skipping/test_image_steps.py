"""Three optimizer steps over images of unequal size, of which rows and micro-batches are dead, are TRL's."""

import copy

import pytest
import torch
from peft import LoraConfig
from support.models.tiny_questions import picture, questions
from support.steps import DAPO, STOCK, build_trainer, largest_relative_update, options, texts_of
from support.trainers import logged

from vgr_trl.efficiency.vision_cache import parameters_of_tower, parts_of_tower
from vgr_trl.sharing.model_support import base_of, causal_model

LORA = {"target_modules": ["q_proj", "v_proj"]}  # no module of the tower is called so
SIZES = (56, 84, 112)


@pytest.fixture(scope="module")
def rows():
    """One image, or two of unequal size."""
    return questions(lambda number: [picture(number, SIZES[number % 3]), *[picture(number + 50)] * (number % 2)])


def half_dead(prompts, completion_ids, **kwargs):
    """Equal for all completions of every other prompt; elsewhere every fourth completion earns the mean."""
    dead = [len(prompt[0]["content"]) % 2 for prompt in prompts]
    values = (0.0, 1.0, 0.5, 0.5)
    return [0.3 if is_dead else values[row % 4] for row, is_dead in enumerate(dead)]


def dead(completion_ids, **kwargs):
    return [0.5] * len(completion_ids)


def after_steps(classes, model, processor, rows, settings, reward, lora):
    """The trainer after its steps, with the passes with gradients that its decoder and its tower made, in tokens."""
    peft = {} if lora is None else {"peft_config": LoraConfig(r=4, **lora)}
    trainer = build_trainer(classes, model, processor, rows, settings, **peft)
    trainer.reward_funcs = [reward]
    base = base_of(causal_model(trainer.model))
    trainer.tokens, trainer.images = [], []

    def record(found, size):
        return lambda module, args, kwargs: found.append(size(kwargs)) if torch.is_grad_enabled() else None

    base.register_forward_pre_hook(record(trainer.tokens, lambda given: given["input_ids"].numel()), with_kwargs=True)
    tower = parts_of_tower(base)[0]
    tower.register_forward_pre_hook(record(trainer.images, lambda given: 1), with_kwargs=True)
    trainer.train()
    return trainer


CASES = {
    "adapters": (LORA, {}),
    "adapters, checkpointing": (LORA, {"gradient_checkpointing": True}),
    "all weights": (None, {"learning_rate": 0.2, "num_iterations": 1}),
    "small micro-batches": (LORA, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}),
}


@pytest.mark.parametrize("case", CASES)
def test_half_of_the_groups_are_dead(case, vision, rows, tmp_path):
    lora, changed = CASES[case]
    settings = options(tmp_path, epsilon_high=0.28, num_iterations=2, learning_rate=0.5) | changed
    stock = after_steps(STOCK, *vision, rows, settings, half_dead, lora)
    ours = after_steps(DAPO, *vision, rows, settings, half_dead, lora)
    assert texts_of(ours) == texts_of(stock)
    assert largest_relative_update(vision[0], ours, stock) < 1e-5
    assert min(logged(ours, "skipped/rows")) >= 3
    assert sum(ours.tokens) < sum(stock.tokens) / 2


@pytest.mark.parametrize("trains", [False, True])
def test_nothing_is_live(trains, vision, rows, tmp_path):
    """Three tokens run and no image, unless the tower trains; weight decay moves the weights as it does TRL's."""
    model, processor = copy.deepcopy(vision[0]), vision[1]
    for parameter in parameters_of_tower(base_of(model)):
        parameter.requires_grad_(trains)
    settings = options(tmp_path, epsilon_high=0.28, optim="adamw_torch_fused", weight_decay=0.1)
    stock = after_steps(STOCK, model, processor, rows, settings, dead, None)
    ours = after_steps(DAPO, model, processor, rows, settings, dead, None)
    assert largest_relative_update(model, ours, stock) < 1e-5
    assert logged(ours, "skipped/rows") == [6, 6, 6]  # of each micro-batch of four rows one runs
    if trains:
        assert len(ours.images) == len(stock.images)
    else:
        assert (ours.tokens, ours.images) == ([3] * 6, [])
