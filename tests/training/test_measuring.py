"""What a run measures: when, how often, and what it refuses."""

import copy
import math

import pytest
import torch
from peft import LoraConfig
from support.trainers import letters_reward, logged

from vgr_trl.batch import scoring_inputs
from vgr_trl.measure import score_completions
from vgr_trl.rewards import accuracy_reward, mdi_reward, vgr_reward
from vgr_trl.rollout import Rollout
from vgr_trl.utils import ConfigError

OPTIONS = {
    "max_steps": 2,
    "skip_zero_advantage": "off",  # passes are counted by their rows
}


@pytest.fixture
def make(vision_trainer):
    def build(rewards=letters_reward, rows=vision_trainer.rows, **changed):
        return vision_trainer(rewards, rows, **OPTIONS | changed)

    build.rows = vision_trainer.rows
    return build


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


def test_metrics_and_columns_are_logged_for_training_and_evaluation(make):
    trainer = make(rewards=[accuracy_reward, vgr_reward], max_steps=1)
    trainer.eval_dataset = make.rows.select(range(4))
    trainer.train()
    evaluated = trainer.evaluate()
    for segment in ("early", "middle", "late", "all"):
        for quantity in ("vgr", "aei_vision", "aei_instruction", "mdi_balance"):
            assert math.isfinite(logged(trainer, f"attention/{segment}/{quantity}")[0])
            assert math.isfinite(evaluated[f"eval_attention/{segment}/{quantity}"])
    assert logged(trainer, "vgr/undefined_fraction") == [0.0]
    columns = trainer._logs["extra"]
    assert len(columns["vgr"]) == len(trainer._logs["completion"])
    assert all(value > 0 for value in columns["vgr"])


def test_rows_without_an_image_have_no_vgr(make):
    rows = make.rows.map(lambda row, index: {"image": None if index % 2 else row["image"]}, with_indices=True)
    trainer = make(rewards=[letters_reward, vgr_reward], rows=rows, max_steps=4, token_weights=True,
                   enable_trajectory_reweighting=True)  # fmt: skip
    trainer.train()
    fractions = logged(trainer, "vgr/undefined_fraction")
    assert set(fractions) <= {0.0, 0.5, 1.0}
    assert any(fraction > 0 for fraction in fractions)
    assert all(math.isfinite(entry) for entry in logged(trainer, "loss"))


@pytest.mark.parametrize(
    "changed",
    [
        {"share_prompts": "off"},
        {"gradient_checkpointing": True},
        {"attn_implementation": "eager"},
        {"attention_source": "generate", "share_prompts": "off"},
        {"rollout_log_steps": 0},  # without the head
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


@pytest.mark.parametrize("changed", [{}, {"pad_to_multiple_of": 8}])
def test_the_measured_pass_gets_what_trl_would_pass(make, changed):
    trainer = make(**changed)
    found = {}
    original = trainer._calculate_rewards

    def keep(inputs, prompts, completions, completion_ids):
        found["prompts"], found["ids"] = trainer._rollout.prompts, completion_ids
        return original(inputs, prompts, completions, completion_ids)

    trainer._calculate_rewards = keep
    rows = [trainer.train_dataset[index // 4] for index in range(8)]
    trainer.model.train()
    batch = trainer._generate_and_score_completions(rows)
    scored = []
    score, trainer.score = trainer.score, lambda inputs, **options: scored.append(inputs)
    rollout = Rollout(rows, prompts=found["prompts"])
    score_completions(trainer, rollout, found["ids"])
    trainer.score = score
    [ours] = scored
    theirs = scoring_inputs(batch)
    assert ours.pop("num_tiles") is None
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(ours[name], value) if isinstance(value, torch.Tensor) else ours[name] == value, name


class TestRefusals:
    def test_attention_features_on_a_text_model(self, text_trainer):
        for reward, changed, name in (
            (vgr_reward, {}, "the reward vgr_reward"),
            (letters_reward, {"compute_attention_metrics": True}, "compute_attention_metrics"),
            (letters_reward, {"perception_loss_weight": 0.1}, "perception_loss_weight"),
        ):
            with pytest.raises(ConfigError, match=f"{name} cannot be used here: Qwen2ForCausalLM reads text"):
                text_trainer(reward, **changed)

    def test_attention_features_on_data_without_images(self, make):
        with pytest.raises(ConfigError, match="token_weights cannot be used here: the data have no column `image`"):
            make(rows=make.rows.remove_columns("image"), token_weights=True)

    def test_more_layers_than_there_are(self, make):
        with pytest.raises(ConfigError, match="last_k_layers is 4, but 3 layers of the model have attention: give a n"):
            make(token_weights=True, token_weights_last_k_layers=4)
