"""A cache that grows in place holds what one that is copied for each token holds."""

import pytest
import torch
from support.models.families import EOS, build, make_batch
from transformers import DynamicCache

from vgr_trl.sharing import generation, share_prompts
from vgr_trl.sharing import generation as growing


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


@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3", "qwen3_5", "llama"])
def test_tokens_and_logits_are_the_same_bit_for_bit(name, monkeypatch):
    model, batch = build(name), make_batch(name)
    monkeypatch.setattr(growing, "ROOM", 5)  # outgrown twice
    tokens, found = logits(model, batch)
    monkeypatch.setattr(generation, "grow_in_place", copied)
    expected_tokens, expected = logits(model, batch)
    assert torch.equal(tokens, expected_tokens)
    assert torch.equal(found, expected)


def test_tokens_are_added_where_there_is_room():
    """Two prompts of three tokens, for three rows; two heads of width four."""
    keys, values = torch.randn(2, 2, 2, 3, 4)
    cache = DynamicCache()
    cache.update(keys, values, 0)
    index = torch.tensor([1, 0, 1])
    growing.grow_in_place(cache, index)
    place, expected = cache.layers[0].keys.data_ptr(), (keys[index], values[index])
    for tokens in (1, growing.ROOM - 1, 2):
        new = torch.randn(2, 3, 2, tokens, 4)
        found = cache.update(*new, 0)
        expected = [torch.cat([before, after], dim=-2) for before, after in zip(expected, new, strict=True)]
        assert all(map(torch.equal, found, expected))
        is_full = cache.get_seq_length() > 3 + growing.ROOM
        assert (cache.layers[0].keys.data_ptr() == place) != is_full
    assert is_full
