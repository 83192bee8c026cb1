"""Families beside those in families.py: text models of other kinds, and models that fall back to plain passes."""

from typing import Any

import torch
import transformers as hf
from support.models.families import (
    BODY,
    CLIP,
    CLOSE,
    EXPERTS,
    IMAGE,
    MARKS,
    MIXED,
    MIXED_3_5,
    MROPE,
    OPEN,
    PAD,
    QWEN,
    QWEN_TOWER,
    SQUARES,
    VOCABULARY,
    WINDOWS,
    Family,
    Picture,
    noise,
    rope,
    row_picture,
    square_picture,
    text_model,
    vision_model,
)  # fmt: skip

STATE_SPACE = {"mamba_d_ssm": 32, "mamba_n_heads": 2, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 16}
GLM4V = {**MARKS, "image_start_token_id": OPEN, "image_end_token_id": CLOSE}
PERCEIVER = {"hidden_size": 32, "resampler_n_latents": 4, "resampler_depth": 1, "resampler_n_heads": 2}
PERCEIVER |= {"resampler_head_dim": 16, "num_key_value_heads": 1}
OVIS2_TOWER = {**SQUARES, "hidden_stride": 2, "vocab_size": 40, "num_visual_indicator_tokens": 2}
OVIS2: dict[str, Any] = {"visual_indicator_token_ids": [OPEN, CLOSE], "vocab_size": VOCABULARY, "hidden_size": 32}
MISTRAL, GEMMA = {"model_type": "mistral"}, {"model_type": "gemma"}
PIXTRAL = {**SQUARES, "model_type": "pixtral", "head_dim": 12}
PALIGEMMA = {"image_token_index": IMAGE, "projection_dim": 32, "pad_token_id": PAD}
SIGLIP = {**CLIP, "model_type": "siglip_vision_model"}
LFM2 = {"model_type": "lfm2", "layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3}
SIGLIP2 = {**SQUARES, "model_type": "siglip2_vision_model", "num_patches": 16}


def mistral3_picture(seed: int) -> Picture:
    """Two rows of two tokens, each row ended by a token of its own."""
    inputs = {"pixel_values": noise(seed, 1, 3, 16, 16), "image_sizes": torch.tensor([[16, 16]])}
    return Picture([IMAGE, IMAGE, OPEN, IMAGE, IMAGE, CLOSE], inputs)


def lfm2_picture(seed: int) -> Picture:
    """16 patches of one image, 8 of another with padding behind them; a token for every 2 by 2."""
    rows = 2 + 2 * (seed % 2)
    inputs = {
        "pixel_values": noise(seed, 1, 16, 3 * 4 * 4),
        "spatial_shapes": torch.tensor([[rows, 4]]),
        "pixel_attention_mask": (torch.arange(16) < 4 * rows).long()[None],
    }
    return Picture([OPEN, *[IMAGE] * rows, CLOSE], inputs)


SHARED_KEYS: dict[str, Any] = {
    **WINDOWS,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": 96,
    "hidden_size_per_layer_input": 8,
}


def gemma4(**text_options: Any) -> Any:
    config = hf.Gemma4Config(
        text_config={**BODY, **WINDOWS, "global_head_dim": 16, "num_global_key_value_heads": 1}
        | {"vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 0, **text_options},
        vision_config={**SQUARES, "num_key_value_heads": 2, "head_dim": 12, "pooling_kernel_size": 2},
        audio_config=None,
        image_token_id=IMAGE,
        boi_token_id=OPEN,
        eoi_token_id=CLOSE,
    )
    return hf.Gemma4ForConditionalGeneration(config)


def gemma4_picture(seed: int) -> Picture:
    """16 patches, pooled to 4 tokens."""
    rows, columns = torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij")
    positions = torch.stack([columns.flatten(), rows.flatten()], dim=-1)[None]
    inputs = {"pixel_values": noise(seed, 1, 16, 3 * 4 * 4), "image_position_ids": positions}
    return Picture([OPEN, *[IMAGE] * 4, CLOSE], inputs)


def gemma4_published() -> Any:
    """Images that see themselves in windowed layers, and layers that take their keys from others."""
    return gemma4(**SHARED_KEYS, use_bidirectional_attention="vision")


def gemma3n() -> Any:
    sparse = {"activation_sparsity_pattern": [0.5] * 6, "laurel_rank": 4}
    return hf.Gemma3nForCausalLM(hf.Gemma3nTextConfig(**{**BODY, **SHARED_KEYS, **sparse}))


def llama4_body() -> dict[str, Any]:
    """A prompt fills more than one chunk, and a chunk ends within the completions."""
    layers = {"num_hidden_layers": 3, "no_rope_layers": [1, 0, 1], "attention_chunk_size": 12, "floor_scale": 16}
    experts = {"intermediate_size_mlp": 48, "num_local_experts": 2, "interleave_moe_layer_step": 2}
    return {**BODY, **layers, **experts}


def llama4_text() -> Any:
    return hf.Llama4ForCausalLM(hf.Llama4TextConfig(**llama4_body()))


LLAMA4_TOWER = {**SQUARES, "projector_input_dim": 24, "projector_output_dim": 24, "vision_output_dim": 24}
LLAMA4_TOWER |= {"intermediate_size": 96}
LLAMA4 = {"image_token_index": IMAGE, "boi_token_index": OPEN, "eoi_token_index": CLOSE}


def qwen3_5_moe() -> Any:
    body = {**BODY, **EXPERTS, **MIXED_3_5, "shared_expert_intermediate_size": 16}
    return hf.Qwen3_5MoeForCausalLM(hf.Qwen3_5MoeTextConfig(**body))


def mamba() -> Any:
    return hf.MambaForCausalLM(
        hf.MambaConfig(vocab_size=BODY["vocab_size"], hidden_size=32, num_hidden_layers=2, state_size=4)
    )


LONG_ROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
OTHERS = {
    family.name: family
    for family in [
        Family("glm4v", vision_model("Glm4v", MROPE, {**QWEN_TOWER, "image_size": 16}, **GLM4V), *QWEN),
        Family("gemma4", gemma4, gemma4_picture, ("mm_token_type_ids",)),
        Family(
            "idefics2",
            vision_model("Idefics2", MISTRAL, SQUARES, perceiver_config=PERCEIVER, image_token_id=IMAGE),
            row_picture,
            per_row=True,
        ),
        Family(
            "mistral3",
            vision_model("Mistral3", MISTRAL, PIXTRAL, image_token_index=IMAGE, spatial_merge_size=2),
            mistral3_picture,
        ),
        Family(
            "ovis2",
            vision_model("Ovis2", {"model_type": "qwen2"}, OVIS2_TOWER, image_token_id=IMAGE, **OVIS2),
            square_picture(4),
        ),
        Family(
            "paligemma", vision_model("PaliGemma", {"model_type": "gemma"}, SIGLIP, **PALIGEMMA), square_picture(16)
        ),
        Family(
            "lfm2_vl", vision_model("Lfm2Vl", LFM2, SIGLIP2, image_token_id=IMAGE, downsample_factor=2), lfm2_picture
        ),
        Family("gemma4_published", gemma4_published, gemma4_picture, ("mm_token_type_ids",)),
        Family("gemma3n", gemma3n),
        Family("llama4_text", llama4_text),
        Family("llama4", vision_model("Llama4", llama4_body(), LLAMA4_TOWER, **LLAMA4), square_picture(4)),
        Family("qwen2", text_model("Qwen2")),
        Family("qwen3_moe", text_model("Qwen3Moe", **EXPERTS)),
        Family("qwen3_next", text_model("Qwen3Next", **EXPERTS, **MIXED, shared_expert_intermediate_size=16)),
        Family("qwen3_5_moe", qwen3_5_moe),
        Family("gemma2", text_model("Gemma2", **WINDOWS)),
        Family(
            "gpt_oss",
            text_model("GptOss", **WINDOWS, num_local_experts=2, num_experts_per_tok=1, rope_parameters=rope()),
        ),
        Family("phi3", text_model("Phi3")),
        Family("phi3_longrope", text_model("Phi3", original_max_position_embeddings=36, rope_parameters=LONG_ROPE)),
        Family("falcon_h1", text_model("FalconH1", **STATE_SPACE)),
        Family("jamba", text_model("Jamba", attn_layer_period=2, attn_layer_offset=1)),
        Family("mamba", mamba),
    ]
}
