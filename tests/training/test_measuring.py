import copy
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from peft import LoraConfig
from support.trainers import tiny_model

from vgr_trl.errors import ConfigError, RewardError
from vgr_trl.reporting.records import read_run

PASSES = yaml.safe_load(Path(__file__).with_name("measuring.yaml").read_text(encoding="utf-8"))


@pytest.fixture
def make(vision_trainer):
    return partial(vision_trainer, max_steps=2, skip_zero_advantage="off")  # passes are counted by their rows


@pytest.mark.parametrize(("changed", "expected"), PASSES, ids=str)
def test_no_pass_is_made_twice(make, passes, changed, expected):
    """TRL's own pass for old log-probabilities is the measured one; a reference pass and perturbed images cost one."""
    make(max_steps=1, **changed).train()
    assert [list(each) for each in passes] == expected


def test_curves_and_records_of_a_sample_are_those_of_its_rows(make, tmp_path):
    tables, logs, records = [], [], []
    for rows in ("all", "auto"):
        options = {"attention_rows": rows, "output_dir": tmp_path / rows, "rollout_log_samples": 2}
        trainer = make("accuracy", max_steps=1, temperature=1.0, **options)
        trainer.train()
        tables.append(list(trainer._logs["extra"]["vgr"]))
        logs.append(next(entry for entry in trainer.state.log_history if "attention/late/vgr" in entry))
        (record,) = read_run(trainer.args.output_dir).records("train")
        records.append(record.completions)
    every, sample = tables
    assert sample == [*(pytest.approx(value, rel=1e-4) for value in every[:4]), None, None, None, None]
    means = [logged["attention/late/vgr"] for logged in logs]
    assert means == pytest.approx([sum(every) / 8, sum(every[:4]) / 4], rel=1e-4)
    for one, other in zip(*records, strict=True):
        assert one.attention.scale == pytest.approx(other.attention.scale, rel=1e-4)
        assert one.metrics["late"] == pytest.approx(other.metrics["late"], rel=1e-4)
        assert other.entropies == pytest.approx(one.entropies, rel=1e-4)


def test_signals_of_generation_are_those_of_a_scoring_pass(make):
    credit = {"token_weights": True, "enable_trajectory_reweighting": True, "replay_buffer_size": 8}
    logs = []
    for source in ("scoring", "generate"):
        trainer = make(temperature=0.8, attention_source=source, rollout_log_steps=0, **credit)
        trainer.train()
        logs.append([entry for entry in trainer.state.log_history if "loss" in entry])
    for scored, generated in zip(*logs, strict=True):
        compared = [name for name in scored if name.startswith(("loss", "grad_norm", "attention/late", "credit/"))]
        assert len(compared) > 5
        expected = {name: scored[name] for name in compared}
        assert {name: generated[name] for name in compared} == pytest.approx(expected, rel=1e-3, abs=1e-5)


def test_rewards_get_the_same_columns_in_training_and_evaluation(make):
    """Attention that only metrics read is measured for a sample of a training rollout, and for no reward."""

    names = []

    def known(completions, **columns):
        names.append(columns.keys())
        return [0.0] * len(completions)

    known.__module__ = "trl.rewards"  # whose rewards read no attention
    trainer = make(known, eval_rows=make.func.rows.select(range(2)), max_steps=1)
    trainer.train()
    assert trainer.evaluate()["eval_attention/late/vgr"] > 0
    assert names[0] == names[1]
    assert "vgr" not in names[0]


@pytest.mark.parametrize("reads", [False, None])
def test_an_unmeasured_balance_is_no_value(make, reads):
    def balance(completions, **columns):
        return columns["trainer"]._mdi_balance_scores_current_batch

    rows = make.func.rows if reads is False else make.func.rows.remove_columns("image")
    with pytest.raises(RewardError, match="compute_attention_metrics"):
        make(balance, rows=rows, compute_attention_metrics=reads, max_steps=1).train()


def test_the_policy_is_measured_and_not_its_reference(make):
    """With LoRA, TRL's reference pass runs through the same model with its adapter switched off."""
    lora = LoraConfig(r=4, target_modules=["q_proj", "k_proj"], init_lora_weights=False)
    values = {}
    for beta in (0.0, 0.5):
        torch.manual_seed(0)
        trainer = make(max_steps=1, beta=beta, attention_rows="all", peft_config=copy.deepcopy(lora))
        trainer.train()
        values[beta] = list(trainer._logs["extra"]["vgr"])
    assert values[0.5] == pytest.approx(values[0.0], rel=1e-4)


def test_attention_features_that_data_or_model_cannot_have(make, vision_trainer, model_folder):
    with pytest.raises(ConfigError, match="token_weights cannot be used here: the data have no column `image`"):
        make(rows=vision_trainer.rows.remove_columns("image"), token_weights=True)
    with pytest.raises(ConfigError, match="last_k_layers is 4: give a number in .1, 3., or None"):
        make(token_weights=True, token_weights_last_k_layers=4)
    model = tiny_model(model_folder)
    model.generation_config.cache_implementation = "static"
    with pytest.raises(ConfigError, match='attention_source is "generate" with a static cache'):
        make(attention_source="generate", token_weights=True, model=model)
