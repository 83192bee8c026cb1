"""Windows of a vision tower's attention in one call: the same features and gradients."""

from contextlib import contextmanager

import pytest
import torch
from support.models.compare import checkpointed, largest_relative
from support.models.families import build, make_batch
from transformers.integrations import sdpa_attention
from transformers.modeling_utils import AttentionInterface

from vgr_trl.efficiency.vision import join_windows


@contextmanager
def counted_calls(monkeypatch):
    """The shapes of queries that torch's attention gets."""
    shapes, plain = [], torch.nn.functional.scaled_dot_product_attention

    def attend(query, *args, **kwargs):
        shapes.append(tuple(query.shape))
        return plain(query, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
        yield shapes


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
def test_features_and_gradients(name, checkpointing, monkeypatch):
    """Images of one size and of several, whose windows at the edges are smaller."""
    model, batch = build(name).double().train(), make_batch(name, images=(1, 2))
    if checkpointing:
        checkpointed(model)
    with counted_calls(monkeypatch) as plain_calls:
        features, gradients = features_and_gradients(model, batch)
    assert join_windows(model) == 2
    with counted_calls(monkeypatch) as calls:
        joined, joined_gradients = features_and_gradients(model, batch)
    assert len(calls) < len(plain_calls) / 2
    assert (joined - features).abs().max() < 1e-12
    assert largest_relative(gradients, joined_gradients) < 1e-9


def test_another_sdpa_attends_to_each_window(monkeypatch):
    """Where someone else's function stands in the place of ours, it gets what transformers gives it."""
    model, batch = build("qwen2_5_vl").double(), make_batch("qwen2_5_vl")
    features, _ = features_and_gradients(model, batch)
    join_windows(model)
    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", sdpa_attention.sdpa_attention_forward)
    joined, _ = features_and_gradients(model, batch)
    assert torch.equal(features, joined)


def test_a_family_without_windows():
    assert join_windows(build("gemma3")) == 0
