"""Every family, in every place: shared and plain passes agree."""

import pytest
import torch
from support.models.compare import (
    assert_same_gradients,
    assert_same_scores,
    assert_same_tokens,
    delta_rule_in_double,
    generated,
    plain_and_shared,
    scored,
    shortened,
    with_head,
)  # fmt: skip
from support.models.families import FAMILIES, build, make_batch
from support.models.other_families import OTHERS
from support.old_releases import KEEPS_LESS

from vgr_trl.sharing import model_support, share_prompts

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
    images = (1, 2) if name in OTHERS and OTHERS[name].picture else (1, 1) if KNOWN[name].picture else (0, 0)
    return with_head(build(KNOWN[name])), make_batch(KNOWN[name], **{"images": images, **more})


def in_double(model, batch):
    """Where a wrong term cannot hide in rounding."""
    batch.inputs = {key: value.double() if value.is_floating_point() else value for key, value in batch.inputs.items()}
    return model.double(), batch


@pytest.mark.parametrize("name", [*FAMILIES, *UNUSUAL])
def test_scores(name):
    """With the length of completions given, and found."""
    for completion_length in (12, None):
        assert_same_scores(*case(name), completion_length, LOGPS.get(name, 4e-6), (2, 6))


@pytest.mark.parametrize(
    ("name", "checkpointing"), [*((name, True) for name in [*FAMILIES, *UNUSUAL]), ("qwen2_5_vl", False)]
)
def test_gradients(name, checkpointing, monkeypatch):
    delta_rule_in_double(monkeypatch)
    model, batch = case(name)
    model, batch = (model, batch) if name in SINGLE else in_double(model, batch)
    assert_same_gradients(model.train(), batch, SINGLE.get(name, 1e-6), checkpointing)


@pytest.mark.parametrize("name", [*FAMILIES, *UNUSUAL, "llama4"])
def test_sampled_tokens(name):
    tokens = assert_same_tokens(*case(name), sample=True)
    assert name not in FAMILIES or len({tuple(row) for row in tokens.tolist()}) > 2


@pytest.mark.parametrize("name", VISION)
def test_several_images_and_none(name):
    model, batch = case(name, images=(0, 2))
    assert_same_scores(model, batch, 12, LOGPS.get(name, 4e-6), (2, 6))
    assert_same_tokens(model, batch, sample=True)


@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3"])
def test_no_image_in_the_batch(name):
    """After a batch with images, whose positions must not be taken over."""
    model = with_head(build(name))
    batch = make_batch(name, images=(0, 0))
    with torch.no_grad():
        scored(model, make_batch(name))
        logps, _ = scored(model, batch)
        tokens = generated(model, batch, sample=True)
        with share_prompts(model, batch.completion_length) as report:
            scored(model, make_batch(name))
            shared_logps, _ = scored(model, batch)
            scored(model, make_batch(name))
            shared_tokens = generated(model, batch, sample=True)
    assert report.prompts_per_row == 1 / 3
    assert (logps - shared_logps).abs().max() < LOGPS.get(name, 4e-6)
    assert torch.equal(tokens, shared_tokens)


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_5", "idefics3", "lfm2_vl", "llama4_text", "gemma4_published"])
def test_completions_of_one_token(name, monkeypatch):
    delta_rule_in_double(monkeypatch)
    model, batch = in_double(*case(name))
    assert_same_gradients(model.train(), shortened(batch, 1), 3e-6)  # Gemma 4 rotates in float32


@pytest.mark.parametrize("name", ["qwen2_vl", "idefics3"])
def test_rows_of_a_prompt_that_do_not_stand_together(name):
    batch = make_batch(name, order=[4, 0, 3, 1, 5])
    assert_same_scores(with_head(build(name)), batch, batch.completion_length, LOGPS.get(name, 4e-6), (2, 5))


@pytest.mark.parametrize("name", ["qwen2_5_vl", "idefics3"])
def test_equal_words_about_other_images_are_other_prompts(name):
    model, batch = with_head(build(name)), make_batch(name, images=(1,), text=(30,), generations=4)
    pixels = batch.inputs["pixel_values"]
    batch.inputs["pixel_values"] = torch.cat([pixels[: len(pixels) // 2], -pixels[len(pixels) // 2 :]])
    assert_same_scores(model, batch, batch.completion_length, 4e-6, (2, 4))


def test_only_the_last_outputs_are_wanted():
    """Gemma 4 gives the number of logits to its base model, which would keep that many of each stage."""
    family = OTHERS["gemma4_published"]
    model, batch = build(family), make_batch(family)
    with torch.no_grad():
        for count in (3, 20):
            plain = model(**batch.inputs, logits_to_keep=count).logits
            with share_prompts(model) as report:
                shared = model(**batch.inputs, logits_to_keep=count).logits
            assert not report.plain
            assert plain.shape == shared.shape
            assert (plain - shared).abs().max() < 1e-4


def test_embeddings_of_text_and_images_together():
    """Llama 4 gives them to its language model, so that scoring runs plainly; the rows are counted."""
    plain, shared, report = plain_and_shared(*case("llama4"))
    assert (report.prompts, report.rows, report.plain) == (6, 6, {"inputs without input_ids": 1})
    assert torch.equal(plain, shared)


@pytest.mark.skipif(KEEPS_LESS, reason="the layers of a cache are those that keep keys")
def test_layers_that_share_keys_in_an_unknown_family(monkeypatch):
    monkeypatch.setattr(model_support, "_KEY_SHARING_FAMILIES", set())
    _, _, report = plain_and_shared(*case("gemma4_published"))
    assert report.plain == {"layers that take their keys and values from another": 1}
