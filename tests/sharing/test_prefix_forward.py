from types import SimpleNamespace
from unittest.mock import Mock, patch

import pytest
import torch
from support.models.compare import checkpointed, gradients, largest_relative, loss_of, needs_shared, scored, with_head
from support.models.families import Family, build, make_batch, text_model
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from vgr_trl.sharing import prefix_forward, share_prompts
from vgr_trl.sharing.attention import attend_to_all_before, sdpa_by_key_head
from vgr_trl.sharing.prefix_forward import cut_by_length


@pytest.fixture
def many_passes(monkeypatch):
    """As if a pass cost nothing; yields how many there were."""
    counted = []

    def cut(lengths, of_a_pass):
        counted.append(len(passes := cut_by_length(lengths, 0)))
        return passes

    monkeypatch.setattr(prefix_forward, "cut_by_length", cut)
    return counted


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_5", "gemma3"])
def test_passes_by_length_give_the_same(name, many_passes):
    model, batch = with_head(build(name)), make_batch(name)
    needs_shared(model)
    plain, expected = scored(model, batch), gradients(model, batch)
    with share_prompts(model, batch.completion_length) as report:
        shared, found = scored(model, batch), gradients(model, batch)
    assert report.prompts_per_row < 1
    assert min(many_passes) > 1
    assert all((one - other).abs().max() < 3e-5 for one, other in zip(plain, shared, strict=True))
    assert largest_relative(expected, found) < 2e-4


@pytest.mark.parametrize("attention", ["padded", "whole", "windows"])
def test_a_kernel_reads_no_mask_behind_prompts_without_padding(attention, monkeypatch):
    """As on a GPU that has flash attention; each query sees all keys up to its own, those of padding in the end too."""
    made = Mock(wraps=attend_to_all_before)
    monkeypatch.setattr("vgr_trl.sharing.attention.can_use_flash_attention", lambda params: True)
    monkeypatch.setattr("vgr_trl.sharing.attention.attend_to_all_before", made)
    text = (21, 33) if attention == "padded" else (33, 33)
    name = "gemma3" if attention == "windows" else "qwen2_5_vl"
    model, batch = with_head(build(name).double()), make_batch(name, text=text)
    batch.inputs["pixel_values"] = batch.inputs["pixel_values"].double()
    plain, expected = scored(model, batch), gradients(model, batch)
    assert not made.called
    with share_prompts(model, batch.completion_length) as report:
        shared, found = scored(model, batch), gradients(model, batch)
    assert report.prompts_per_row < 1
    layers = model.config.get_text_config().layer_types
    calls = {"padded": 0, "whole": 2 * len(layers), "windows": 2 * layers.count("full_attention")}
    assert made.call_count == calls[attention]
    assert all((one - other).abs().max() < 1e-6 for one, other in zip(plain, shared, strict=True))
    assert largest_relative(expected, found) < 1e-6


def test_other_passes_keep_the_attention_of_transformers():
    """Of stock TRL in the same process, say; checkpointed layers run after the block as they ran in it."""
    attend = "scaled_dot_product_attention"

    def heads_seen(run):
        with patch.object(torch.nn.functional, attend, wraps=getattr(torch.nn.functional, attend)) as watched:
            run()
        return {call.args[0].size(1) for call in watched.call_args_list}

    four_heads = text_model("Llama", num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    model, batch, losses = with_head(build(Family("llama", four_heads))), make_batch("llama"), []
    needs_shared(model, checkpointing=True)
    checkpointed(model.train())
    with share_prompts(model, batch.completion_length):
        assert heads_seen(lambda: losses.append(loss_of(model, batch))) == {2}
    assert heads_seen(losses[0].backward) == {2}
    assert heads_seen(lambda: scored(model, batch)) == {4}


def test_a_compiled_model_of_the_process_attends_without_a_graph_break():
    module = SimpleNamespace(num_key_value_groups=2, is_causal=True)
    tensors = [torch.randn(1, heads, length, 8) for heads, length in ((4, 3), (2, 5), (2, 5))]
    compiled = torch.compile(lambda *args: sdpa_by_key_head(module, *args)[0], backend="eager", fullgraph=True)
    assert torch.equal(compiled(*tensors, None), sdpa_attention_forward(module, *tensors, None)[0])


@pytest.mark.parametrize("is_compiled", [False, True])
def test_one_new_token_reads_each_key_once(is_compiled):
    """transformers repeats keys for every query head in compiled code."""
    torch.manual_seed(0)
    module = SimpleNamespace(num_key_value_groups=2, is_causal=True)
    tensors = [torch.randn(3, heads, length, 8) for heads, length in ((4, 1), (2, 5), (2, 5))]
    mask = torch.tensor([[0, 1, 1, 1, 0], [1] * 5, [0, 0, 0, 1, 0]], dtype=torch.bool)[:, None, None]
    keys = [each.repeat_interleave(2, 1) for each in tensors[1:]]
    expected = torch.nn.functional.scaled_dot_product_attention(tensors[0], *keys, attn_mask=mask).transpose(1, 2)
    attend, heads_seen = torch.nn.functional.scaled_dot_product_attention, []

    def watched(query, key, value, **options):
        heads_seen.append(key.size(1))
        return attend(query, key, value, **options)

    def run(*args):
        return sdpa_by_key_head(module, *args)[0]

    with patch.object(torch.nn.functional, "scaled_dot_product_attention", watched):
        found = (torch.compile(run, backend="eager") if is_compiled else run)(*tensors, mask)
    assert (found - expected).abs().max() < 1e-6
    assert heads_seen == [2]
