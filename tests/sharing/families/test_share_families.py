"""Every family, in every place: shared and plain passes agree."""

import pytest
import torch
from support.models.compare import (
    assert_same_gradients,
    assert_same_scores,
    assert_same_tokens,
    delta_rule_in_double,
    generated,
    gradients,
    largest_relative,
    needs_shared,
    scored,
    shortened,
    with_head,
)
from support.models.families import FAMILIES, build, make_batch

from vgr_trl.sharing import share_prompts

# In float32. InternVL's random model is very sure of itself (log-probabilities down to -38); the linear attention of
# Qwen3.5 always computes in float32, in blocks that begin where a pass begins.
LOGPS = {"internvl": 1e-5, "qwen3_5": 2e-5}
VISION = [name for name, family in FAMILIES.items() if family.picture]


@pytest.fixture
def precise(monkeypatch):
    """A way to put a model and its batch into float64, where a wrong term cannot hide in rounding."""
    delta_rule_in_double(monkeypatch)
    return in_double


def in_double(model, batch):
    batch.inputs = {
        name: value.double() if value.is_floating_point() else value for name, value in batch.inputs.items()
    }
    return model.double(), batch


@pytest.mark.parametrize("name", FAMILIES)
def test_scores(name):
    """With the length of completions given, and found."""
    model, batch = with_head(build(name)), make_batch(name)
    for completion_length in (12, None):
        assert_same_scores(model, batch, completion_length, LOGPS.get(name, 4e-6), (2, 6))


@pytest.mark.parametrize(("name", "checkpointing"), [*((name, True) for name in FAMILIES), ("qwen2_5_vl", False)])
def test_gradients(name, checkpointing, precise):
    model, batch = with_head(build(name)).train(), make_batch(name)
    if name != "qwen3_vl_moe":  # whose grouped matrix product has no float64
        model, batch = precise(model, batch)
    assert_same_gradients(model, batch, 1e-5 if name == "qwen3_vl_moe" else 1e-6, checkpointing)


@pytest.mark.parametrize("name", FAMILIES)
def test_sampled_tokens(name):
    tokens = assert_same_tokens(build(name), make_batch(name), sample=True)
    assert len({tuple(row) for row in tokens.tolist()}) > 2


@pytest.mark.parametrize("name", VISION)
def test_several_images_and_none(name):
    model, batch = with_head(build(name)), make_batch(name, images=(0, 2))
    assert_same_scores(model, batch, batch.completion_length, LOGPS.get(name, 4e-6), (2, 6))
    assert_same_tokens(model, batch, sample=True)


@pytest.mark.parametrize("name", ["qwen2_5_vl", "idefics3", "gemma3"])
def test_no_image_in_the_batch(name):
    """After a batch with images, whose positions must not be taken over."""
    model = with_head(build(name))
    needs_shared(model)
    with torch.no_grad():
        scored(model, make_batch(name))
        batch = make_batch(name, images=(0, 0))
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


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_5", "idefics3", "gemma3_text"])
def test_completions_of_one_token(name, precise):
    model, batch = precise(with_head(build(name)).train(), shortened(make_batch(name), 1))
    needs_shared(model)
    plain = gradients(model, batch)
    with share_prompts(model, 1) as report:
        shared = gradients(model, batch)
    assert not report.plain
    assert largest_relative(plain, shared) < 1e-6


@pytest.mark.parametrize("name", ["qwen2_vl", "idefics3", "internvl"])
def test_rows_of_a_prompt_that_do_not_stand_together(name):
    batch = make_batch(name, order=[4, 0, 3, 1, 5])
    assert_same_scores(with_head(build(name)), batch, batch.completion_length, LOGPS.get(name, 4e-6), (2, 5))


@pytest.mark.parametrize("name", ["qwen2_5_vl", "llava", "idefics3"])
def test_equal_words_about_other_images_are_other_prompts(name):
    model, batch = with_head(build(name)), make_batch(name, images=(1,), text=(30,), generations=4)
    pixels = batch.inputs["pixel_values"]
    batch.inputs["pixel_values"] = torch.cat([pixels[: len(pixels) // 2], -pixels[len(pixels) // 2 :]])
    assert_same_scores(model, batch, batch.completion_length, 4e-6, (2, 4))
