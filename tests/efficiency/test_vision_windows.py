"""Windows of a vision tower's attention in one call: the same features and gradients."""

from unittest.mock import patch

import pytest
import torch
from support.models.compare import checkpointed, largest_relative
from support.models.families import build, make_batch

from vgr_trl.vision.windows import join_windows


def counted_calls():
    """Of torch's attention."""
    name = "scaled_dot_product_attention"
    return patch.object(torch.nn.functional, name, wraps=getattr(torch.nn.functional, name))


def features_and_gradients(model, batch):
    model.zero_grad(set_to_none=True)
    outputs = model.model.get_image_features(
        batch.inputs["pixel_values"].double(), image_grid_thw=batch.inputs["image_grid_thw"]
    )
    features = torch.cat(list(outputs.pooler_output))
    (features * torch.arange(features.numel()).view_as(features)).sum().backward()
    return features.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen2_vl", "qwen3_vl"])
def test_features_and_gradients(name, checkpointing):
    """Images of one size and of several, whose windows at the edges are smaller."""
    model, batch = build(name).double().train(), make_batch(name, images=(1, 2))
    if checkpointing:
        checkpointed(model)
    with counted_calls() as plain_calls:
        features, gradients = features_and_gradients(model, batch)
    assert join_windows(model) == 2
    with counted_calls() as calls:
        joined, joined_gradients = features_and_gradients(model, batch)
    assert calls.call_count < plain_calls.call_count / 2
    assert (joined - features).abs().max() < 1e-12
    assert largest_relative(gradients, joined_gradients) < 1e-9


def test_a_family_without_windows():
    assert join_windows(build("gemma3")) == 0
