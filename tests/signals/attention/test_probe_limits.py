"""Attention that is known by construction, and what a probe refuses."""

import pytest
import torch
from support.models.eager_reference import masks_of, run
from support.models.families import Family, build, make_batch, text_model
from support.models.other_families import OTHERS
from transformers.modeling_utils import AttentionInterface

from vgr_trl.signals import AttentionProbe, ModalityMasks, build_modality_masks
from vgr_trl.utils import ConfigError


class TestByConstruction:
    def test_uniform_attention(self):
        """With queries of 0 every key in sight gets the same: V / keys in sight, and VGR is 1."""
        model, batch = build("qwen2_5_vl"), make_batch("qwen2_5_vl", images=(1, 2))
        for layer in model.get_decoder().layers:
            torch.nn.init.zeros_(layer.self_attn.q_proj.weight)
            torch.nn.init.zeros_(layer.self_attn.q_proj.bias)
        mass = run(model, batch).mass
        in_sight = batch.inputs["attention_mask"].cumsum(1)[:, -13:-1]  # (N, T), the query itself included
        assert torch.allclose(mass.vision, (mass.num_vision[:, None] / in_sight).expand(2, -1, -1), atol=1e-6)
        assert torch.allclose(mass.instruction, (mass.num_instruction[:, None] / in_sight).expand(2, -1, -1), atol=1e-6)

    @pytest.mark.parametrize(
        ("looked_at", "vision", "instruction"),
        [("one vision token", 1.0, 0.0), ("one word", 0.0, 1.0), ("both", 0.5, 0.5), ("a special token", 0.0, 0.0)],
    )
    def test_attention_on_chosen_tokens(self, looked_at, vision, instruction):
        """Keys of marked tokens are 1 where every query has a large entry; layers add nothing to the embeddings."""
        model = build(
            Family("qwen2", text_model("Qwen2", rope_parameters={"rope_type": "default", "rope_theta": 1e30}))
        )
        ids = torch.tensor([[0, 1, 20, 2, 2, 5, 21, 22, 23, 30, 31]])  # pad, special, word, three of an image, words
        marked = {"one vision token": [5], "one word": [22], "both": [5, 22], "a special token": [1]}[looked_at]
        for layer in model.model.layers:
            for part in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.o_proj, layer.mlp.down_proj):
                torch.nn.init.zeros_(part.weight)
            torch.nn.init.zeros_(layer.self_attn.k_proj.bias)
            layer.self_attn.k_proj.weight.data[15, 0] = 1.0  # the slowest rotation: none, at these positions
            layer.self_attn.q_proj.bias.data.zero_().view(2, 16)[:, 15] = 1000.0
        model.model.embed_tokens.weight.data[:, 0] = 0.0
        model.model.embed_tokens.weight.data[marked, 0] = 3.0
        model.model.embed_tokens.weight.data[marked, 1:] = 0.1  # equal after normalisation
        masks = build_modality_masks(
            ids[:, :9], (ids[:, :9] != 0).long(), vision_token_ids=[2, 5], special_token_ids=[0, 1]
        )
        with torch.no_grad(), AttentionProbe(model, masks) as probe:
            model(input_ids=ids, attention_mask=(ids != 0).long())
        assert (int(probe.mass.num_vision), int(probe.mass.num_instruction)) == (3, 4)
        assert torch.allclose(probe.mass.vision, torch.full((2, 1, 2), vision), atol=1e-6)
        assert torch.allclose(probe.mass.instruction, torch.full((2, 1, 2), instruction), atol=1e-6)


class TestRefusals:
    @pytest.fixture
    def case(self):
        model, batch = build("llava"), make_batch("llava")
        return model, batch, masks_of(batch)

    def test_attention_that_is_not_supported(self, case):
        model, _, masks = case
        model.set_attn_implementation("flex_attention")
        with pytest.raises(ConfigError, match="is 'flex_attention'; load the model with one of sdpa, eager, flash_at"):
            AttentionProbe(model, masks)

    def test_compiled_models(self, case):
        model, _, masks = case
        model._compiled_call_impl = model._call_impl  # as `model.compile()` does
        with pytest.raises(ConfigError, match="the model is compiled, .* switch torch.compile off"):
            AttentionProbe(model, masks)

    def test_a_model_without_attention(self):
        with pytest.raises(ConfigError, match="Attention cannot be measured"):
            AttentionProbe(build(OTHERS["mamba"]), ModalityMasks(torch.ones(1, 2) > 0, torch.ones(1, 2) > 0))

    def test_rows(self, case):
        model, batch, masks = case
        fewer = ModalityMasks(masks.vision[:4], masks.instruction[:4])
        with torch.no_grad():
            with pytest.raises(ConfigError, match="masks for 4 rows, but 6 pass"), AttentionProbe(model, fewer):
                model(**batch.inputs)
            with AttentionProbe(model, masks) as probe:
                model(**{key: value[:4] for key, value in batch.inputs.items()})
        for name in ("mass", "kept", "prompt_mass"):
            with pytest.raises(ConfigError, match="masks for 6 rows, but 4 have passed"):
                getattr(probe, name)
        with pytest.raises(ConfigError, match=r"keep_rows of the probe is \[6\]: give rows in \[0, 6\)"):
            AttentionProbe(model, masks, keep_rows=[6])

    @pytest.mark.parametrize("rows", [[], [63], [-64], slice(5, 5)])
    def test_positions(self, case, rows):
        model, batch, masks = case
        assert batch.inputs["input_ids"].size(1) == 63
        with (
            torch.no_grad(),
            pytest.raises(ConfigError, match=r"give positions in \[0, 63\), at least one"),
            AttentionProbe(model, masks, rows=rows),
        ):
            model(**batch.inputs)

    def test_masks_of_other_sequences(self, case):
        model, batch, masks = case
        longer = ModalityMasks(*(torch.nn.functional.pad(one, (0, 40)) for one in (masks.vision, masks.instruction)))
        with (
            torch.no_grad(),
            pytest.raises(ConfigError, match="masks for 91 positions, and 63 pass"),
            AttentionProbe(model, longer),
        ):
            model(**batch.inputs)

    def test_sequences_behind_a_cache(self, case):
        """As long as the masks, but some of it has passed before."""
        model, batch, masks = case
        ids, mask = batch.inputs["input_ids"], batch.inputs["attention_mask"]
        with torch.no_grad():
            cache = model(**batch.inputs, use_cache=True).past_key_values
            longer = torch.cat([mask, torch.ones_like(mask)], dim=1)
            with pytest.raises(ConfigError, match="without a cache"), AttentionProbe(model, masks):
                model(input_ids=ids.clamp(min=8), attention_mask=longer, past_key_values=cache)

    def test_prompt_that_was_not_asked_for(self, case):
        model, batch, _ = case
        with pytest.raises(ConfigError, match="measure_prompt of the probe is off"):
            _ = run(model, batch).prompt_mass

    def test_registry_is_left_as_it_was(self, case):
        model, _, masks = case
        before = AttentionInterface.get_interface

        def stop():
            assert AttentionInterface.get_interface is not before
            raise RuntimeError("stop")

        with pytest.raises(RuntimeError, match="stop"), AttentionProbe(model, masks):
            stop()
        assert AttentionInterface.get_interface is before
        assert not model.base_model._forward_pre_hooks
        assert not model.get_decoder().layers[0]._forward_pre_hooks
