"""Families whose layers keep something else than their own keys and values: shared and plain passes agree."""

import pytest
import torch
from support.models.compare import (
    assert_same_gradients,
    assert_same_scores,
    assert_same_tokens,
    assert_shared_by,
    plain_and_shared,
    scored,
    shortened,
    with_head,
)
from support.models.families import FAMILIES, TEXT, build, make_batch
from support.models.other_families import OTHERS, gemma4
from support.old_releases import KEEPS_LESS

from vgr_trl.sharing import model_support, share_prompts

# Layers that share keys, convolutions, chunks, experts, linear attention. Gemma 4 and LFM2 are sure of themselves.
NAMES = ["gemma4", "gemma4_published", "gemma3n", "lfm2_vl", "llama4_text", "qwen3_next", "qwen3_5_moe"]
LOGPS = dict.fromkeys(("gemma4", "gemma4_published", "lfm2_vl", "qwen3_next", "qwen3_5_moe"), 2e-5)
# The delta rule of linear attention computes in float32, in blocks that begin where a pass begins.
LINEAR = {"qwen3_next": 5e-5, "qwen3_5_moe": 5e-5, "qwen3_5": 5e-5}


def case(name, **options):
    family = FAMILIES[name] if name in FAMILIES else OTHERS[name]
    return with_head(build(family)), make_batch(family, images=(1, 2) if family.picture else (0, 0), **options)


@pytest.mark.parametrize("name", NAMES)
def test_scores(name):
    for completion_length in (12, None):
        assert_same_scores(*case(name), completion_length, LOGPS.get(name, 4e-6), (2, 6))


@pytest.mark.parametrize("name", [*NAMES, "qwen3_5"])
def test_gradients(name):
    model, batch = case(name)
    model.train()
    if name not in LINEAR:
        model.double()
        batch.inputs = {key: part.double() if part.is_floating_point() else part for key, part in batch.inputs.items()}
    assert_same_gradients(model, batch, LINEAR.get(name, 1e-6), checkpointing=True)


@pytest.mark.parametrize("name", [*NAMES, "llama4"])
def test_sampled_tokens(name):
    assert_same_tokens(*case(name), sample=True)


@pytest.mark.parametrize("name", ["gemma3n", "lfm2_vl", "qwen3_next"])
def test_completions_depend_on_their_prompts(name):
    """Else agreement would show nothing: another last word of the prompt changes every token of the completion."""
    model, batch = case(name)
    with torch.no_grad():
        before, _ = scored(model, batch)
        words = batch.inputs["input_ids"][:, -14]
        batch.inputs["input_ids"][:, -14] = torch.where(words == TEXT, TEXT + 1, TEXT)
        after, _ = scored(model, batch)
    differs = (before - after).abs() > 1e-4
    assert differs[batch.inputs["attention_mask"][:, -12:] == 1].float().mean() > 0.5


@pytest.mark.parametrize("name", ["lfm2_vl", "llama4_text", "gemma4_published"])
def test_completions_of_one_token(name):
    model, batch = case(name)
    plain, shared, report = plain_and_shared(model, shortened(batch, 1), 1)
    assert_shared_by(report, 2, 6, model)
    assert (plain - shared).abs().max() < LOGPS.get(name, 4e-6)


def test_images_that_see_themselves():
    """The tokens of an image see each other in Gemma 4 as published; that is computed with the prompt."""
    family = OTHERS["gemma4_published"]
    batch = make_batch(family)
    model = with_head(build(family))
    with torch.no_grad():
        two_way, _ = scored(model, batch)
        model.config.text_config.use_bidirectional_attention = None
        one_way, _ = scored(model, batch)
    assert (two_way - one_way).abs().max() > 1e-2


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


def test_attention_over_all_text_is_refused():
    family = OTHERS["gemma4"]
    model, batch = gemma4(use_bidirectional_attention="all").eval(), make_batch(family)
    with torch.no_grad(), share_prompts(model) as report:
        model(**batch.inputs)
    assert report.plain == {"bidirectional attention over text": 1}


def test_embeddings_of_text_and_images_together():
    """Llama 4 gives them to its language model, so that scoring runs plainly; the rows are counted."""
    plain, shared, report = plain_and_shared(*case("llama4"))
    assert (report.prompts, report.rows, report.plain) == (6, 6, {"inputs without input_ids": 1})
    assert torch.equal(plain, shared)


@pytest.mark.parametrize(
    ("families", "reason"),
    [
        ("_KEY_SHARING_FAMILIES", "layers that take their keys and values from another"),
        ("_IMAGES_SEE_THEMSELVES", "bidirectional attention over text"),
    ],
)
def test_what_only_a_known_family_may_do(families, reason, monkeypatch):
    if KEEPS_LESS and families == "_KEY_SHARING_FAMILIES":
        pytest.skip("the layers of a cache are those that keep keys")
    monkeypatch.setattr(model_support, families, set())
    model, batch = case("gemma4_published")
    with torch.no_grad(), share_prompts(model, 12) as report:
        scored(model, batch)
    assert report.plain == {reason: 1}
