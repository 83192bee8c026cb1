"""The scorer on decoders with other ways from base model to head."""

import pytest
import transformers as hf
from support.models.decoders import DECODERS, LLAMA, SPEECH, case
from test_scoring import arguments, from_logits
from transformers.modeling_outputs import CausalLMOutput

from vgr_trl.signals import RolloutScorer
from vgr_trl.utils import ConfigError


@pytest.mark.parametrize("shares", ["auto", "off"])
@pytest.mark.parametrize("family", DECODERS.values(), ids=DECODERS)
def test_scores(family, shares):
    """Heads that call the decoder inside of their base model (OPT, Bart, Whisper) get the hidden states too."""
    model, batch = case(family)
    logps, entropies = from_logits(model, batch)
    tensors, options = arguments(batch)
    signals = RolloutScorer(model, share_prompts=shares).score(*tensors, **options, attention=False)
    assert (signals.logps - logps).abs().max() < 1e-5
    assert (signals.entropies - entropies).abs().max() < 2e-5


def test_a_head_that_calls_neither_base_model_nor_decoder():
    model, batch = case(LLAMA)
    model.forward = lambda input_ids, **kwargs: CausalLMOutput(
        logits=model.lm_head(model.model.embed_tokens(input_ids))
    )
    tensors, options = arguments(batch)
    with pytest.raises(ConfigError, match="LlamaForCausalLM called its base model 0 times where one call was expected"):
        RolloutScorer(model).score(*tensors, **options, attention=False)


def test_models_with_an_encoder():
    model = hf.BartForConditionalGeneration(hf.BartConfig(**SPEECH))
    with pytest.raises(ConfigError, match="BartForConditionalGeneration reads prompts in an encoder"):
        RolloutScorer(model)
