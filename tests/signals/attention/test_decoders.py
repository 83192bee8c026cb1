"""The probe on decoders with other lists of layers, and layers with other inputs."""

import pytest
import torch
import transformers as hf
from support.models.decoders import DECODERS, FALCON_SDPA, LLAMA, SPEECH, case
from support.models.eager_reference import assert_agrees, assert_prompt_agrees, masks_of, reference, run
from support.models.families import build, make_batch

from vgr_trl.sharing import share_prompts
from vgr_trl.signals import AttentionProbe
from vgr_trl.signals.attention import count_attention_layers
from vgr_trl.utils import ConfigError


@pytest.mark.parametrize("family", DECODERS.values(), ids=DECODERS)
def test_attention(family):
    model, batch = case(family)
    expected = reference(model, batch)
    assert expected.vision[:, :, 0].max() > 0.01
    probe = run(model, batch, measure_prompt=True)
    assert len(probe.mass.vision) == count_attention_layers(model)
    assert_agrees(probe, expected)
    assert_prompt_agrees(probe, expected)


@pytest.mark.parametrize("name", DECODERS)
def test_attention_with_prompts_shared(name):
    """Caches reach the layers under other names in GPT-J and Falcon."""
    model, batch = case(DECODERS[name])
    expected = reference(model, batch)
    base = model.base_model
    with (
        torch.no_grad(),
        AttentionProbe(model, expected.masks, measure_prompt=True) as probe,
        share_prompts(model, 12) as report,
    ):
        base(**batch.inputs)
    assert name not in ("gpt2", "gptj", "falcon") or report.prompts == 2
    assert_agrees(probe, expected)
    assert_prompt_agrees(probe, expected)


def test_models_with_an_encoder():
    model = hf.BartForConditionalGeneration(hf.BartConfig(**SPEECH))
    with pytest.raises(ConfigError, match="BartForConditionalGeneration reads prompts in an encoder"):
        AttentionProbe(model, masks_of(make_batch("llama")))


def test_attention_that_is_looked_up_nowhere():
    with pytest.raises(ConfigError, match="FalconModel looks its attention up nowhere; load it with attn_implem"):
        AttentionProbe(build(FALCON_SDPA), masks_of(make_batch("llama")))


def test_dropout_in_weights_that_are_returned():
    model, batch = case(DECODERS["gptj"])
    for block in model.transformer.h:
        block.attn.attn_dropout.p = 0.5
    model.train()
    with pytest.raises(ConfigError, match="GPTJAttention has dropout in the attention that it returns"):
        run(model, batch)


def test_layers_with_streams():
    """As Gemma 3n's, if its attention took them all."""
    model, batch = case(LLAMA)
    model.model.layers[0].self_attn.register_forward_pre_hook(
        lambda module, args, kwargs: (args, {**kwargs, "hidden_states": kwargs["hidden_states"].unsqueeze(0)}),
        with_kwargs=True,
        prepend=True,
    )
    with pytest.raises(ConfigError, match=r"LlamaAttention takes \(1, 6, 45, 32\): only layers whose attention takes"):
        run(model, batch)


def test_layers_that_regroup_their_input():
    """A layer that attends within windows of 15 of the 45 positions, each window a row of its own."""
    model, batch = case(LLAMA)
    attention = model.model.layers[1].self_attn
    plain = attention.forward

    def forward(hidden_states, position_embeddings, **kwargs):
        windows = tuple(one.expand(6, -1, -1).reshape(18, 15, -1) for one in position_embeddings)
        outputs, weights = plain(hidden_states.reshape(18, 15, 32), position_embeddings=windows, attention_mask=None)
        return outputs.reshape(6, 45, 32), weights

    attention.forward = forward
    message = "attends with 15 queries in 18 rows where 45 positions in 6 rows pass"
    with pytest.raises(ConfigError, match=message):
        run(model, batch)
