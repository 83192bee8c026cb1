"""Families beside those in families.py: text models of other kinds, and models that fall back to plain passes."""

from typing import Any

import torch
import transformers as hf
from support.models.families import (
    BODY,
    CLIP,
    CLOSE,
    IMAGE,
    MARKS,
    OPEN,
    PAD,
    VOCABULARY,
    Family,
    Picture,
    noise,
    qwen_picture,
    rope,
    row_picture,
    square_picture,
    text_model,
)

VISION = {key: value for key, value in CLIP.items() if key != "projection_dim"}
WINDOWS: dict[str, Any] = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]}
STATE_SPACE = {"mamba_d_ssm": 32, "mamba_n_heads": 2, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 16}
FEW_EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def glm4v() -> Any:
    vision = {"depth": 2, "hidden_size": 24, "out_hidden_size": 32, "num_heads": 2, "intermediate_size": 32}
    vision |= {"patch_size": 4, "image_size": 16}
    config = hf.Glm4vConfig(
        text_config={**BODY, "rope_parameters": rope(mrope_section=[2, 3, 3])},
        vision_config=vision,
        **MARKS,
        image_start_token_id=OPEN,
        image_end_token_id=CLOSE,
    )
    return hf.Glm4vForConditionalGeneration(config)


def idefics2() -> Any:
    perceiver = {"hidden_size": 32, "resampler_n_latents": 4, "resampler_depth": 1, "resampler_n_heads": 2}
    perceiver |= {"resampler_head_dim": 16, "num_key_value_heads": 1}
    config = hf.Idefics2Config(
        text_config={**BODY, "model_type": "mistral"},
        vision_config=VISION,
        perceiver_config=perceiver,
        image_token_id=IMAGE,
    )
    return hf.Idefics2ForConditionalGeneration(config)


def ovis2() -> Any:
    vision = {**VISION, "hidden_stride": 2, "vocab_size": 40, "num_visual_indicator_tokens": 2}
    config = hf.Ovis2Config(
        text_config={**BODY, "model_type": "qwen2"},
        vision_config=vision,
        image_token_id=IMAGE,
        visual_indicator_token_ids=[OPEN, CLOSE],
        vocab_size=VOCABULARY,
        hidden_size=BODY["hidden_size"],
    )
    return hf.Ovis2ForConditionalGeneration(config)


def mistral3() -> Any:
    config = hf.Mistral3Config(
        text_config={**BODY, "model_type": "mistral"},
        vision_config={**VISION, "model_type": "pixtral", "head_dim": 12},
        image_token_index=IMAGE,
        spatial_merge_size=2,
    )
    return hf.Mistral3ForConditionalGeneration(config)


def mistral3_picture(seed: int) -> Picture:
    """Two rows of two tokens, each row ended by a token of its own."""
    inputs = {"pixel_values": noise(seed, 1, 3, 16, 16), "image_sizes": torch.tensor([[16, 16]])}
    return Picture([IMAGE, IMAGE, OPEN, IMAGE, IMAGE, CLOSE], inputs)


def paligemma() -> Any:
    config = hf.PaliGemmaConfig(
        text_config={**BODY, "model_type": "gemma"},
        vision_config={**CLIP, "model_type": "siglip_vision_model"},
        image_token_index=IMAGE,
        projection_dim=32,
        pad_token_id=PAD,
    )
    return hf.PaliGemmaForConditionalGeneration(config)


def lfm2_vl() -> Any:
    body = {**BODY, "model_type": "lfm2", "layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3}
    vision = {**VISION, "model_type": "siglip2_vision_model", "num_patches": 16}
    config = hf.Lfm2VlConfig(text_config=body, vision_config=vision, image_token_id=IMAGE, downsample_factor=2)
    return hf.Lfm2VlForConditionalGeneration(config)


def lfm2_picture(seed: int) -> Picture:
    """16 patches of one image, 8 of another with padding behind them; a token for every 2 by 2."""
    rows = 2 + 2 * (seed % 2)
    inputs = {
        "pixel_values": noise(seed, 1, 16, 3 * 4 * 4),
        "spatial_shapes": torch.tensor([[rows, 4]]),
        "pixel_attention_mask": (torch.arange(16) < 4 * rows).long()[None],
    }
    return Picture([OPEN, *[IMAGE] * rows, CLOSE], inputs)


def qwen3_next() -> Any:
    linear = {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
    linear |= {"linear_num_key_heads": 2, "linear_num_value_heads": 2}
    layers = {"layer_types": ["linear_attention", "full_attention"]}
    return text_model("Qwen3Next", **EXPERTS, **linear, **layers, shared_expert_intermediate_size=16)()


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
        vision_config={**VISION, "num_key_value_heads": 2, "head_dim": 12, "pooling_kernel_size": 2},
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


def llama4() -> Any:
    sides = {"projector_input_dim": 24, "projector_output_dim": 24, "vision_output_dim": 24, "intermediate_size": 96}
    config = hf.Llama4Config(
        vision_config={**VISION, **sides},
        text_config=llama4_body(),
        image_token_index=IMAGE,
        boi_token_index=OPEN,
        eoi_token_index=CLOSE,
    )
    return hf.Llama4ForConditionalGeneration(config)


def qwen3_5_moe() -> Any:
    linear = {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
    linear |= {"linear_num_key_heads": 2, "linear_num_value_heads": 2}
    body = {**BODY, **EXPERTS, **linear, "layer_types": ["linear_attention", "full_attention"]}
    body |= {"shared_expert_intermediate_size": 16}
    body |= {"rope_parameters": rope(mrope_section=[2, 1, 1], mrope_interleaved=True, partial_rotary_factor=0.5)}
    return hf.Qwen3_5MoeForCausalLM(hf.Qwen3_5MoeTextConfig(**body))


def mamba() -> Any:
    return hf.MambaForCausalLM(
        hf.MambaConfig(vocab_size=BODY["vocab_size"], hidden_size=32, num_hidden_layers=2, state_size=4)
    )


LONG_ROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
OTHERS = {
    family.name: family
    for family in [
        Family("glm4v", glm4v, qwen_picture(), ("mm_token_type_ids",)),
        Family("gemma4", gemma4, gemma4_picture, ("mm_token_type_ids",)),
        Family("idefics2", idefics2, row_picture, per_row=True),
        Family("mistral3", mistral3, mistral3_picture),
        Family("ovis2", ovis2, square_picture(4)),
        Family("paligemma", paligemma, square_picture(16)),
        Family("lfm2_vl", lfm2_vl, lfm2_picture),
        Family("gemma4_published", gemma4_published, gemma4_picture, ("mm_token_type_ids",)),
        Family("gemma3n", gemma3n),
        Family("llama4_text", llama4_text),
        Family("llama4", llama4, square_picture(4)),
        Family("qwen2", text_model("Qwen2")),
        Family("qwen3_moe", text_model("Qwen3Moe", **EXPERTS)),
        Family("qwen3_next", qwen3_next),
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
