"""Completions of similar length pass together behind their prompts."""

import itertools

import pytest
import torch
from support.models.compare import gradients, largest_relative, scored, with_head
from support.models.families import FAMILIES, build, make_batch

from vgr_trl.sharing import prefix_forward, share_prompts
from vgr_trl.sharing.prefix_forward import cut_by_length
from vgr_trl.signals.attention import AttentionProbe
from vgr_trl.signals.ratios import build_modality_masks


def cost(passes, lengths, of_a_pass):
    return sum(of_a_pass + len(rows) * max(lengths[row] for row in rows) for rows in passes)


@pytest.mark.parametrize("of_a_pass", [0, 1, 3, 10])
def test_no_other_passes_cost_less(of_a_pass):
    """All ways to number five rows by pass."""
    lengths = [2, 9, 3, 9, 1]
    found = cut_by_length(lengths, of_a_pass)
    assert sorted(itertools.chain(*found)) == [0, 1, 2, 3, 4]
    ways = itertools.product(range(5), repeat=5)
    all_passes = ([[row for row in range(5) if way[row] == one] for one in set(way)] for way in ways)
    assert cost(found, lengths, of_a_pass) == min(cost(passes, lengths, of_a_pass) for passes in all_passes)


def test_one_pass_has_rows_as_they_are():
    assert cut_by_length([3, 5, 4], 100) == [[0, 1, 2]]
    assert cut_by_length([4, 4, 4], 0) == [[0, 1, 2]]
    assert cut_by_length([4, 5, 4], 0) == [[1], [0, 2]]


@pytest.fixture
def many_passes(monkeypatch):
    """As if a pass cost nothing; yields how many there were."""
    counted = []

    def cut(lengths, of_a_pass):
        counted.append(len(passes := cut_by_length(lengths, 0)))
        return passes

    monkeypatch.setattr(prefix_forward, "cut_by_length", cut)
    return counted


@pytest.mark.parametrize("name", FAMILIES)
def test_values_and_gradients_are_the_same(name, many_passes):
    model, batch = with_head(build(name)), make_batch(name)
    plain, expected = scored(model, batch), gradients(model, batch)
    with share_prompts(model, batch.completion_length) as report:
        shared, found = scored(model, batch), gradients(model, batch)
    assert report.prompts_per_row < 1
    assert min(many_passes) > 1
    assert all((one - other).abs().max() < 3e-5 for one, other in zip(plain, shared, strict=True))
    assert largest_relative(expected, found) < 2e-4


def test_attention_is_that_of_one_pass(many_passes):
    model, batch = with_head(build("qwen2_5_vl")), make_batch("qwen2_5_vl")
    ids, mask, length = batch.inputs["input_ids"], batch.inputs["attention_mask"], batch.completion_length
    image = [model.config.image_token_id]
    masks = build_modality_masks(ids[:, :-length], mask[:, :-length], vision_token_ids=image, special_token_ids=[])
    masses = []
    with torch.no_grad():
        for shares in (False, True):
            probe = AttentionProbe(model, masks, measure_prompt=True, keep_rows=(0, 3))
            if shares:
                with share_prompts(model, length), probe:
                    scored(model, batch)
            else:
                with probe:
                    scored(model, batch)
            masses.append(probe)
    plain, shared = masses
    valid = mask[:, -length:].bool()
    assert many_passes[0] > 1
    assert (plain.mass.vision - shared.mass.vision)[:, valid].abs().max() < 1e-6
    assert (plain.mass.instruction - shared.mass.instruction)[:, valid].abs().max() < 1e-6
    assert (plain.prompt_mass.vision - shared.prompt_mass.vision).abs().max() < 1e-6
    for row, of_row in plain.kept.items():
        assert (of_row - shared.kept[row])[:, valid[row]].abs().max() < 1e-6
