"""Tiny text models whose layers, attention or heads are built otherwise than Llama's."""

from typing import Any

import transformers as hf
from support.models.eager_reference import VISION_IDS
from support.models.families import EOS, PAD, VOCABULARY, Batch, Family, build, make_batch, text_model

IDS = {"vocab_size": VOCABULARY, "pad_token_id": PAD, "eos_token_id": EOS, "bos_token_id": None}
GPT = {**IDS, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 512, "tie_word_embeddings": False}
FALCON = {**IDS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "tie_word_embeddings": False}
SPEECH = {**IDS, "d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 48}
SPEECH |= {"encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 48, "max_target_positions": 512}


DECODERS = {
    family.name: family
    for family in [
        Family("gpt2", lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**GPT))),
        Family("falcon", lambda: hf.FalconForCausalLM(hf.FalconConfig(**FALCON))),
        Family("opt", text_model("OPT", ffn_dim=48, word_embed_proj_dim=32, dropout=0.0)),
        Family("bart", lambda: hf.BartForCausalLM(hf.BartConfig(**SPEECH, tie_word_embeddings=False))),
    ]
}


def case(family: Family) -> tuple[Any, Batch]:
    """With words in the place of image tokens."""
    model, batch = build(family), make_batch(family)
    prompt = batch.inputs["input_ids"].size(1) - batch.completion_length
    batch.inputs["input_ids"][:, prompt - 6 : prompt - 2] = VISION_IDS[0]
    return model, batch
