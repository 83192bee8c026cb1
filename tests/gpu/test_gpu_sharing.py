from functools import partial

import pytest
import torch
from gpu import flash
from peft import LoraConfig, get_peft_model
from places import DTYPES, attention, on_both, to
from support.models.compare import checkpointed, generated, gradients, scored, with_head
from support.models.families import build, make_batch
from transformers import modeling_flash_attention_utils

from vgr_trl.sharing import share_prompts
from vgr_trl.sharing.model_support import causal_model

VISION = ["qwen2_5_vl", "qwen3_vl", "gemma3", "internvl", "llava_next"]
ATTENTION = ["flash", "efficient", "math", "eager", "flash_attention_2", "flash_attention_3", "flex_attention"]
FACTOR = 1.5  # a shared pass in bfloat16 may be this much farther from float32 than the plain one
LOGPS, GRADIENTS = 2e-5, 2e-4  # in float32, from additions in another order; InternVL's random model is very sure


def scores(model, batch):
    with torch.no_grad():
        return scored(model, batch)[0].double().cpu()


def all_gradients(model, batch):
    return torch.cat([one.double().flatten().cpu() for one in gradients(model, batch).values()])


def plain_and_shared(function, model, batch, **options):
    plain = function(model, batch)
    with share_prompts(model, **{"completion_length": batch.completion_length, **options}) as report:
        shared = function(model, batch)
    assert (report.prompts, report.rows, dict(report.plain)) == (2, 6, {})
    return plain, shared


def distance(some, other):
    return float((some - other).norm() / other.norm())


def exact(function, family):
    return function(with_head(build(family)), make_batch(family))


@pytest.mark.parametrize("function", [scores, all_gradients], ids=["logps", "gradients"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", VISION)
@pytest.mark.parametrize("place", on_both(*ATTENTION, cpu=["math"]))
def test_agrees(place, family, dtype, function, measured):
    device, kind = place
    if kind.startswith("flash_attention") and dtype == "float32":
        pytest.skip("flash attention has no float32")
    if kind == "flex_attention" and function is all_gradients and device == "cpu":
        pytest.skip("FlexAttention has no backward pass on a CPU")
    reference = exact(function, family)
    model = with_head(build(family).to(device, DTYPES[dtype]))
    try:
        with attention(model, kind):
            plain, shared = plain_and_shared(function, model, to(make_batch(family), device, DTYPES[dtype]))
    except RuntimeError as error:
        if "NoValidChoicesError" in str(error):
            pytest.skip("torch compiles no FlexAttention for these shapes")
        raise
    measured |= {"plain": distance(plain, reference), "shared": distance(shared, reference)}
    measured["apart"] = float((plain - shared).abs().max())
    assert reference.abs().sum() > 0
    if dtype == "bfloat16":
        assert measured["shared"] < FACTOR * measured["plain"] + 1e-4
    elif function is scores:
        assert measured["apart"] < LOGPS
    else:
        assert distance(shared, plain) < GRADIENTS


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3"])
@pytest.mark.parametrize("place", on_both("flash", "efficient", cpu=["math"]))
def test_prompts_without_padding(place, family, measured):
    device, kind = place
    dtype, even = torch.float32 if device == "cpu" else torch.bfloat16, {"text": (33, 33)}
    reference = all_gradients(with_head(build(family)), make_batch(family, **even))
    model = with_head(build(family).to(device, dtype))
    with attention(model, kind):
        plain, shared = plain_and_shared(all_gradients, model, to(make_batch(family, **even), device, dtype))
    measured |= {"plain": distance(plain, reference), "shared": distance(shared, reference)}
    assert measured["shared"] < FACTOR * measured["plain"] + 1e-4


@pytest.mark.parametrize("adapters", [False, True], ids=["all weights", "lora"])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3"])
@pytest.mark.parametrize("place", on_both("flash", "flex_attention", cpu=["math"]))
def test_checkpointing(place, family, adapters, measured):
    device, kind = place
    torch.manual_seed(2)
    model = with_head(build(family))
    if adapters:
        options = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        model = get_peft_model(model, options)
    model, batch = model.to(device).train(), to(make_batch(family), device, torch.float32)
    with attention(causal_model(model), kind):
        plain = all_gradients(model, batch)
        checkpointed(causal_model(model), {"use_reentrant": False})
        with share_prompts(model, batch.completion_length) as report:
            shared = all_gradients(model, batch)
    measured["apart"] = distance(shared, plain)
    assert not report.plain
    assert measured["apart"] < GRADIENTS


@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("family", VISION)
@pytest.mark.parametrize("place", on_both("flash", "math", cpu=["math"]))
def test_tokens(place, family, sample):
    device, kind = place
    model, batch = build(family).to(device), to(make_batch(family), device, torch.float32)
    with attention(model, kind):
        plain, shared = plain_and_shared(partial(generated, sample=sample), model, batch, completion_length=None)
    assert torch.equal(plain, shared)


@pytest.mark.gpu
def test_packed(monkeypatch, measured):
    """Gradients by one row without padding, in flash attention, are as near to float32 as those of plain passes."""
    for name in ("_lazy_imports", "_loaded_implementation"):
        monkeypatch.setattr(modeling_flash_attention_utils, name, getattr(modeling_flash_attention_utils, name))
    reference = exact(all_gradients, "qwen2_5_vl")
    model = with_head(build("qwen2_5_vl").to("cuda", torch.bfloat16))
    batch = to(make_batch("qwen2_5_vl"), "cuda", torch.bfloat16)
    measured["plain"] = distance(all_gradients(model, batch), reference)
    flash.install()
    flash.attend_with(model, "flash_attention_2")
    with share_prompts(model, batch.completion_length) as report:
        measured["packed"] = distance(all_gradients(model, batch), reference)
    assert not report.plain
    assert measured["packed"] < FACTOR * measured["plain"] + 1e-4
