"""Prompts that end early, completions that pass by length, heads that score the columns of completions only."""

import itertools
from types import SimpleNamespace
from unittest.mock import Mock, patch

import pytest
import torch
from support.models.compare import checkpointed, gradients, largest_relative, loss_of, needs_shared, scored, with_head
from support.models.families import Family, build, make_batch, text_model
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from vgr_trl.sharing import prefix_forward, share_prompts, why_not_share
from vgr_trl.sharing.attention import attend_to_all_before, hides_nothing_before, mark_shared, sdpa_by_key_head
from vgr_trl.sharing.prefix_forward import cut_by_length


def cost(passes, lengths, of_a_pass):
    return sum(of_a_pass + len(rows) * max(lengths[row] for row in rows) for rows in passes)


@pytest.mark.parametrize("of_a_pass", [0, 3])
def test_no_other_passes_cost_less(of_a_pass):
    """All ways to number five rows by pass."""
    lengths = [2, 9, 3, 9, 1]
    found = cut_by_length(lengths, of_a_pass)
    assert sorted(itertools.chain(*found)) == [0, 1, 2, 3, 4]
    ways = itertools.product(range(5), repeat=5)
    all_passes = ([[row for row in range(5) if way[row] == one] for one in set(way)] for way in ways)
    assert cost(found, lengths, of_a_pass) == min(cost(passes, lengths, of_a_pass) for passes in all_passes)


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


@pytest.mark.parametrize("groups", [1, 4])
def test_keys_of_grouped_queries_are_kept_once(groups):
    """Of 8 query heads and 8 or 2 key heads; masked, transformers keeps 8 of both for the backward pass."""
    torch.manual_seed(0)
    query, key = torch.randn(2, 8, 5, 16), torch.randn(2, 8 // groups, 32, 16)
    mask, module = torch.ones(2, 1, 5, 32).tril(27).bool(), SimpleNamespace(num_key_value_groups=groups, is_causal=True)
    kept, outputs = [], []
    for attend in (sdpa_attention_forward, sdpa_by_key_head):
        inputs = [query.clone().requires_grad_(), *(mark_shared(key.clone().requires_grad_()) for _ in range(2))]
        output, bytes_kept = kept_bytes(attend, module, *inputs, mask, scaling=0.3)
        output.square().sum().backward()
        outputs.append([output, *(one.grad for one in inputs)])
        kept.append(bytes_kept)
    assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(*outputs, strict=True))
    repeated = 2 * query.size(0) * (8 - 8 // groups) * 32 * 16 * 4  # bytes: keys and values
    assert kept[0] - kept[1] == repeated
    with torch.autocast("cpu", torch.bfloat16):  # keys are cast once, and not for each query head
        assert kept_bytes(sdpa_by_key_head, module, *inputs, mask)[1] <= kept[1]


def test_a_compiled_model_of_the_process_attends_without_a_graph_break():
    module = SimpleNamespace(num_key_value_groups=2, is_causal=True)
    tensors = [torch.randn(1, heads, length, 8) for heads, length in ((4, 3), (2, 5), (2, 5))]
    compiled = torch.compile(lambda *args: sdpa_by_key_head(module, *args)[0], backend="eager", fullgraph=True)
    assert torch.equal(compiled(*tensors, None), sdpa_attention_forward(module, *tensors, None)[0])


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


def test_which_masks_hide_nothing_before():
    """A window that the layers' caches do not know of, and padding in front, do; padding behind does not."""
    causal = torch.ones(2, 1, 3, 7).tril(4).bool()
    assert hides_nothing_before(causal.clone())
    behind = causal.clone()
    behind[1, :, :, 6] = False  # the last key is padding, and so is the last query
    assert hides_nothing_before(behind)
    in_front, window = causal.clone(), causal & torch.ones(3, 7).triu(1).bool()
    in_front[0, :, :, 0] = False
    assert not hides_nothing_before(in_front)
    assert not hides_nothing_before(window)
    assert not hides_nothing_before(causal.float())


def kept_bytes(attend, *args, **options):
    """The outputs, and the bytes that are kept for the backward pass."""
    sizes = {}

    def keep(one):
        sizes[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
        return one

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda one: one):
        output, _ = attend(*args, **options)
    return output, sum(sizes.values())


def test_other_passes_keep_the_attention_of_transformers():
    """Of stock TRL in the same process, say; checkpointed layers run after the block as they ran in it."""
    attend = "scaled_dot_product_attention"

    def heads_seen(run):
        """Query heads of each call: 4, or the 2 of one key head."""
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


@pytest.mark.parametrize(("family", "checkpoints"), [("qwen3_vl", True), ("llava", False)])
def test_no_gradient_is_lost(family, checkpoints):
    model, batch = with_head(build(family)).train(), make_batch(family)
    needs_shared(model, checkpoints)
    if checkpoints:
        checkpointed(model)
    seen = []
    mlp = model.model.get_decoder().layers[-1].mlp
    expected = gradients(model, batch)
    assert why_not_share(model, gradients=True) is None  # whose own short rows are not counted
    plain = mlp.forward
    mlp.forward = lambda hidden: seen.append(hidden.shape[1]) or plain(hidden)
    with share_prompts(model, batch.completion_length) as report:
        found = gradients(model, batch)
    assert report.prompts_per_row < 1
    assert set(seen) == {batch.completion_length}  # columns: none of a prompt but its last
    assert largest_relative(expected, found) < 2e-4
