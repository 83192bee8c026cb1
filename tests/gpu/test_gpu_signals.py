"""Attention against eager matrices, dependence on the image, and one step with everything switched on."""

import copy

import pytest
import torch
from datasets import Dataset, Features, List, Value
from datasets import Image as ImageFeature
from peft import LoraConfig
from places import DTYPES, attention, on_both, to
from sharing_models import MODEL_SHAPES, Size, build_model, make_processor, make_question
from stage_passes import LORA, uneven_reward
from support.models.eager_reference import difference, masks_of, reference
from support.models.families import build, make_batch
from support.trainers import config
from test_gpu_sharing import VISION

from vgr_trl.demo.tiny_model import SPECIAL_TOKENS
from vgr_trl.rewards import vgr_reward
from vgr_trl.sharing import share_prompts
from vgr_trl.signals import AttentionProbe
from vgr_trl.trainer import DAPOTrainer

ATTENTION = ["flash", "efficient", "math", "flash_attention_2", "flash_attention_3"]


@pytest.mark.parametrize("shared", [False, True], ids=["plain", "shared"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", VISION)
@pytest.mark.parametrize("place", on_both(*ATTENTION, cpu=["math"]))
def test_probe(place, family, dtype, shared, measured):
    """Against the matrices of eager attention in float32 on a CPU; bfloat16 has 8 bits for a mass of at most 1."""
    device, kind = place
    if kind.startswith("flash_attention") and dtype == "float32":
        pytest.skip("flash attention has no float32")
    model, batch = build(family), make_batch(family)
    expected = reference(model, batch)
    model, batch = model.to(device, DTYPES[dtype]), to(batch, device, DTYPES[dtype])
    masks, length = masks_of(batch), batch.completion_length
    rows = slice(masks.vision.size(1) - 1, masks.vision.size(1) - 1 + length)
    with torch.no_grad(), attention(model, kind), AttentionProbe(model, masks, rows=rows) as probe:
        if shared:
            with share_prompts(model, length) as report:
                model(**batch.inputs)
            assert not report.plain
        else:
            model(**batch.inputs)
    for name in ("vision", "instruction"):
        found, exact = getattr(probe.mass, name).cpu(), getattr(expected, name)
        measured[name] = difference(found, exact, expected.valid)
        assert measured[name] < (0.1 if dtype == "bfloat16" else 2e-5)
    assert float(expected.vision.max()) > 0.05


@pytest.mark.parametrize("adapters", [False, True], ids=["all weights", "lora"])
@pytest.mark.parametrize("place", on_both("flash", cpu=["math"]))
def test_a_step_with_everything_on(place, adapters, tmp_path, measured):
    """Signals, credit, perception, replay and checkpointing in one step of the trainer; bfloat16 on a GPU."""
    device, kind = place
    shape, processor = MODEL_SHAPES["tiny-qwen2.5-vl"], make_processor()
    model = build_model(shape, processor.tokenizer, device=device, dtype="float32", attention="sdpa")
    before = {name: one.detach().clone() for name, one in model.named_parameters()}
    special = processor.tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS))
    everything = {
        "token_weights": True, "compute_attention_metrics": True, "enable_perception_filtering": True,
        "enable_trajectory_reweighting": True, "enable_entropy_filtering": True, "use_entropy_penalty": True,
        "perception_loss_weight": 0.01, "replay_buffer_size": 8, "dynamic_sampling": "resample",
        "attention_reward_scale": "none",
        "gradient_checkpointing": True, "bf16": device != "cpu", "use_cpu": device == "cpu",
        "beta": 0.01 if adapters else 0.0,  # a second model would be looked for on a disk
    }  # fmt: skip
    more = {"max_completion_length": 16, "max_steps": 1, "learning_rate": 0.1, "optim": "sgd", "max_grad_norm": 1e9}
    few = {"min_new_tokens": 8, "suppress_tokens": special}
    options = config(tmp_path, **everything, **more, generation_kwargs=few, log_completions=False)
    features = Features({"prompt": List({"role": Value("string"), "content": Value("string")})})
    features["image"] = ImageFeature()
    trainer = DAPOTrainer(
        model=copy.deepcopy(model) if adapters else model,
        reward_funcs=[uneven_reward, vgr_reward],
        args=options,
        train_dataset=Dataset.from_list([make_question(Size(48, 16, 16, 4), processor)] * 8, features=features),
        processing_class=processor,
        peft_config=LoraConfig(r=4, target_modules=LORA) if adapters else None,
    )
    with attention(model, kind):
        trainer.train()
    loss = trainer.state.log_history[-1]["train_loss"]
    measured["loss"] = loss
    assert torch.isfinite(torch.tensor(loss))
    trained = {name: one for name, one in trainer.model.named_parameters() if one.requires_grad}
    assert all(torch.isfinite(one).all() for one in trained.values())
    if adapters:
        assert any("lora_B" in name and bool(one.abs().sum() > 0) for name, one in trained.items())
    else:
        assert any(not torch.equal(one, before[name].to(one.device)) for name, one in trained.items())
