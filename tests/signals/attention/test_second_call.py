"""One attention call asked again: what the function is given, and in which precision its answer is read."""

from types import SimpleNamespace

import torch

from vgr_trl.signals.attention import AttentionCall, AttentionWeights, Queries


def call_of(function, queries, keys, dtype=torch.float32, causal=True, **options):
    """One row, two heads, width 4."""
    module = SimpleNamespace(config=SimpleNamespace(_attn_implementation="sdpa"), is_causal=causal)
    query, key = torch.zeros(1, 2, queries, 4, dtype=dtype), torch.zeros(1, 2, keys, 4, dtype=dtype)
    return AttentionCall(function, module, query, key, options)


def masks_given(queries, keys, chosen, **options):
    seen = []

    def function(module, query, key, value, attention_mask, **kwargs):
        seen.append((attention_mask, key.size(2)))
        return torch.zeros(1, query.size(2), 2, 4), None

    wanted = Queries(torch.tensor(chosen), chosen[0], chosen[-1] + 1)
    call_of(function, queries, keys, **options).mass_on_keys(torch.ones(1, keys, 2), wanted)
    return seen[0]


def test_two_queries_are_causal():
    """The fewest there can be: behind one key of a cache the first sees two keys, the second three."""
    mask, keys = masks_given(2, 3, [0, 1])
    assert (mask[0, 0].tolist(), keys) == ([[True, True, False], [True, True, True]], 3)
    mask, keys = masks_given(2, 3, [0])
    assert (mask[0, 0].tolist(), keys) == ([[True, True]], 2)


def test_one_query_sees_all_keys():
    assert masks_given(1, 3, [0]) == (None, 3)


def test_what_is_not_causal_sees_all_keys():
    """The option goes before the module; keys behind the last wanted query stay."""
    assert masks_given(3, 3, [0], is_causal=False) == masks_given(3, 3, [0], causal=False) == (None, 3)
    assert masks_given(3, 3, [0], causal=False, is_causal=True)[1] == 1
    mask = torch.tensor([[[[True, False, True]] * 3]])
    given, keys = masks_given(3, 3, [1], attention_mask=mask)
    assert (given[0, 0].tolist(), keys) == ([[True, False, True]], 3)


def test_means_over_heads_are_float32():
    """1 and 1 + 2^-7 are bfloat16, their mean 1 + 2^-8 is not."""
    heads = torch.tensor([1.0, 1.0078125]).bfloat16()

    def function(module, query, key, value, attention_mask, **kwargs):
        return heads.view(1, 1, 2, 1).expand(1, query.size(2), 2, 4), None

    wanted = Queries(torch.tensor([0]), 0, 1)
    call = call_of(function, 1, 1, torch.bfloat16)
    weights = AttentionWeights(heads.view(1, 2, 1, 1))
    for measured in (call, weights):
        mass = measured.mass_on_keys(torch.ones(1, 1, 1), wanted)
        assert (mass.dtype, mass.item()) == (torch.float32, 1.00390625)
        assert measured.shape == (1, 1, 1)
