import logging
from math import isfinite

import pytest
from datasets import Dataset
from peft import LoraConfig
from support.models.families import build as build_model
from support.steps import DAPO, build_trainer, options
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

ROWS = Dataset.from_dict({"prompt": ["red blue green teal " * 6] * 8})


@pytest.fixture
def make(text_tokenizer, tmp_path):
    def build(model=None, peft_config=None, **changed):
        settings, model = options(tmp_path, **changed), model or build_model("qwen3")
        return build_trainer(DAPO, model, text_tokenizer, ROWS, settings, peft_config=peft_config)

    return build


@pytest.mark.parametrize(("coefficient", "training"), [(None, "off (the load-balancing loss"), (0.0, "on")])
def test_the_load_balancing_loss_of_experts(coefficient, training, make):
    body = dict(build_model("qwen3").config.to_dict(), num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{key: body[key] for key in body if key != "model_type"}))
    trainer = make(model, router_aux_loss_coef=coefficient)
    assert str(trainer.run.features.share_training).startswith(training)
    assert trainer.run.features.share_scoring.enabled
    assert isfinite(trainer.evaluate(trainer.train_dataset)["eval_loss"])


@pytest.mark.parametrize(("lora", "attention"), [(0.1, 0.0), (0.0, 0.1), (0.0, 0.0)])
def test_shared_dropout_is_announced(lora, attention, make, caplog):
    """The mode of the model at the start does not matter: TRL trains it in training mode."""
    model = build_model("qwen3")
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = attention
    with caplog.at_level(logging.WARNING):
        make(model, LoraConfig(r=2, lora_dropout=lora, target_modules=["q_proj"]))
    assert ("share the dropout drawn over it" in caplog.text) == bool(lora or attention)


@pytest.mark.parametrize(("cache", "disabled"), [("static", None), (None, True)])
def test_decoding_is_compiled_where_the_cache_is_static(cache, disabled, make):
    assert make(cache_implementation=cache).generation_config.disable_compile is disabled
