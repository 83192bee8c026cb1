import copy
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from support.models.compare import checkpointed, gradients, largest_relative, loss_of, needs_shared, scored, with_head
from support.models.families import FAMILIES, Family, build, make_batch, text_model
from support.models.flash_on_cpu import PaddedKernel, as_flash, with_kernels
from support.steps import DAPO, LOSSES, ROUNDING, STOCK, assert_same_steps, options, trained
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from vgr_trl.sharing import attention, share_prompts
from vgr_trl.sharing.attention import sdpa_by_key_head
from vgr_trl.sharing.row import Visibility


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", ["qwen2_5_vl", "internvl", "mistral", "gemma3_text"])
def test_merged_attention(name, checkpointing, monkeypatch):
    """As on a GPU, whose kernels return the logsumexp; layers with a window attend with masks."""
    merged = []
    monkeypatch.setattr(attention, "can_merge", lambda query, seen: seen == Visibility() and not merged.append(seen))
    monkeypatch.setattr(attention, "_Kernel", PaddedKernel)
    model = with_head(build(name)).double().train(checkpointing)
    batch = make_batch(name, images=(1, 2) if FAMILIES[name].picture else (0, 0))
    batch.inputs = {key: value.double() if value.is_floating_point() else value for key, value in batch.inputs.items()}
    plain, expected = scored(model, batch), gradients(checkpointed(model) if checkpointing else model, batch)
    with share_prompts(model, batch.completion_length) as report:
        shared, found = scored(model, batch), gradients(model, batch)
    assert report.prompts_per_row == 1 / 3
    assert len(merged) > 2 or name == "mistral"  # two layers of short rows are within every window
    assert all((one - other).abs().max() < 1e-6 for one, other in zip(plain, shared, strict=True))
    assert largest_relative(expected, found) < 1e-6


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", ["qwen2_5_vl", "internvl", "gemma3_text"])
def test_flash_attention_with_variable_lengths(name, checkpointing, monkeypatch):
    """Windows of 24 tokens are shorter than prompts and completions together; images of unequal number."""
    packed = with_kernels(monkeypatch)
    model = with_head(build(name)).train(checkpointing)
    batch = make_batch(name, images=(1, 2) if FAMILIES[name].picture else (0, 0))
    expected = gradients(checkpointed(model) if checkpointing else model, batch)
    as_flash(model)
    with share_prompts(model, batch.completion_length) as report:
        found = gradients(model, batch)
    assert report.prompts_per_row == 1 / 3
    assert not report.plain
    assert largest_relative(expected, found) < ROUNDING
    lengths = batch.inputs["attention_mask"][:, -batch.completion_length :].sum(1).tolist()
    behind = [queries for queries, _ in packed if len(queries) == len(lengths)]
    layers = model.config.get_text_config().num_hidden_layers
    assert behind == [lengths] * layers * (2 if checkpointing else 1)


@pytest.mark.parametrize("loss", ["dapo", "vespo"])
def test_steps_with_flash_attention_are_those_of_trl(loss, vision, image_rows, tmp_path, monkeypatch):
    packed = with_kernels(monkeypatch)
    settings = options(tmp_path, **{"epsilon_high": 0.28, **LOSSES[loss]}, num_iterations=2)
    model, processor = vision
    stock = trained(STOCK, model, processor, image_rows, settings)
    assert not packed
    ours = trained(DAPO, as_flash(copy.deepcopy(model)), processor, image_rows, settings)
    assert_same_steps(model, ours, stock)
    assert any(queries != keys and len(set(queries)) > 1 for queries, keys in packed)


def test_other_passes_keep_the_attention_of_transformers():
    """Of stock TRL in the same process, say; checkpointed layers run after the block as they ran in it."""
    attend = "scaled_dot_product_attention"

    def rows_seen(run):
        with patch.object(torch.nn.functional, attend, wraps=getattr(torch.nn.functional, attend)) as watched:
            run()
        return {call.args[0].size(0) for call in watched.call_args_list}

    four_heads = text_model("Llama", num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    model, batch, losses = with_head(build(Family("llama", four_heads))), make_batch("llama"), []
    needs_shared(model)
    checkpointed(model.train())
    with share_prompts(model, batch.completion_length):
        assert rows_seen(lambda: losses.append(loss_of(model, batch))) == {2, 6}
    assert rows_seen(losses[0].backward) == {2, 6}
    assert rows_seen(lambda: scored(model, batch)) == {6}


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
