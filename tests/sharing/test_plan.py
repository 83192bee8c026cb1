"""Which features a run has, and what it reports of them."""

import logging
from types import SimpleNamespace

import pytest
from datasets import Dataset
from peft import LoraConfig
from support.models.compare import checkpointed
from support.models.families import build as build_model
from support.steps import DAPO, build_trainer, options
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from vgr_trl.dapo_config import DAPOConfig
from vgr_trl.sharing import model_support
from vgr_trl.sharing.model_support import NEEDS_REENTRANT
from vgr_trl.sharing.shared_generate import why_not_static
from vgr_trl.validate.features import is_sharded, plan_features, warn_of_slow_generation

ROWS = Dataset.from_dict({"prompt": ["red blue green teal " * 6] * 8})


@pytest.fixture
def make(text_tokenizer, tmp_path):
    def build(model=None, peft_config=None, **changed):
        settings, model = options(tmp_path, **changed), model or build_model("qwen3")
        return build_trainer(DAPO, model, text_tokenizer, ROWS, settings, peft_config=peft_config)

    return build


@pytest.mark.parametrize(("mode", "regroup"), [("auto", "off (the loss bnpo divides by"), ("on", "on")])
def test_a_loss_that_divides_by_the_micro_batch_keeps_its_order_by_default(mode, regroup, make):
    features = make(loss_type="bnpo", share_prompts=mode).features
    assert features["share_training"].enabled
    assert str(features["regroup"]).startswith(regroup)


@pytest.mark.parametrize(
    ("launch", "expected"),
    [
        ({"zero": 3}, ("on", "on", "on")),
        ({"fsdp": 2}, ("off (FSDP)", "on", "on")),
        ({"fsdp": 1}, ("off (FSDP)", "on", "off (the first version of FSDP)")),
        ({"reentrant": True}, ("on", "on", "on")),
        ({"reentrant": True, "zero": 3, "releases": True}, ("on", "on", f"off ({NEEDS_REENTRANT})")),
        ({"compile": "INDUCTOR"}, ("on", "off (torch.compile)", "off (torch.compile)")),
        ({"vllm": True}, ("off (vLLM shares prompts itself)", "on", "on")),
        ({"mode": "off"}, ("off (share_prompts=off)",) * 3),
    ],
)
def test_launches(launch, expected, make, monkeypatch):
    """What accelerate and TRL know of a run is set by hand, as on many GPUs."""
    trainer = make(share_prompts=launch.get("mode", "auto"))
    zero, fsdp = launch.get("zero"), launch.get("fsdp")
    state = SimpleNamespace(
        dynamo_plugin=SimpleNamespace(backend=SimpleNamespace(value=launch.get("compile", "NO"))),
        fsdp_plugin=SimpleNamespace(fsdp_version=fsdp),
    )
    monkeypatch.setattr(trainer, "accelerator", SimpleNamespace(state=state))
    monkeypatch.setattr(trainer, "is_fsdp_enabled", fsdp is not None)
    monkeypatch.setattr(trainer, "is_deepspeed_enabled", zero is not None)
    monkeypatch.setattr(trainer.args, "deepspeed_plugin", SimpleNamespace(zero_stage=zero))
    monkeypatch.setattr(trainer, "use_vllm", launch.get("vllm", False))
    monkeypatch.setattr(model_support, "releases_during_recompute", lambda: launch.get("releases", False))
    if launch.get("reentrant"):
        checkpointed(trainer.model.train(), {"use_reentrant": True})
        trainer.model.model.embed_tokens.requires_grad_(False)
    features = plan_features(trainer)
    assert tuple(str(features[f"share_{stage}"]) for stage in ("generation", "scoring", "training")) == expected
    assert features["regroup"].enabled == (expected[2] == "on")
    assert is_sharded(trainer) == (zero == 3 or fsdp is not None)


@pytest.mark.parametrize(("coefficient", "training"), [(None, "off (the load-balancing loss"), (0.0, "on")])
def test_the_load_balancing_loss_of_experts(coefficient, training, make):
    body = dict(build_model("qwen3").config.to_dict(), num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{key: body[key] for key in body if key != "model_type"}))
    features = make(model, router_aux_loss_coef=coefficient).features
    assert str(features["share_training"]).startswith(training)
    assert features["share_scoring"].enabled


@pytest.mark.parametrize(("lora", "attention"), [(0.1, 0.0), (0.0, 0.1), (0.0, 0.0)])
def test_shared_dropout_is_announced(lora, attention, make, caplog):
    """The mode of the model at the start does not matter: TRL trains it in training mode."""
    model = build_model("qwen3")
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = attention
    with caplog.at_level(logging.WARNING):
        make(model, LoraConfig(r=2, lora_dropout=lora, target_modules=["q_proj"]))
    assert ("share the dropout drawn over it" in caplog.text) == bool(lora or attention)


def test_a_static_cache_of_windows_generates_plainly():
    assert why_not_static(build_model("llama").config) is None
    assert "layers with a window" in why_not_static(build_model("gemma3").config)


@pytest.mark.parametrize(("cache", "disabled"), [("static", None), (None, True)])
def test_decoding_is_compiled_where_the_cache_is_static(cache, disabled, make):
    """TRL switches it off."""
    assert make(cache_implementation=cache).generation_config.disable_compile is disabled


@pytest.mark.parametrize(
    ("options", "device", "warns"),
    [
        ({}, "cuda", True),
        ({}, "cpu", False),
        ({"use_vllm": True}, "cuda", False),
        ({"cache_implementation": "static"}, "cuda", False),
    ],
)
def test_slow_generation_is_named(options, device, warns, tmp_path):
    args = DAPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none", **options)
    warning = warn_of_slow_generation(args, device)
    assert (warning is not None) == warns
    assert warning is None or "cache_implementation=static" in warning
