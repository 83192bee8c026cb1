"""Prompts of `generate` computed once, in a cache that grows in place; and passes that want a cache of their own."""

from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
from support.models.families import EOS, build, make_batch

from vgr_trl.sharing import share_prompts, sharing


@pytest.fixture(scope="module")
def case():
    return build("llama"), make_batch("llama")


def test_a_pass_that_wants_a_cache_gets_it(case):
    model, batch = case
    with torch.no_grad(), share_prompts(model) as report:
        outputs = model(**batch.inputs, use_cache=True)
    assert outputs.past_key_values.get_seq_length() == batch.inputs["input_ids"].size(1)
    assert len(outputs.past_key_values.layers[0].keys) == 6
    assert report.rows == 0


def test_a_model_that_samples_by_itself_draws_the_same_numbers(case):
    """The pass over the prompts draws none, whatever the model's own generation config says."""
    model, batch = case
    model.generation_config.do_sample = True
    try:
        tokens = []
        for shares in (False, True):
            torch.manual_seed(3)
            with share_prompts(model) if shares else nullcontext() as report:
                tokens.append(model.generate(**batch.prompt_inputs(), max_new_tokens=5))
    finally:
        model.generation_config.do_sample = False
    assert report.prompts == 2
    assert torch.equal(*tokens)


def test_a_generate_that_is_not_that_of_transformers_is_called_once_as_it_is(text_model):
    ids = torch.tensor([[5, 6, 7]] * 4)
    with patch.object(text_model, "generate", return_value=ids) as own, share_prompts(text_model) as report:
        assert text_model.generate(input_ids=ids, attention_mask=torch.ones_like(ids)) is ids
    assert own.call_count == 1
    assert own.call_args.kwargs["input_ids"] is ids
    assert report.plain == {"a generate that is not that of transformers": 1}


def copied(cache, index):
    """In place of growing: as transformers does it."""
    cache.reorder_cache(index)


def logits(model, batch):
    torch.manual_seed(11)
    options = {"do_sample": True, "max_new_tokens": 12, "suppress_tokens": [EOS], "return_dict_in_generate": True}
    with share_prompts(model) as report:
        found = model.generate(**batch.prompt_inputs(), **options, output_logits=True)
    assert report.prompts_per_row == 1 / 3
    return found.sequences, torch.stack(found.logits)


@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3", "qwen3_5"])
def test_tokens_and_logits_are_the_same_bit_for_bit(name, monkeypatch):
    model, batch = build(name), make_batch(name)
    monkeypatch.setattr(sharing, "ROOM", 5)  # outgrown twice
    tokens, found = logits(model, batch)
    monkeypatch.setattr(sharing, "grow_in_place", copied)
    expected_tokens, expected = logits(model, batch)
    assert torch.equal(tokens, expected_tokens)
    assert torch.equal(found, expected)
