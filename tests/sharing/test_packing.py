import copy
from functools import partial

import pytest
from support.models.compare import checkpointed, gradients, largest_relative, with_head
from support.models.families import FAMILIES, build, make_batch
from support.models.flash_on_cpu import as_flash, with_kernels
from support.steps import DAPO, LOSSES, ROUNDING, STOCK, assert_same_steps, options, trained

from vgr_trl.sharing import share_prompts
from vgr_trl.sharing.model_support import causal_model


@pytest.fixture
def packed(monkeypatch):
    return with_kernels(monkeypatch)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", ["qwen2_5_vl", "internvl", "gemma3_text"])
def test_gradients_are_those_of_padded_passes(name, checkpointing, packed):
    """Windows of 24 tokens are shorter than prompts and completions together; images of unequal number."""
    model = with_head(build(name)).train(checkpointing)
    batch = make_batch(name, images=(1, 2) if FAMILIES[name].picture else (0, 0))
    expected = gradients(checkpointed(model) if checkpointing else model, batch)
    as_flash(model)
    with share_prompts(model, batch.completion_length, packs=True) as report:
        found = gradients(model, batch)
    assert report.prompts_per_row == 1 / 3
    assert not report.plain
    assert largest_relative(expected, found) < ROUNDING
    lengths = batch.inputs["attention_mask"][:, -batch.completion_length :].sum(1).tolist()
    behind = [queries for queries, _ in packed if len(queries) == len(lengths)]
    layers = model.config.get_text_config().num_hidden_layers
    assert behind == [lengths] * layers * (2 if checkpointing else 1)


def test_processes_that_have_to_make_equally_many_passes_make_one(packed):
    """As under ZeRO-3, where a pass over the prompts ends with the last layer."""
    model, batch = with_head(build("qwen2_5_vl")), make_batch("qwen2_5_vl")
    expected = gradients(model, batch)
    decoder = as_flash(model).model.language_model
    passes = []
    decoder.register_forward_hook(lambda *call: passes.append(1))
    with share_prompts(model, batch.completion_length, agree=lambda shares: shares, packs=True) as report:
        found = gradients(model, batch)
    assert not report.plain
    assert len(passes) == 2
    assert largest_relative(expected, found) < ROUNDING


@pytest.mark.parametrize("loss", ["dapo", "vespo"])
def test_steps_are_those_of_trl(loss, vision, image_rows, tmp_path, packed):
    settings = options(tmp_path, **{"epsilon_high": 0.28, **LOSSES[loss]}, num_iterations=2)
    model, processor = vision
    stock = trained(STOCK, model, processor, image_rows, settings)
    assert not packed
    flash = as_flash(copy.deepcopy(model))
    ours = trained(DAPO, flash, processor, image_rows, settings)
    assert "pack_completions: on" in str(ours.features)
    assert_same_steps(model, ours, stock)
    assert any(queries != keys and len(set(queries)) > 1 for queries, keys in packed)


def test_a_model_that_does_not_tell_its_attention_runs_plainly(packed):
    """What flash attention is not given, it takes for one long completion."""
    model = with_head(build("llama"))
    batch = make_batch("llama", images=(0, 0))
    expected = gradients(model, batch)
    attention = as_flash(causal_model(model)).model.layers[1].self_attn

    def silent(plain, *args, cu_seq_lens_q=None, cu_seq_lens_k=None, **kwargs):
        return plain(*args, **kwargs)

    attention.forward = partial(silent, attention.forward)
    with share_prompts(model, batch.completion_length, packs=True) as report:
        found = gradients(model, batch)
    assert report.plain == {"a model that does not pass cu_seqlens on to its attention": 1}
    assert largest_relative(expected, found) < ROUNDING
