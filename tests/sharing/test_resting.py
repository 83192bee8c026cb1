"""When the shared forward pass rests: where a cache is wanted, and while `generate` runs."""

from contextlib import nullcontext

import pytest
import torch
from support.models.families import build, make_batch

from vgr_trl.sharing import share_prompts


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


def test_a_pass_that_wants_none_gets_none(case):
    model, batch = case
    with torch.no_grad(), share_prompts(model) as report:
        outputs = model(**batch.inputs)
    assert outputs.past_key_values is None
    assert report.prompts == 2


def test_passes_inside_of_generate_are_not_counted(case):
    """Without a cache they look like any other pass."""
    model, batch = case
    with share_prompts(model) as report:
        model.generate(**batch.prompt_inputs(), max_new_tokens=3, do_sample=False, use_cache=False)
        assert (report.rows, dict(report.plain)) == (6, {"generate without its default, growing cache": 1})
        with torch.no_grad():
            model(**batch.inputs)
    assert (report.rows, report.prompts) == (12, 8)


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


def test_prompts_of_one_token_are_generated_from_plainly(case):
    model, _ = case
    ids = torch.full((3, 1), 20)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 3}
    plain = model.generate(**inputs)
    with share_prompts(model) as report:
        shared = model.generate(**inputs)
    assert torch.equal(plain, shared)
    assert dict(report.plain) == {"no prompt before the completions": 1}


def test_what_layers_say_about_caches_is_left_as_it_was():
    """Checkpointed layers may use our cache; one that had been told so by its user still may afterwards."""
    model, batch = build("llama").train(), make_batch("llama")
    first, second = model.model.layers
    first._can_checkpoint_with_cache = False
    with share_prompts(model, 12) as report:
        model(**batch.inputs)
    assert report.prompts == 2
    assert vars(first)["_can_checkpoint_with_cache"] is False
    assert "_can_checkpoint_with_cache" not in vars(second)
