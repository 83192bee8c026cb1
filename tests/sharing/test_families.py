import pytest
import torch
from support.models import compare
from support.models.families import FAMILIES, OTHERS, build, make_batch
from support.old_releases import reads_images

from vgr_trl.sharing import share_prompts

VISION = [name for name, family in FAMILIES.items() if family.picture]
# Layers that share keys, convolutions, chunks, experts, linear attention.
UNUSUAL = ["gemma4", "gemma4_published", "gemma3n", "lfm2_vl", "llama4_text", "qwen3_next", "qwen3_5_moe"]
KNOWN = {**FAMILIES, **OTHERS}

# In float32. The random models of InternVL, Gemma 4 and LFM2 are very sure of themselves (log-probabilities down to
# -38); linear attention always computes in float32, in blocks that begin where a pass begins.
LOGPS = {"internvl": 1e-5, "qwen3_5": 2e-5} | dict.fromkeys(
    ("gemma4", "gemma4_published", "lfm2_vl", "qwen3_next", "qwen3_5_moe"), 2e-5
)
# Gradients of those that do not compute in float64.
SINGLE = {"qwen3_vl_moe": 1e-5, "qwen3_next": 5e-5, "qwen3_5_moe": 5e-5}


def case(name, **more):
    images = (1, 2) if KNOWN[name].picture else (0, 0)
    return compare.with_head(build(KNOWN[name])), make_batch(KNOWN[name], **{"images": images, **more})


def in_double(model, batch):
    """Where a wrong term cannot hide in rounding."""
    batch.inputs = {key: value.double() if value.is_floating_point() else value for key, value in batch.inputs.items()}
    return model.double(), batch


@pytest.mark.parametrize("name", [*FAMILIES, *UNUSUAL])
def test_scores(name):
    more = {"images": (0, 2)} if name in VISION else {}
    for completion_length in (12, None):
        compare.assert_same_scores(*case(name, **more), completion_length, LOGPS.get(name, 4e-6), (2, 6))


@pytest.mark.parametrize(
    ("name", "checkpointing", "length"),
    [
        *((name, True, 12) for name in [*FAMILIES, *UNUSUAL]), ("qwen2_5_vl", False, 12),
        *((name, False, 1) for name in ("qwen2_5_vl", "qwen3_5", "idefics3", "lfm2_vl", "llama4_text")),
        ("gemma4_published", False, 1),
    ],
)  # fmt: skip
def test_gradients(name, checkpointing, length, monkeypatch):
    """Gemma 4 rotates in float32."""
    compare.delta_rule_in_double(monkeypatch)
    model, batch = case(name)
    model, batch = (model, batch) if name in SINGLE else in_double(model, batch)
    most = SINGLE.get(name, 1e-6 if length > 1 else 3e-6)
    batch = batch if length == 12 else compare.shortened(batch, length)
    compare.assert_same_gradients(model.train(), batch, most, checkpointing)


@pytest.mark.parametrize("name", [*FAMILIES, *UNUSUAL, pytest.param("llama4", marks=reads_images)])
def test_sampled_tokens(name):
    more = {"images": (0, 2)} if name in VISION else {}
    tokens = compare.assert_same_tokens(*case(name, **more), sample=True)
    assert name not in FAMILIES or len({tuple(row) for row in tokens.tolist()}) > 2


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "idefics3"])
def test_rows_of_one_prompt(name):
    model, apart = case(name, order=[4, 0, 3, 1, 5])
    compare.assert_same_scores(model, apart, 12, LOGPS.get(name, 4e-6), (2, 5))
    batch = make_batch(name, images=(1,), text=(30,), generations=4)
    pixels = batch.inputs["pixel_values"]
    batch.inputs["pixel_values"] = torch.cat([pixels[: len(pixels) // 2], -pixels[len(pixels) // 2 :]])
    compare.assert_same_scores(model, batch, 12, 4e-6, (2, 4))


def test_only_the_last_outputs_are_wanted():
    """Gemma 4 gives the number of logits to its base model, which would keep that many of each stage."""
    family = OTHERS["gemma4_published"]
    model, batch = build(family), make_batch(family)
    compare.needs_shared(model)
    with torch.no_grad():
        for count in (3, 20):
            plain = model(**batch.inputs, logits_to_keep=count, use_cache=False).logits
            with share_prompts(model) as report:
                shared = model(**batch.inputs, logits_to_keep=count, use_cache=False).logits
            assert not report.plain
            assert plain.shape == shared.shape
            seen = batch.inputs["attention_mask"][:, -count:].bool()
            assert (plain - shared)[seen].abs().max() < 1e-4


@reads_images
def test_embeddings_of_text_and_images_together():
    """Llama 4 gives them to its language model, so that scoring runs plainly; the rows are counted."""
    plain, shared, report = compare.plain_and_shared(*case("llama4"))
    assert (report.prompts, report.rows, report.plain) == (6, 6, {"inputs without input_ids": 1})
    assert torch.equal(plain, shared)
