"""Which rows and queries a probe measures: chosen ones, in chunks, of the prompt, and whole maps of some."""

import pytest
import torch
from support.models.eager_reference import TOLERANCE, assert_agrees, assert_prompt_agrees, difference, reference, run
from support.models.families import build, make_batch

from vgr_trl.sharing import share_prompts
from vgr_trl.signals import AttentionProbe


@pytest.fixture(scope="module")
def case():
    model, batch = build("qwen2_5_vl"), make_batch("qwen2_5_vl")
    return model, batch, reference(model, batch)


class TestRows:
    @pytest.mark.parametrize("rows", [slice(-9, -3), slice(45, 30, -4), [40, 41, 42], [44, 31, 31, -5], range(33, 36)])
    def test_chosen_queries(self, case, rows):
        model, batch, expected = case
        length = batch.inputs["input_ids"].size(1)
        positions = list(range(length))[rows] if isinstance(rows, slice) else list(rows)
        weights = expected.weights[:, :, positions, : expected.masks.vision.size(1)]
        for shares in (False, True):
            with torch.no_grad(), AttentionProbe(model, expected.masks, rows=rows, keep_rows=(3,)) as probe:
                if shares:
                    with share_prompts(model):
                        model(**batch.inputs)
                else:
                    model(**batch.inputs)
            for found, mask in (
                (probe.mass.vision, expected.masks.vision),
                (probe.mass.instruction, expected.masks.instruction),
            ):
                assert found.shape == (2, 6, len(positions))
                valid = batch.inputs["attention_mask"][:, positions].bool()
                assert difference(found, (weights * mask[:, None]).sum(-1), valid) < TOLERANCE
            kept = weights[:, 3][:, :, expected.masks.vision[3]]
            assert torch.allclose(probe.kept[3][:, valid[3]], kept[:, valid[3]], atol=TOLERANCE)

    @pytest.mark.parametrize("shares", [False, True])
    @pytest.mark.parametrize("implementation", ["sdpa", "eager"])
    def test_kept_maps_of_some_rows(self, case, implementation, shares):
        """More vision tokens than a head is wide, so that several calls are needed: (L, T, V) for each row."""
        model, batch = build("llava_next"), make_batch("llava_next", images=(2, 1))
        expected = reference(model, batch)
        model.set_attn_implementation(implementation)
        with torch.no_grad(), AttentionProbe(model, expected.masks, keep_rows=(1, 5)) as probe:
            if shares:
                with share_prompts(model, 12):
                    model(**batch.inputs)
            else:
                model(**batch.inputs)
        assert sorted(probe.kept) == [1, 5]
        for row, kept in probe.kept.items():
            keys = expected.masks.vision[row]
            prompt = len(keys)
            assert kept.shape == (2, 12, int(keys.sum()))
            assert kept.size(2) > 16
            valid = expected.valid[row]
            assert torch.allclose(
                kept[:, valid], expected.weights[:, row, prompt - 1 : -1, :prompt][..., keys][:, valid], atol=TOLERANCE
            )
            assert torch.allclose(kept.sum(-1)[:, valid], probe.mass.vision[:, row, valid], atol=TOLERANCE)

    @pytest.mark.parametrize("shares", [False, True])
    @pytest.mark.parametrize("sizes", [[1, 5], [2, 3, 1], [3, 3], [1] * 6])
    def test_chunks_of_any_size(self, case, sizes, shares):
        model, batch = build("llava"), make_batch("llava")
        expected = reference(model, batch)
        parts = [{key: value.split(sizes)[i] for key, value in batch.inputs.items()} for i in range(len(sizes))]
        with torch.no_grad(), AttentionProbe(model, expected.masks, measure_prompt=True) as probe:
            for part in parts:
                if shares:
                    with share_prompts(model, 12):
                        model(**part)
                else:
                    model(**part)
        assert_agrees(probe, expected)
        assert_prompt_agrees(probe, expected)


@pytest.mark.parametrize("completion_length", [None, 12])
@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3", "internvl", "idefics3"])
def test_queries_of_the_prompt(name, completion_length):
    model, batch = build(name), make_batch(name, images=(2, 0))
    expected = reference(model, batch)
    probe = run(model, batch, measure_prompt=True)
    assert_agrees(probe, expected)
    assert_prompt_agrees(probe, expected)
    with (
        torch.no_grad(),
        AttentionProbe(model, expected.masks, measure_prompt=True) as probe,
        share_prompts(model, completion_length) as report,
    ):
        model(**batch.inputs)
    assert report.prompts_per_row < 1
    assert_agrees(probe, expected)
    assert_prompt_agrees(probe, expected)


def test_rows_of_a_prompt_that_do_not_stand_together():
    model, batch = build("qwen2_vl"), make_batch("qwen2_vl", order=[4, 0, 3, 1, 5])
    expected = reference(model, batch)
    with (
        torch.no_grad(),
        AttentionProbe(model, expected.masks, measure_prompt=True) as probe,
        share_prompts(model, 12) as report,
    ):
        model(**batch.inputs)
    assert (report.prompts, report.rows) == (2, 5)
    assert_agrees(probe, expected)
    assert_prompt_agrees(probe, expected)


def test_kept_maps_of_some_layers(case):
    model, batch, expected = case
    kept = []
    for layers in (None, [1]):
        with torch.no_grad(), AttentionProbe(model, expected.masks, keep_rows=(1,), keep_layers=layers) as probe:
            model(**batch.inputs)
        kept.append(probe.kept[1])
    assert len(kept[0]) == 2
    assert torch.equal(kept[1], kept[0][1:])
