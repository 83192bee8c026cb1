"""Where image features are computed once, and the reasons given elsewhere."""

from types import SimpleNamespace

import pytest
from peft import LoraConfig, get_peft_model
from support.models.families import build, with_frozen_tower

from vgr_trl.validate import plan_vision

ZERO3 = {"is_deepspeed_enabled": True, "deepspeed_plugin": SimpleNamespace(zero_stage=3)}
ZERO2 = {"is_deepspeed_enabled": True, "deepspeed_plugin": SimpleNamespace(zero_stage=2)}
ONCE = "image features once per rollout"
TRAINS = "image features in every pass (the vision tower trains)"


def plan(model, *, backend="NO", megabytes=64, images=True, fsdp=False, **distributed):
    args = SimpleNamespace(
        vision_cache_megabytes=megabytes,
        deepspeed_plugin=distributed.get("deepspeed_plugin"),
    )
    trainer = SimpleNamespace(
        args=args,
        model=model,
        accelerator=SimpleNamespace(
            state=SimpleNamespace(dynamo_plugin=SimpleNamespace(backend=SimpleNamespace(value=backend)))
        ),
        is_fsdp_enabled=fsdp,
        is_deepspeed_enabled=distributed.get("is_deepspeed_enabled", False),
    )
    return str(plan_vision(trainer, images))


@pytest.fixture(scope="module")
def adapted():
    return get_peft_model(build("qwen2_5_vl"), LoraConfig(target_modules=["q_proj"]))


def test_adapters_elsewhere_leave_the_tower_without_gradients(adapted):
    assert plan(adapted) == f"vision_cache_megabytes=64: {ONCE}"
    assert plan(adapted, **ZERO2) == f"vision_cache_megabytes=64: {ONCE}"


@pytest.mark.parametrize("target", ["qkv", r".*merger\.mlp\.0"])
def test_adapters_in_tower_or_merger_train_it(target):
    model = get_peft_model(build("qwen2_5_vl"), LoraConfig(target_modules=target if "." in target else [target]))
    assert TRAINS in plan(model)


def test_a_newline_that_trains_is_part_of_the_tower():
    model = build("llava_next")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("image_newline" in name)
    assert TRAINS in plan(model)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"megabytes": 0}, "switched off"),
        ({"images": False}, "data without images"),
        ({"backend": "INDUCTOR"}, "torch.compile"),
        ({"fsdp": True}, "sharded parameters: every process has to call the vision tower equally often"),
        (ZERO3, "sharded parameters: every process has to call the vision tower equally often"),
    ],
)
def test_reasons(adapted, changed, reason):
    assert plan(adapted, **changed).endswith(f"image features in every pass ({reason})")


def test_frozen_adapters_in_the_tower_are_a_reason():
    """The reference is the model without them, or with others."""
    model = get_peft_model(build("qwen2_5_vl"), LoraConfig(target_modules=["qkv", "q_proj"]))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("q_proj.lora" in name)
    assert plan(model).endswith("(adapters in the vision tower, which the reference may leave out)")


def test_dropout_in_the_tower_is_a_reason(adapted):
    model = with_frozen_tower(build("gemma3"))
    model.model.vision_tower.config.attention_dropout = 0.1
    for module in model.model.vision_tower.modules():
        if hasattr(module, "dropout"):
            module.dropout = 0.1
    assert plan(model).endswith("(dropout in the vision tower)")
    in_language = get_peft_model(build("qwen2_5_vl"), LoraConfig(target_modules=["q_proj"], lora_dropout=0.1))
    assert ONCE in plan(in_language)
