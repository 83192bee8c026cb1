"""What flash attention is asked for, since it cannot run here: masks are (B, K) or None, queries end with keys."""

import pytest
import torch
from support.models.eager_reference import (
    TOLERANCE,
    VISION_IDS,
    assert_agrees,
    assert_prompt_agrees,
    difference,
    masks_of,
    reference,
)
from support.models.families import build, make_batch
from transformers.modeling_utils import AttentionInterface

from vgr_trl.sharing import share_prompts
from vgr_trl.signals import AttentionProbe
from vgr_trl.utils import ConfigError


class TestFlash:
    @pytest.fixture
    def calls(self, monkeypatch):
        seen = []

        def attention(module, query, key, value, padding, dropout=0.0, scaling=None, sliding_window=None, **kwargs):
            assert query.size(-1) == key.size(-1) == value.size(-1)
            assert dropout == 0.0
            seen.append((query.size(2), key.size(2), padding is not None))
            rows, queries, keys = len(query), query.size(2), key.size(2)
            groups = query.size(1) // key.size(1)
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
            outputs = torch.zeros(*query.shape[:3], value.size(-1), dtype=query.dtype)
            for row in range(rows):
                here = torch.ones(keys, dtype=torch.bool) if padding is None else padding[row].bool()
                assert len(here) == keys
                k, q = here.nonzero().flatten(), here[-queries:].nonzero().flatten()
                place = torch.arange(len(k) - len(q), len(k)).unsqueeze(1)  # the last query belongs to the last key
                allowed = torch.arange(len(k)) <= place
                if sliding_window is not None and keys > sliding_window:
                    allowed &= torch.arange(len(k)) > place - sliding_window
                scores = query[row][:, q] @ key[row][:, k].transpose(1, 2) * scaling
                weights = scores.masked_fill(~allowed, -torch.inf).softmax(-1)
                outputs[row][:, q] = weights @ value[row][:, k]
            return outputs.transpose(1, 2), None

        known = {**AttentionInterface._global_mapping, "flash_attention_2": attention}
        monkeypatch.setattr(AttentionInterface, "_global_mapping", known)
        return seen

    @pytest.mark.parametrize("padded", [True, False])
    @pytest.mark.parametrize("name", ["qwen2_5_vl", "llava", "mistral"])
    def test_agrees(self, name, padded, calls):
        model = build(name)
        batch = make_batch(name, text=(21, 33) if padded else (24, 24), images=(1, 0) if padded else (1, 1))
        prompt = batch.inputs["input_ids"].size(1) - 12
        if name == "mistral":
            batch.inputs["input_ids"][:, prompt - 6 : prompt - 2] = VISION_IDS[0]
        if not padded:
            batch.inputs["attention_mask"] = torch.ones_like(batch.inputs["attention_mask"])
        expected = reference(model, batch)
        decoder = model.get_decoder()
        model.config._attn_implementation_internal = "flash_attention_2"
        decoder.config._attn_implementation_internal = "flash_attention_2"
        with torch.no_grad(), AttentionProbe(model, expected.masks, measure_prompt=True, keep_rows=(1,)) as probe:
            model(**batch.inputs)
        assert_agrees(probe, expected)
        assert_prompt_agrees(probe, expected)
        assert any(has_mask for _, _, has_mask in calls) == padded
        with (
            torch.no_grad(),
            AttentionProbe(model, expected.masks, rows=[prompt + 9, prompt + 5, prompt - 1]) as probe,
            share_prompts(model, 12) as report,
        ):
            model(**batch.inputs)
        assert report.prompts_per_row < 1
        emitted = [10, 6, 0]
        valid = expected.valid[:, emitted]
        assert difference(probe.mass.vision, expected.vision[:, :, emitted], valid) < TOLERANCE

    def test_packed_sequences(self, calls):
        model, batch = build("llama"), make_batch("llama")
        model.config._attn_implementation_internal = "flash_attention_2"
        bounds = torch.tensor([0, 40], dtype=torch.int32)
        with (
            torch.no_grad(),
            pytest.raises(ConfigError, match="packed sequences: pass one sequence per row, padded"),
            AttentionProbe(model, masks_of(batch)),
        ):
            model(**batch.inputs, cu_seq_lens_q=bounds, cu_seq_lens_k=bounds)
