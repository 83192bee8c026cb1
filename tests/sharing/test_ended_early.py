"""In the last layer, prompts give their keys and values to completions and nothing else."""

import pytest
import torch
from support.models.compare import checkpointed, gradients, largest_relative, scored, with_head
from support.models.families import build, make_batch

from vgr_trl.sharing import share_prompts


def last_layer(model):
    return model.model.get_decoder().layers[-1]


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "gemma3", "llava", "qwen3"])
@pytest.mark.parametrize("checkpoints", [False, True])
def test_no_gradient_is_lost(family, checkpoints):
    model, batch = with_head(build(family)).train(), make_batch(family)
    if checkpoints:
        checkpointed(model)
    seen = []
    mlp = last_layer(model).mlp
    expected = gradients(model, batch)
    plain = mlp.forward
    mlp.forward = lambda hidden: seen.append(hidden.shape[1]) or plain(hidden)
    with share_prompts(model, batch.completion_length) as report:
        found = gradients(model, batch)
    assert report.prompts_per_row < 1
    assert set(seen) == {batch.completion_length}  # columns: none of a prompt but its last
    assert largest_relative(expected, found) < 2e-4


def test_a_hook_gets_its_outputs():
    model, batch = with_head(build("qwen3")), make_batch("qwen3")
    shapes = []
    hook = last_layer(model).register_forward_hook(lambda module, args, output: shapes.append(output.shape[1]))
    with torch.no_grad(), share_prompts(model, batch.completion_length):
        scored(model, batch)
    hook.remove()
    with torch.no_grad(), share_prompts(model, batch.completion_length):
        scored(model, batch)
    assert shapes == [batch.inputs["input_ids"].size(1) - batch.completion_length - 1, batch.completion_length]
