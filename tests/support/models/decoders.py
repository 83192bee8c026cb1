"""Tiny text models whose layers, attention or heads are built otherwise than Llama's."""

from typing import Any

import transformers as hf
from support.models.eager_reference import VISION_IDS
from support.models.families import BODY, EOS, PAD, VOCABULARY, Batch, Family, build, make_batch, text_model

IDS = {"vocab_size": VOCABULARY, "pad_token_id": PAD, "eos_token_id": EOS, "bos_token_id": None}
GPT = {**IDS, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 512, "tie_word_embeddings": False}
FALCON = {**IDS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "tie_word_embeddings": False}
SPEECH = {**IDS, "d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 48}
SPEECH |= {"encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 48, "max_target_positions": 512}
ALTUP: dict[str, Any] = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY, "laurel_rank": 4}


def _gemma3n(shared: int) -> Any:
    kinds = ["sliding_attention", "full_attention"] * 2
    body = {**BODY, **ALTUP, "num_hidden_layers": 4, "layer_types": kinds, "sliding_window": 24}
    config = hf.Gemma3nTextConfig(**body, num_kv_shared_layers=shared, activation_sparsity_pattern=[0.0] * 4)
    return hf.Gemma3nForCausalLM(config)


def _falcon(alibi: bool, implementation: str = "eager") -> Any:
    return hf.FalconForCausalLM(hf.FalconConfig(**FALCON, alibi=alibi, attn_implementation=implementation))


def _whisper() -> Any:
    return hf.WhisperForCausalLM(hf.WhisperConfig(**SPEECH, decoder_start_token_id=EOS, tie_word_embeddings=False))


DECODERS = {
    family.name: family
    for family in [
        Family("gemma3n", lambda: _gemma3n(shared=0)),
        Family("gemma3n with shared keys", lambda: _gemma3n(shared=2)),
        Family("gpt2", lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**GPT))),
        Family("gptj", lambda: hf.GPTJForCausalLM(hf.GPTJConfig(**GPT, rotary_dim=8))),
        Family("falcon", lambda: _falcon(alibi=False)),
        Family("falcon with alibi", lambda: _falcon(alibi=True)),
        Family("opt", text_model("OPT", ffn_dim=48, word_embed_proj_dim=32, dropout=0.0)),
        Family("bart", lambda: hf.BartForCausalLM(hf.BartConfig(**SPEECH, tie_word_embeddings=False))),
        Family("whisper", _whisper),
    ]
}
FALCON_SDPA = Family("falcon with sdpa", lambda: _falcon(False, "sdpa"))


def case(family: Family) -> tuple[Any, Batch]:
    """With words in the place of image tokens."""
    model, batch = build(family), make_batch(family)
    prompt = batch.inputs["input_ids"].size(1) - batch.completion_length
    batch.inputs["input_ids"][:, prompt - 6 : prompt - 2] = VISION_IDS[0]
    return model, batch
