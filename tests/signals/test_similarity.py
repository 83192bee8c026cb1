"""Similarity of hidden states to the image: by hand, and against the states that a model returns."""

from contextlib import nullcontext

import pytest
import torch
from support.models.eager_reference import masks_of
from support.models.families import build, make_batch

from vgr_trl.sharing import share_prompts
from vgr_trl.signals.probe import SimilarityProbe, cosine_similarity


@pytest.mark.parametrize(
    ("over", "expected"), [("max", [1.0, 0.8]), ("mean", [0.5, 0.7]), ("centre", [0.8**0.5, 0.8**0.5])]
)
def test_two_tokens_and_two_image_tokens_by_hand(over, expected):
    """(1, 0) and (3, 4) have cosines 1, 0 and 3/5, 4/5 to (2, 0) and (0, 1), and 2/√5 each to their mean (1, ½).

    Where the first token sees the first image token alone, the second both and a third none, its cosine is 1.
    """
    emitting, image = torch.tensor([[1.0, 0.0], [3.0, 4.0], [1.0, 0.0]]), torch.tensor([[2.0, 0.0], [0.0, 1.0]])
    assert cosine_similarity(emitting[:2], image, over).tolist() == pytest.approx(expected)
    assert cosine_similarity(emitting, image[:0], over).isnan().all()
    found = cosine_similarity(emitting, image, over, torch.tensor([1, 2, 0]))
    assert found.tolist() == pytest.approx([1.0, expected[1], torch.nan], nan_ok=True)


def expected_similarity(model, batch, layer):
    """(N, T), the largest cosine, from the states that the model returns."""
    with torch.no_grad():
        states = model(**batch.inputs, output_hidden_states=True).hidden_states[layer]
    vision = masks_of(batch).vision
    rows = []
    for row, seen in zip(states, vision, strict=True):
        image = row[: len(seen)][seen]
        cosines = torch.cosine_similarity(row[len(seen) - 1 : -1, None], image[None], dim=-1)  # (T, V)
        rows.append(cosines.amax(1) if len(image) else torch.full((len(row) - len(seen),), torch.nan))
    return torch.stack(rows)


@pytest.mark.parametrize("layer", [-1, 0, 1])
@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3"])
def test_against_the_states_that_the_model_returns(name, layer):
    model, batch = build(name), make_batch(name)
    expected = expected_similarity(model, batch, layer)
    vision = masks_of(batch).vision
    valid = batch.inputs["attention_mask"][:, vision.size(1) :].bool()
    for shared in (False, True):
        sharing = share_prompts(model, batch.completion_length) if shared else nullcontext()
        with torch.no_grad(), SimilarityProbe(model, vision, layer) as probe, sharing as report:
            model(**batch.inputs)
        assert torch.allclose(probe.similarity[valid], expected[valid], atol=1e-5, equal_nan=True), shared
    assert not report.plain, "prompts were shared"
