"""What a run measures: when, how often, and what it refuses."""

import copy
import functools
import math

import pytest
import torch
from peft import LoraConfig
from support.trainers import letters_reward, logged
from trl.trainer import utils as trl_utils

from vgr_trl.batch import scoring_inputs
from vgr_trl.measure import plan_measurement, score_completions
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
        ({"num_iterations": 2, "token_weights": True}, [SCORING, TRAINING]),
        ({"enable_perception_filtering": True, "compute_attention_metrics": False}, [SCORING, SCORING, TRAINING]),
        ({"replay_buffer_size": 4, "compute_attention_metrics": False}, [TRAINING]),
        ({"beta": 0.1}, [SCORING, SCORING, TRAINING]),
        ({"kl_coef": 0.1, "compute_attention_metrics": False}, [SCORING, TRAINING]),
        ({"kl_coef": 0.1, "use_kl_loss": False}, [SCORING, SCORING, TRAINING]),
        ({"advantage_estimator": "gae"}, [SCORING, TRAINING]),
        ({"advantage_estimator": "gae", "critic": "model", "compute_attention_metrics": False},
         [SCORING, TRAINING, TRAINING]),
        ({"perception_loss_weight": 0.01, "compute_attention_metrics": False}, [TRAINING, TRAINING]),
    ],
)  # fmt: skip
def test_no_pass_is_made_twice(make, passes, changed, expected):
    """TRL's own pass for old log-probabilities is the measured one; a reference pass and perturbed images cost one."""
    make(max_steps=1, **changed).train()
    assert passes == expected


@pytest.mark.parametrize(("source", "scoring", "tower"), [("scoring", [2, 8], 3), ("generate", [], 2)])
def test_forward_calls_of_a_rollout_batch(make, source, scoring, tower):
    """Rows per pass of the language model, two prompts of four completions; a tower that trains runs in each pass."""
    trainer = make(rewards=[letters_reward, vgr_reward], token_weights=True, attention_source=source, max_steps=1,
                   rollout_log_steps=0)  # fmt: skip
    rows, images = [], []
    trainer.model.get_decoder().register_forward_pre_hook(
        lambda module, args, kwargs: rows.append(kwargs["inputs_embeds"].shape[:2]), with_kwargs=True
    )
    trainer.model.model.visual.register_forward_pre_hook(
        lambda module, args, kwargs: images.append(len(kwargs["grid_thw"])), with_kwargs=True
    )
    trainer.train()
    passes = [count for count, tokens in rows if tokens > 1]  # without the steps of generation
    assert passes == [2, *scoring, 2, 8]
    assert images == [2] * tower  # in generation, scoring and training, each image once


@pytest.mark.parametrize(
    ("changed", "expected", "heads"),
    [
        ({"token_weights": True}, [SCORING, TRAINING], 1),
        ({"token_weights": True, "attention_source": "generate"}, [TRAINING], 1),
        ({"token_weights": True, "rollout_log_steps": 1}, [SCORING, TRAINING], 2),
        ({"token_weights": True, "enable_entropy_filtering": True}, [SCORING, TRAINING], 2),
        ({"attention_source": "generate", "enable_entropy_filtering": True}, [SCORING, TRAINING], 2),
    ],
)
def test_the_head_is_left_out_where_only_attention_is_wanted(
    make, passes, monkeypatch, changed, expected, heads
):  # fmt: skip
    projected = []
    original = trl_utils._ChunkedLogProbFunction.forward

    @functools.wraps(original)
    def counted(*args):
        projected.append(1)
        return original(*args)

    monkeypatch.setattr(trl_utils._ChunkedLogProbFunction, "forward", staticmethod(counted))
    make(**{"rollout_log_steps": 0, "max_steps": 1} | changed).train()
    assert (passes, len(projected)) == (expected, heads)


@pytest.mark.parametrize(
    "changed", [{}, {"share_prompts": "off"}, {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}]
)
def test_recorded_rows_alone_go_through_the_head(make, monkeypatch, changed):
    """Of two chunks of four rows, or of one of eight; a chunk without recorded rows takes its first."""
    trainer = make(max_steps=1, **changed)
    trainer.model.train()
    inputs = scoring_inputs(
        trainer._generate_and_score_completions([trainer.train_dataset[index // 4] for index in range(8)])
    )
    whole = trainer.score(inputs)
    projected = []
    original = trl_utils._ChunkedLogProbFunction.forward

    @functools.wraps(original)
    def counted(context, hidden, *args):
        projected.append(len(hidden))
        return original(context, hidden, *args)

    monkeypatch.setattr(trl_utils._ChunkedLogProbFunction, "forward", staticmethod(counted))
    for rows in ((0, 2, 5), (1,), ()):
        projected.clear()
        found = trainer.score(inputs, head=False, rows=rows)
        chunks = 8 // trainer.args.per_device_train_batch_size
        through = sorted({*rows, *(first for first in range(0, 8, 8 // chunks) if not rows)})
        if chunks == 2 and rows == (1,):
            through = [1, 4]
        assert found.isnan().all(dim=1).tolist() == [row not in through for row in range(8)]
        assert torch.allclose(found[through], whole[through], atol=1e-6)
        assert sum(projected) % len(through) == 0
        assert sum(projected) // len(through) in (found.size(1), inputs["input_ids"].size(1) - 1)


@pytest.mark.parametrize("source", ["scoring", "generate"])
def test_attention_is_the_same_with_and_without_the_head(make, source):
    found = []
    for every in (0, 1):
        trainer = make(rewards=[letters_reward, vgr_reward], max_steps=1, rollout_log_steps=every,
                       attention_source=source, token_weights=True)  # fmt: skip
        trainer.train()
        found.append([list(trainer._logs["extra"]["vgr"]), *logged(trainer, "grad_norm"), *logged(trainer, "loss")])
    assert found[0] == found[1]


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
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
        {"attn_implementation": "eager"},
        {"attention_source": "generate", "share_prompts": "off"},
        {"bf16": True},
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
    assert other == pytest.approx(plain, rel=0.05 if changed.get("bf16") else 1e-4)


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


@pytest.mark.parametrize("changed", [{}, {"mask_truncated_completions": True}, {"pad_to_multiple_of": 8}])
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

    def test_a_reward_that_needs_vgr_gets_it_from_the_data_if_it_is_there(self, make):
        rows = make.rows.remove_columns("image").map(lambda row: {"vgr": 1.0})
        trainer = make(rewards=[vgr_reward, letters_reward], rows=rows, max_steps=1)
        trainer.train()
        [found] = [log["rewards/vgr_reward/mean"] for log in trainer.state.log_history if "reward" in log]
        assert found == 0.5  # what a group of equal values earns

    def test_more_layers_than_there_are(self, make):
        make(token_weights=True, token_weights_last_k_layers=3)
        make(token_weights_last_k_layers=4)  # not used without token_weights
        with pytest.raises(ConfigError, match="last_k_layers is 4, but 3 layers of the model have attention: give a n"):
            make(token_weights=True, token_weights_last_k_layers=4)

    def test_generation_that_keeps_no_attention(self, make):
        with pytest.raises(ConfigError, match='attention_source is "generate" with beam search'):
            make(attention_source="generate", token_weights=True, generation_kwargs={"num_beams": 2})

    def test_rollout_functions(self, make):
        trainer = make()
        trainer.tools = [print]
        trainer.args.token_weights = True
        with pytest.raises(ConfigError, match="with tools the tokens of a completion are not all"):
            plan_measurement(trainer)

    def test_an_attention_that_cannot_be_measured(self, make, monkeypatch):
        monkeypatch.setattr("vgr_trl.signals.attention.SUPPORTED", ("flash_attention_2",))
        with pytest.raises(ConfigError, match="token_weights cannot be used here: the attention implementation is"):
            make(token_weights=True)
        assert not make().measurement.needed, "metrics that nobody asked for are left out"
