"""The probe where prompts see themselves whole, as PaliGemma's, or images do."""

import pytest
import torch
from support.models.eager_reference import assert_agrees, assert_prompt_agrees, reference, run
from support.models.families import build, make_batch


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_attention_on_what_comes_later(paligemma, implementation):
    """Instruction tokens in front of the image pay it attention here."""
    model, batch = paligemma
    expected = reference(model, batch)
    masks = expected.masks
    first_image = masks.vision.int().argmax(1)  # (N,)
    before = masks.instruction & (torch.arange(masks.vision.size(1)) < first_image.unsqueeze(1))  # (N, P)
    prompt = masks.vision.size(1)
    on_image = (expected.weights[:, :, :prompt, :prompt] * masks.vision[:, None]).sum(-1)  # (L, N, P)
    assert on_image[:, before].max() > 0.05
    model.set_attn_implementation(implementation)
    probe = run(model, batch, measure_prompt=True, keep_rows=(2,))
    assert_agrees(probe, expected)
    assert_prompt_agrees(probe, expected)


@pytest.mark.parametrize("name", ["paligemma", "gemma3"])
def test_queries_in_the_middle_of_the_prompt(paligemma, name):
    """The keys behind the last query of interest are measured too; in Gemma 3 an image sees itself whole."""
    model, batch = paligemma if name == "paligemma" else (build(name), make_batch(name))
    expected = reference(model, batch)
    first_image = int(expected.masks.vision[0].int().argmax())
    rows = [first_image + 1, first_image, first_image - 3]
    probe = run(model, batch, rows=rows)
    weights = expected.weights[:, :, rows, : expected.masks.vision.size(1)]
    assert (weights[:, 0, 0, first_image + 2 :]).max() > 0.01
    for found, mask in (
        (probe.mass.vision, expected.masks.vision),
        (probe.mass.instruction, expected.masks.instruction),
    ):
        assert torch.allclose(found, (weights * mask[:, None]).sum(-1), atol=1e-5)
