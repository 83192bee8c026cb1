"""What a run measures: when, how often, and what it refuses."""

import copy
from functools import partial

import pytest
import torch
from peft import LoraConfig
from support.trainers import letters_reward

from vgr_trl.rewards import mdi_reward, vgr_reward
from vgr_trl.utils import ConfigError


@pytest.fixture
def make(vision_trainer):
    return partial(vision_trainer, max_steps=2, skip_zero_advantage="off")  # passes are counted by their rows


SCORING, TRAINING = (False, 8), (True, 8)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"compute_attention_metrics": False}, [TRAINING]),
        ({}, [SCORING, TRAINING]),
        ({"rewards": [vgr_reward, mdi_reward], "token_weights": True, "enable_entropy_filtering": True},
         [SCORING, TRAINING]),
        ({"enable_perception_filtering": True, "compute_attention_metrics": False}, [SCORING, SCORING, TRAINING]),
        ({"beta": 0.1}, [SCORING, SCORING, TRAINING]),
        ({"kl_coef": 0.1, "use_kl_loss": False}, [SCORING, SCORING, TRAINING]),
        ({"advantage_estimator": "gae", "critic": "model", "compute_attention_metrics": False},
         [SCORING, TRAINING, TRAINING]),
        ({"perception_loss_weight": 0.01, "compute_attention_metrics": False}, [TRAINING, TRAINING]),
    ],
)  # fmt: skip
def test_no_pass_is_made_twice(make, passes, changed, expected):
    """TRL's own pass for old log-probabilities is the measured one; a reference pass and perturbed images cost one."""
    make(max_steps=1, **changed).train()
    assert passes == expected


@pytest.mark.parametrize(
    "changed",
    [
        {"share_prompts": "off", "rollout_log_steps": 0},  # without the head
        {"gradient_checkpointing": True, "pad_to_multiple_of": 8},
        {"attn_implementation": "eager"},
        {"attention_source": "generate", "share_prompts": "off"},
    ],
    ids=str,
)
def test_vgr_is_the_same_however_the_batch_is_passed(make, changed):
    implementation = changed.pop("attn_implementation", None)
    values = []
    for options in ({}, changed):
        trainer = make(max_steps=1, temperature=1.0, **options)
        if implementation and options is changed:
            trainer.model.set_attn_implementation(implementation)
        trainer.train()
        values.append(list(trainer._logs["extra"]["vgr"]))
    plain, other = values
    assert other == pytest.approx(plain, rel=1e-4)


def test_the_policy_is_measured_and_not_its_reference(make):
    """With LoRA, TRL's reference pass runs through the same model with its adapter switched off."""
    lora = LoraConfig(r=4, target_modules=["q_proj", "k_proj"], init_lora_weights=False)
    values = {}
    for beta in (0.0, 0.5):
        torch.manual_seed(0)
        trainer = make(max_steps=1, beta=beta, peft_config=copy.deepcopy(lora))
        trainer.train()
        values[beta] = list(trainer._logs["extra"]["vgr"])
    assert values[0.5] == pytest.approx(values[0.0], rel=1e-4)


def test_attention_features_on_a_text_model(text_trainer):
    for reward, changed, name in (
        (vgr_reward, {}, "the reward vgr_reward"),
        (letters_reward, {"compute_attention_metrics": True}, "compute_attention_metrics"),
        (letters_reward, {"perception_loss_weight": 0.1}, "perception_loss_weight"),
    ):
        with pytest.raises(ConfigError, match=f"{name} cannot be used here: Qwen2ForCausalLM reads text"):
            text_trainer(reward, **changed)


def test_attention_features_that_data_or_model_cannot_have(make, vision_trainer):
    with pytest.raises(ConfigError, match="token_weights cannot be used here: the data have no column `image`"):
        make(rows=vision_trainer.rows.remove_columns("image"), token_weights=True)
    with pytest.raises(ConfigError, match="last_k_layers is 4, but 3 layers of the model have attention: give a n"):
        make(token_weights=True, token_weights_last_k_layers=4)
