import copy

import pytest
import torch
from peft import LoraConfig
from support.models.families import with_frozen_tower
from support.models.tiny_questions import picture, questions
from support.steps import DAPO, STOCK, assert_same_steps, build_trainer, options, uneven_reward
from support.trainers import logged
from text_runs import equal_rewards

from vgr_trl.sharing.model_support import base_of, causal_model
from vgr_trl.vision import parameters_of_tower, parts_of_tower

LORA = {"target_modules": ["q_proj", "v_proj"]}  # no module of the tower is called so
SIZES = (56, 84, 112)
STEPS = 3
SMALLEST = 16  # patches of an image of 56 by 56
SMALL = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}


@pytest.fixture(scope="module")
def uneven_rows():
    return questions(lambda number: [picture(number, SIZES[number % 3]), *[picture(number + 50)] * (number % 2)])


@pytest.fixture(scope="module")
def frozen(vision):
    model, processor = copy.deepcopy(vision[0]), vision[1]
    model.config._name_or_path = vision[0].config._name_or_path
    return with_frozen_tower(model), processor


def reward_of_every_other_group(prompts, completion_ids, **kwargs):
    """Equal for all completions of every other prompt; elsewhere every fourth completion has the mean."""
    values = (0.0, 1.0, 0.5, 0.5)
    return [0.3 if len(prompt[0]["content"]) % 2 else values[row % 4] for row, prompt in enumerate(prompts)]


def reward_of_text(prompts, completion_ids, **kwargs):
    """Equal for all completions of a question with images."""
    rewards = uneven_reward(prompts=prompts, completion_ids=completion_ids)
    return [0.3 if len(prompt[0]["content"]) > 1 else one for prompt, one in zip(prompts, rewards, strict=True)]


def after_steps(classes, model, rows, settings, *, reward=uneven_reward, lora=None, change_reference=None):
    """The trainer after its steps; `tokens` of passes with gradients, and for each call of the tower whether it had."""
    peft = lora and LoraConfig(r=4, **lora)
    trainer = build_trainer(classes, *model, rows, settings, peft_config=peft)
    trainer.reward_funcs = [reward]
    trainer.tokens, trainer.calls, trainer.patches = [], [], []
    base = base_of(causal_model(trainer.model))

    def count_tokens(module, args, kwargs):
        if torch.is_grad_enabled():
            trainer.tokens.append(kwargs["input_ids"].numel())

    base.register_forward_pre_hook(count_tokens, with_kwargs=True)

    def count_patches(module, args, output):
        trainer.calls.append(torch.is_grad_enabled())
        if torch.is_grad_enabled():
            trainer.patches.append(len(args[0]))

    parts_of_tower(base)[0].register_forward_hook(count_patches)
    if change_reference is not None:
        change_reference(base_of(causal_model(trainer.ref_model)))
    trainer.train()
    return trainer


def stock_and_ours(model, rows, settings, ours_only=None, **more):
    settings = {"epsilon_high": 0.28, **settings}
    stock = after_steps(STOCK, model, rows, settings, **more)
    ours = after_steps(DAPO, model, rows, settings | (ours_only or {}), **more)
    assert_same_steps(model[0], ours, stock, 1e-5)
    return stock, ours


@pytest.mark.parametrize(("lora", "changed"), [(None, {"learning_rate": 0.2, "num_iterations": 1}), (LORA, SMALL)])
def test_half_of_the_groups_have_no_variance(lora, changed, vision, uneven_rows, tmp_path):
    settings = options(tmp_path, num_iterations=2, learning_rate=0.5) | changed
    stock, ours = stock_and_ours(vision, uneven_rows, settings, reward=reward_of_every_other_group, lora=lora)
    assert min(logged(ours, "skipped/rows")) >= 3
    assert sum(ours.tokens) < sum(stock.tokens) / 2


@pytest.mark.parametrize("trains", [False, True])
def test_no_group_has_variance(trains, vision, frozen, uneven_rows, tmp_path):
    """In the first of two micro-batches two tokens run, and a small image if the tower trains; in the second nothing.

    Weight decay moves weights as it does TRL's.
    """
    settings = options(tmp_path, optim="adamw_torch_fused", weight_decay=0.1)
    _, ours = stock_and_ours(vision if trains else frozen, uneven_rows, settings, reward=equal_rewards)
    assert logged(ours, "skipped/rows") == [7, 7, 7]  # of eight rows one runs
    assert ours.tokens == [2] * 3
    assert ours.patches == ([SMALLEST] * 3 if trains else [])


def test_only_rows_of_text_have_variance(vision, tmp_path):
    """Those with images are left out of their micro-batch, and the tower that trains gets gradients of zero."""
    rows = questions(lambda number: [picture(number, 112)] * (number % 2))
    settings = options(tmp_path, per_device_train_batch_size=8, gradient_accumulation_steps=1, epsilon_high=0.28)
    whole, ours = (
        after_steps(DAPO, vision, rows, settings | {"skip_zero_advantage": skip}, reward=reward_of_text)
        for skip in ("off", "auto")
    )
    assert_same_steps(vision[0], ours, whole, 1e-5)
    assert SMALLEST in ours.patches
    assert sum(ours.patches) < sum(whole.patches)


@pytest.mark.parametrize(
    ("settings", "ours_only", "lora"),
    [
        ({"num_iterations": 2, "max_steps": 2 * STEPS}, {"share_prompts": "off"}, None),
        ({"beta": 0.1, "gradient_checkpointing": True}, {}, None),
        ({"beta": 0.1, "gradient_checkpointing": True, "learning_rate": 0.5}, {}, LORA),
    ],
)
def test_frozen_towers_run_once_per_rollout(settings, ours_only, lora, vision, frozen, image_rows, tmp_path):
    """Frozen by hand, or under adapters elsewhere, where transformers marks the patches as needing gradients."""
    model = frozen if lora is None else vision
    stock, ours = stock_and_ours(model, image_rows, options(tmp_path, **settings), ours_only, lora=lora)
    assert ours.calls == [False] * STEPS
    assert len(stock.calls) >= 2 * len(ours.calls)
    assert lora is None or True in stock.calls


def test_a_reference_with_another_tower_reads_its_own_features(frozen, image_rows, tmp_path):
    """As one that was loaded from elsewhere; it is written to in place where it follows the policy."""

    def change(base):
        with torch.no_grad():
            for parameter in parameters_of_tower(base):
                parameter.mul_(1.5)

    settings = options(tmp_path, beta=0.1, sync_ref_model=True, ref_model_sync_steps=2)
    stock, ours = stock_and_ours(frozen, image_rows, settings, change_reference=change)
    assert logged(ours, "kl") == pytest.approx(logged(stock, "kl"), rel=0.05)  # means of other micro-batches
    assert ours.calls == [False] * STEPS
