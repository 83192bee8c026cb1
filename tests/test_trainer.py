import copy
import math
import re
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
from datasets import Dataset
from PIL import Image
from support.models.compare import scored, with_head
from support.models.families import build as build_model
from support.models.families import make_batch
from support.trainers import STOCK, letters_reward, logged, weights
from transformers import PrinterCallback, ProgressCallback, TrainerCallback

from vgr_trl.config import SWITCHES
from vgr_trl.dapo_config import DAPOConfig
from vgr_trl.errors import ConfigError
from vgr_trl.trainer import DAPOTrainer
from vgr_trl.trl_bridge import from_trl, to_scoring

LONGER = {"max_steps": 2, "learning_rate": 0.1}


@pytest.fixture
def build(text_trainer, tmp_path):
    return partial(text_trainer, output_dir=tmp_path, **LONGER)


@pytest.mark.parametrize(("silent", "printer"), [(True, PrinterCallback), (False, ProgressCallback)])
def test_a_step_prints_one_line_and_callbacks_get_everything(build, capsys, silent, printer):
    seen = []

    class Tracker(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            seen.append(len(logs))

    trainer = build(disable_tqdm=silent)
    trainer.add_callback(Tracker())
    trainer.train()
    out, err = capsys.readouterr()
    assert re.findall(r"^step (\d)/2  reward .*s/step", out, re.M) == ["1", "2"]
    assert "{" not in out + err
    assert min(seen[:2]) > 30
    trainer.remove_callback(printer)  # as scripts do that print lines of their own
    trainer.log({"loss": 1.0})
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("changed", [{}, {"num_iterations": 2}, {"gradient_accumulation_steps": 2, "max_steps": 1}])
def test_with_its_options_off_it_trains_exactly_as_trl(build, text_model, changed):
    off = dict.fromkeys(("share_prompts", *SWITCHES), "off")
    ours = build(model=copy.deepcopy(text_model), optim="sgd", **off, **changed)
    ours.train()
    stock = {"classes": STOCK, "epsilon_high": 0.28}
    theirs = build(model=copy.deepcopy(text_model), optim="sgd", **stock, **changed)
    theirs.train()
    assert torch.equal(weights(ours), weights(theirs))
    assert not torch.equal(weights(ours), torch.cat([value.flatten() for value in text_model.parameters()]))


def test_rows_keep_their_pixels_where_a_rollout_has_as_many_images_as_rows(text_trainer, tmp_path, monkeypatch):
    """Two images in each row of a prompt, none in those of the other: TRL cut the pixels of Idefics by images."""
    sizes = {"num_generations": 3, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}
    trainer = text_trainer(model=with_head(build_model("idefics3")), output_dir=tmp_path, **sizes)
    made = make_batch("idefics3", images=(2, 0))
    inputs, length = made.inputs, made.completion_length
    images = {name: inputs[name] for name in ("pixel_values", "pixel_attention_mask")}
    batch = {"advantages": torch.ones(6), "num_images": [2, 2, 2, 0, 0, 0], **images}
    for name, key in (("ids", "input_ids"), ("mask", "attention_mask")):
        batch |= {f"prompt_{name}": inputs[key][:, :-length], f"completion_{name}": inputs[key][:, -length:]}
    expected, _ = scored(trainer.model, made)
    monkeypatch.setattr(trainer, "_generate_and_score_completions", lambda rows: batch)
    trainer.model.train()
    micro_batches = [trainer._prepare_inputs(None)] and trainer._buffered_inputs
    for part in [batch, *micro_batches]:
        rows = [inputs["input_ids"][:, -length:].tolist().index(ids) for ids in part["completion_ids"].tolist()]
        for trains in (True, False):
            with torch.set_grad_enabled(trains):
                found = trainer._get_per_token_logps_and_entropies(trainer.model, **to_scoring(from_trl(part)))[0]
            assert (found - expected[rows])[part["completion_mask"].bool()].abs().max() < 1e-5


def test_a_single_reward_and_no_config_are_accepted(text_model, text_tokenizer, text_rows, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    on_cpu = partial(DAPOConfig, use_cpu=True, bf16=False)  # TRL's own default, bf16, needs an accelerator
    monkeypatch.setattr("vgr_trl.validate.options.DAPOConfig", on_cpu)
    text_model.config._name_or_path = "some/model"
    trainer = DAPOTrainer(text_model, letters_reward, None, text_rows, processing_class=text_tokenizer)
    assert trainer.args.output_dir == "model-DAPO"
    assert (trainer.epsilon_high, trainer.loss_type) == (0.28, "dapo")


def test_long_prompts_are_left_out_and_counted(build, text_rows, monkeypatch):
    warnings = []
    monkeypatch.setattr("vgr_trl.data.checked_rows.logger.warning", warnings.append)
    long = [{"role": "user", "content": "what colour is the shape ? " * 3}]
    rows = Dataset.from_list([{"prompt": long, "solution": "red"}, *text_rows])
    trainer = build(rows=rows, max_prompt_length=15, eval_rows=rows)
    assert [len(trainer.train_dataset), len(trainer.eval_dataset)] == [len(text_rows)] * 2
    assert warnings[0].startswith("max_prompt_length=15: skipped 1 of 13 rows of the train data (the longest prompt")
    stream = build(rows=rows.to_iterable_dataset(), max_prompt_length=15, shuffle_dataset=False)
    stream.train()
    assert logged(stream, "data/prompts_too_long")[-1] >= 1


def test_a_checkpoint_of_another_model_is_refused(vision_trainer, tmp_path, text_model):
    trainer = vision_trainer()
    text_model.save_pretrained(tmp_path / "other")
    with pytest.raises(ConfigError, match=r"does not fit the model \w+ \(it is a qwen2, not a qwen2_5_vl\): continue"):
        trainer._load_from_checkpoint(str(tmp_path / "other"))
    wider = copy.deepcopy(trainer.model)
    wider.model.language_model.layers[0].mlp.up_proj = torch.nn.Linear(3, 5, bias=False)
    wider.save_pretrained(tmp_path / "wider")
    with pytest.raises(ConfigError, match=r"it has 1 mismatched keys: .*up_proj.*: continue with the model"):
        trainer._load_from_checkpoint(str(tmp_path / "wider"))


def test_undefined_rewards_are_counted_and_nan_is_warned_of_once(build, monkeypatch):
    def nan_now_and_then(completions, **kwargs):
        return [math.nan, None, *(1.0 * (i % 3) for i in range(2, len(completions)))]

    def undefined(completions, **kwargs):
        return [math.nan] * len(completions)

    warnings = []
    monkeypatch.setattr("vgr_trl.rewards.calling.logger.warning", warnings.append)
    trainer = build(rewards=[letters_reward, nan_now_and_then])
    trainer.train()
    (warning,) = warnings
    assert warning.startswith("The reward nan_now_and_then returned NaN for 1 completions: they count as not applicab")
    assert logged(trainer, "rewards/nan_now_and_then/not_applicable") == [0.25, 0.25]
    assert logged(trainer, "rewards/letters_reward/not_applicable") == [0.0, 0.0]
    trainer = build(rewards=[undefined])
    before = weights(trainer)
    trainer.train()
    assert logged(trainer, "rewards/undefined/not_applicable") == [1, 1]
    assert torch.equal(weights(trainer), before)


def test_images_for_a_text_only_model_are_refused(build, text_rows):
    rows = text_rows.map(lambda row: {"image": Image.new("RGB", (8, 8))})
    with pytest.raises(ConfigError, match=r"column `image`, but Qwen2ForCausalLM .* reads text only"):
        build(rows=rows)


def test_an_evaluation_has_the_late_reward_weights_and_counts_in_no_metric_of_training(text_trainer, text_rows):
    def half_reward(completions, **kwargs):
        return [0.5] * len(completions)

    def place_reward(completions, **kwargs):
        return [index % 4 / 4 for index in range(len(completions))]

    def trained(**evaluates):
        trainer = text_trainer(
            [place_reward, half_reward], eval_rows=text_rows.select(range(4)), max_steps=3, warmup_steps=3,
            early_reward_weights=[1.0, 0.0], reward_weights=[0.0, 1.0], num_generations_eval=2, **evaluates,
        )  # fmt: skip
        trainer.train()
        return trainer

    alone, evaluated = trained(), trained(eval_strategy="steps", eval_steps=1)
    assert logged(evaluated, "eval_reward") == [0.5] * 3
    assert logged(evaluated, "reward_weights/place_reward") == [1.0] * 3
    assert logged(evaluated, "sharing/prompts_per_row") == logged(alone, "sharing/prompts_per_row") != []


@dataclass
class LongReward:
    """A reward that cannot be hashed, as a dataclass that compares its fields."""

    least: int = 3

    def __call__(self, completions, **columns):
        return [float(len(completion) > self.least) for completion in completions]


@pytest.mark.parametrize("weights", [(1.0, 0.5), np.array([1.0, 0.5])])
def test_rewards_and_weights_of_any_type_that_trl_takes(text_trainer, weights):
    trainer = text_trainer([LongReward(), LongReward(2)], reward_weights=weights, max_steps=1, rollout_log_steps=1)
    trainer.train()
    assert trainer.reward_weights.tolist() == [1.0, 0.5]


def test_the_best_model_is_that_of_the_best_reward(text_trainer, text_rows):
    def reward(completions, trainer_state, **kwargs):
        return [float(trainer_state.global_step == 2)] * len(completions)

    trainer = text_trainer(
        reward, eval_rows=text_rows.select(range(4)), max_steps=3, load_best_model_at_end=True,
        num_generations_eval=2, eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1,
    )  # fmt: skip
    trainer.train()
    assert (trainer.state.best_metric, trainer.state.best_global_step) == (1.0, 2)


def test_each_evaluation_set_has_metrics_of_its_own(text_trainer, text_rows, capsys):
    trainer = text_trainer(
        eval_rows={"red": text_rows.select([0]), "others": text_rows.select(range(1, 4))}, max_steps=1,
        load_best_model_at_end=True, metric_for_best_model="others_reward", num_generations_eval=2,
        eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1,
    )  # fmt: skip
    trainer.train()
    (red,), (others,) = (logged(trainer, f"eval_{name}_reward") for name in ("red", "others"))
    assert trainer.state.best_metric == others != red
    assert logged(trainer, "eval_reward") == []
    assert f"reward {red:.3f}" in capsys.readouterr().out
