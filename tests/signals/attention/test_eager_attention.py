"""The probe against eager attention: every family, every way a batch passes through a model."""

import math

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.models.compare import checkpointed, loss_of, needs_shared, shortened, why_plain, with_head
from support.models.eager_reference import (
    SPECIAL_IDS,
    TOLERANCE,
    VISION,
    VISION_IDS,
    assert_agrees,
    assert_prompt_agrees,
    difference,
    masks_of,
    reference,
    run,
)
from support.models.families import Family, build, make_batch, text_model
from torch.utils._python_dispatch import TorchDispatchMode

from vgr_trl.sharing import share_prompts
from vgr_trl.signals import AttentionProbe, build_modality_masks
from vgr_trl.signals.attention import count_attention_layers

IMAGES = {"one each": (1, 1), "several": (2, 1), "none in some rows": (0, 2)}


@pytest.mark.parametrize("images", IMAGES.values(), ids=IMAGES)
@pytest.mark.parametrize("name", VISION)
def test_every_family(name, images):
    """Prompts of unequal length, padded on the left; completions on the right."""
    model, batch = build(name), make_batch(name, images=images)
    needs_shared(model)
    expected = reference(model, batch)
    assert expected.vision[:, :, 0].max() > 0.05
    with torch.no_grad():
        plain = model(**batch.inputs).logits
        for implementation in ("sdpa", "eager"):
            model.set_attn_implementation(implementation)
            assert_agrees(run(model, batch), expected)
        model.set_attn_implementation("sdpa")
        with AttentionProbe(model, masks_of(batch)) as probe, share_prompts(model, batch.completion_length) as report:
            shared = model(**batch.inputs).logits
        with AttentionProbe(model, masks_of(batch)):
            probed = model(**batch.inputs).logits
        with share_prompts(model, batch.completion_length):
            shared_only = model(**batch.inputs).logits
    assert report.prompts_per_row == 1 / 3
    assert_agrees(probe, expected)
    assert count_attention_layers(model) == len(probe.mass.vision)
    assert torch.equal(probed, plain), "to the last bit"
    assert torch.equal(shared, shared_only)


@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3", "llava", "idefics3"])
def test_sequences_padded_on_the_right(name):
    """Masks of whole sequences: all their queries are measured."""
    model, batch = build(name), make_batch(name)
    mask = batch.inputs["attention_mask"]
    order = mask.argsort(dim=1, descending=True, stable=True)
    batch.inputs = {
        key: value.gather(1, order) if value.shape == mask.shape else value for key, value in batch.inputs.items()
    }
    masks = build_modality_masks(
        batch.inputs["input_ids"],
        batch.inputs["attention_mask"],
        vision_token_ids=VISION_IDS,
        special_token_ids=SPECIAL_IDS,
    )
    weights = reference(model, batch).weights
    with torch.no_grad(), AttentionProbe(model, masks) as probe:
        model(**batch.inputs)
    valid = batch.inputs["attention_mask"].bool()
    assert probe.mass.vision.shape == (2, *mask.shape)
    assert difference(probe.mass.vision, (weights * masks.vision[:, None]).sum(-1), valid) < TOLERANCE
    assert difference(probe.mass.instruction, (weights * masks.instruction[:, None]).sum(-1), valid) < TOLERANCE


KINDS = {
    "windows": text_model("Mistral", sliding_window=8),
    "some layers with windows": text_model(
        "Gemma2", sliding_window=8, layer_types=["sliding_attention", "full_attention"], attn_logit_softcapping=None
    ),
    "sinks": text_model("GptOss", sliding_window=8, num_local_experts=2, num_experts_per_tok=1),
    "no grouped keys": text_model("Qwen2", num_key_value_heads=2),
    "softcapping": text_model("Gemma2", sliding_window=512, attn_logit_softcapping=2.0),
}


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_attention(kind):
    """In text models, with words in the place of image tokens."""
    family = Family(kind, KINDS[kind])
    model, batch = build(family), make_batch(family)
    prompt = batch.inputs["input_ids"].size(1) - batch.completion_length
    batch.inputs["input_ids"][:, prompt - 6 : prompt - 2] = VISION_IDS[0]
    if kind in ("sinks", "softcapping"):
        model.set_attn_implementation("eager")
    expected = reference(model, batch)
    if kind == "windows":  # 8 keys wide: the last queries see nothing of the prompt
        assert expected.vision[:, 0, -1].max() == 0 < expected.vision[:, 0, 0].min()
    assert_agrees(run(model, batch), expected)
    with torch.no_grad(), AttentionProbe(model, masks_of(batch)) as probe, share_prompts(model, 12) as report:
        model(**batch.inputs)
    assert not report.plain
    assert_agrees(probe, expected)


@pytest.mark.parametrize("completions", [1, 2])
def test_short_completions(completions):
    model, batch = build("qwen2_5_vl"), shortened(make_batch("qwen2_5_vl"), completions)
    expected = reference(model, batch)
    assert_agrees(run(model, batch), expected)
    with torch.no_grad(), AttentionProbe(model, expected.masks) as probe, share_prompts(model, completions):
        model(**batch.inputs)
    assert_agrees(probe, expected)


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("reentrant", [None, False, True], ids=["", "checkpointing", "reentrant"])
def test_training_passes(reentrant, shares):
    """Recomputation in the backward pass comes through the same layers again, and changes nothing."""
    model, batch = build("qwen2_5_vl"), make_batch("qwen2_5_vl")
    expected = reference(model, batch)
    with_head(model).train()
    if reentrant is not None:
        checkpointed(model, {"use_reentrant": reentrant})
        model.enable_input_require_grads()
    with AttentionProbe(model, expected.masks, measure_prompt=True) as probe:
        if shares:
            with share_prompts(model, 12) as report:
                loss_of(model, batch).backward()
            assert bool(report.plain) == (reentrant is True or why_plain(model, reentrant is False) is not None)
        else:
            loss_of(model, batch).backward()
    assert_agrees(probe, expected)
    assert_prompt_agrees(probe, expected)
    assert not probe.mass.vision.requires_grad


def test_adapters():
    """The probe sees the model with its LoRA, wrapped or not."""
    model, batch = build("qwen2_5_vl"), make_batch("qwen2_5_vl")
    without = reference(model, batch)
    lora = LoraConfig(r=4, target_modules=["q_proj", "k_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    wrapped = get_peft_model(model, lora)
    expected = reference(wrapped.base_model.model, batch)
    assert difference(expected.vision, without.vision, expected.valid) > 1e-2
    assert_agrees(run(wrapped, batch), expected)
    with torch.no_grad(), wrapped.disable_adapter():
        assert_agrees(run(wrapped, batch), without)


def test_wrapped_by_data_parallel():
    class Wrapper(torch.nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, **inputs):
            return self.module(**inputs)

    model, batch = build("qwen2_5_vl"), make_batch("qwen2_5_vl")
    assert_agrees(run(Wrapper(model), batch), reference(model, batch))


def test_bf16():
    """Mass is as far from float32 as the attention itself: three digits."""
    model, batch = build("qwen2_5_vl"), make_batch("qwen2_5_vl")
    expected = reference(model, batch)
    batch.inputs["pixel_values"] = batch.inputs["pixel_values"].bfloat16()
    assert_agrees(run(model.bfloat16(), batch), expected, tolerance=0.03)
    assert_agrees(run(model, batch), reference(model, batch), tolerance=0.01)


def test_no_matrix_of_queries_and_keys():
    """Nothing of floats is (..., T, K) or (..., S, K), while the probe is active."""

    class Shapes(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.seen = set()

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, tuple | list) else [result]:
                if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and tensor.ndim > 2:
                    self.seen.add(tuple(tensor.shape))
            return result

    batch = make_batch("qwen2_5_vl", completion_length=13)
    length = batch.inputs["input_ids"].size(1)

    def matrices(implementation):
        model = build("qwen2_5_vl")
        model.set_attn_implementation(implementation)
        with Shapes() as shapes:
            run(model, batch, measure_prompt=True)
        wide = {shape for shape in shapes.seen if shape[-2] in (12, 13, length) and shape[-1] in (length - 1, length)}
        return {shape for shape in wide if math.prod(shape[:-2]) > 6}  # masks are (6, 1, S, S)

    assert not matrices("sdpa")
    assert matrices("eager"), "the test sees them where they are"
