"""One tiny random model per family, and batches of G completions per prompt as TRL hands them to it.

`OTHERS` are text models of other kinds, and models that fall back to plain passes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers as hf

from vgr_trl.efficiency.vision import parameters_of_tower
from vgr_trl.sharing.model_support import base_of, causal_model

PAD, EOS, IMAGE, OPEN, CLOSE, VIDEO, TEXT = 0, 1, 2, 3, 4, 5, 8  # TEXT: the first of the ordinary tokens
VOCABULARY = 96
PIXEL_INPUTS = (
    *("pixel_values", "image_grid_thw", "image_sizes"),
    *("pixel_attention_mask", "image_position_ids", "spatial_shapes"),
)

BODY = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 512,
    "pad_token_id": PAD, "eos_token_id": EOS, "bos_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
MARKS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": OPEN, "vision_end_token_id": CLOSE}
TOWER = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
SQUARES = {**TOWER, "image_size": 16, "patch_size": 4}
CLIP = {**SQUARES, "projection_dim": 24}
QWEN_TOWER = {"depth": 2, "hidden_size": 24, "out_hidden_size": 32, "num_heads": 2, "intermediate_size": 32}
QWEN_TOWER |= {"patch_size": 4}
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}}
WINDOWS: dict[str, Any] = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LINEAR = {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
LINEAR |= {"linear_num_key_heads": 2, "linear_num_value_heads": 2}
MIXED: dict[str, Any] = {**LINEAR, "layer_types": ["linear_attention", "full_attention"]}


@dataclass(frozen=True)
class Picture:
    """The tokens that stand for one image, and its pixel inputs."""

    tokens: list[int]
    inputs: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Family:
    """How to build a tiny model, and how one of its images looks."""

    name: str
    build: Callable[[], Any]
    picture: Callable[[int], Picture] | None = None  # seed -> image
    per_token: tuple[str, ...] = ()  # token type inputs
    per_row: bool = False  # pixel inputs are padded to one entry per row
    lora: tuple[str, ...] = ("q_proj", "v_proj")


@dataclass
class Batch:
    """N rows of P + T tokens: the completions of each prompt stand together."""

    inputs: dict[str, Any]
    completion_length: int
    prompts: int
    groups: list[int] = field(default_factory=list)

    def prompt_inputs(self) -> dict[str, Any]:
        """What `generate` gets for these rows."""
        end = -self.completion_length
        cut = {name: value if name in PIXEL_INPUTS else value[:, :end] for name, value in self.inputs.items()}
        return cut


def randomise(model: Any, seed: int = 0) -> Any:
    """Weights of a sensible size in every parameter; some start at zero, which hides the image."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2:
            scale = 1.0 if "embed_tokens" in name else parameter[0].numel() ** -0.5
            parameter.data = torch.randn(parameter.shape, generator=generator) * scale
        elif name.endswith("bias"):
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.02
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = EOS, PAD
    return model.eval()


def noise(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rope(**more: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10000.0, **more}


def vision_model(kind: str, text: dict[str, Any], vision: dict[str, Any], **options: Any) -> Callable[[], Any]:
    """`text`: what differs from `BODY`."""

    def build() -> Any:
        config = getattr(hf, f"{kind}Config")(text_config={**BODY, **text}, vision_config=vision, **options)
        return getattr(hf, f"{kind}ForConditionalGeneration")(config)

    return build


def text_model(kind: str, **options: Any) -> Callable[[], Any]:
    """`options`: what differs from `BODY`; of a kind with images, its text model alone."""

    def build() -> Any:
        config = getattr(hf, f"{kind}TextConfig", None) or getattr(hf, f"{kind}Config")
        return getattr(hf, f"{kind}ForCausalLM")(config(**{**BODY, **options}))

    return build


QWEN2_TOWER = {"depth": 2, "embed_dim": 24, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4}
QWEN3_TOWER = {**QWEN_TOWER, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
ROPE_3_5 = rope(mrope_section=[2, 1, 1], mrope_interleaved=True, partial_rotary_factor=0.5)
MIXED_3_5 = {**MIXED, "rope_parameters": ROPE_3_5}
LLAMA, LLAVA_TOWER = {"model_type": "llama"}, {**CLIP, "model_type": "clip_vision_model"}
PINPOINTS = [[16, 32], [32, 16], [32, 32]]
GEMMA3 = {"image_token_index": IMAGE, "boi_token_index": OPEN, "eoi_token_index": CLOSE, "mm_tokens_per_image": 4}
IDEFICS3: dict[str, Any] = {"image_token_id": IMAGE, "scale_factor": 2, "pad_token_id": PAD}


def qwen_picture(temporal: int = 2, patch: int = 4) -> Callable[[int], Picture]:
    def picture(seed: int) -> Picture:
        grid = [1, 4, 4 + 2 * (seed % 2)]
        patches = grid[1] * grid[2]
        values = noise(seed, patches, 3 * temporal * patch * patch)
        inputs = {"pixel_values": values, "image_grid_thw": torch.tensor([grid])}
        return Picture([OPEN, *[IMAGE] * (patches // 4), CLOSE], inputs)

    return picture


def square_picture(tokens: int) -> Callable[[int], Picture]:
    def picture(seed: int) -> Picture:
        return Picture([OPEN, *[IMAGE] * tokens, CLOSE], {"pixel_values": noise(seed, 1, 3, 16, 16)})

    return picture


def _tiled_picture(seed: int) -> Picture:
    tiles = 1 + 2 * (seed % 2)  # InternVL: one tile, or two and a thumbnail
    return Picture([OPEN, *[IMAGE] * (4 * tiles), CLOSE], {"pixel_values": noise(seed, tiles, 3, 16, 16)})


def _pinpoint_picture(seed: int) -> Picture:
    """LLaVA-Next: base image, then the tiles without padding, each row of patches ended by a newline token."""
    height, width = [(16, 32), (32, 32)][seed % 2]
    tiles = 1 + height * width // 256
    pixels = torch.zeros(1, 5, 3, 16, 16)
    pixels[0, :tiles] = noise(seed, tiles, 3, 16, 16)
    tokens = 16 + (height // 4) * (width // 4 + 1)
    inputs = {"pixel_values": pixels, "image_sizes": torch.tensor([[height, width]])}
    return Picture([OPEN, *[IMAGE] * tokens, CLOSE], inputs)


def row_picture(seed: int) -> Picture:
    inputs = {"pixel_values": noise(seed, 1, 1, 3, 16, 16), "pixel_attention_mask": torch.ones(1, 1, 16, 16).long()}
    return Picture([OPEN, *[IMAGE] * 4, CLOSE], inputs)


QWEN = (qwen_picture(), ("mm_token_type_ids",))
FAMILIES = {
    family.name: family
    for family in [
        Family("qwen2_vl", vision_model("Qwen2VL", MROPE, QWEN2_TOWER, **MARKS), *QWEN),
        Family("qwen2_5_vl", vision_model("Qwen2_5_VL", MROPE, {**QWEN_TOWER, "window_size": 16,
            "fullatt_block_indexes": [1]}, **MARKS), *QWEN),
        Family("qwen3_vl", vision_model("Qwen3VL", MROPE, QWEN3_TOWER, **MARKS), *QWEN),
        Family("qwen3_vl_moe", vision_model("Qwen3VLMoe", MROPE | EXPERTS, QWEN3_TOWER, **MARKS), *QWEN),
        Family("qwen3_5", vision_model("Qwen3_5", MIXED_3_5, {**QWEN3_TOWER, "deepstack_visual_indexes": []},
            **MARKS), *QWEN, lora=("q_proj", "in_proj_qkv")),
        Family("gemma3", vision_model("Gemma3", WINDOWS, SQUARES, **GEMMA3, tie_word_embeddings=False),
            square_picture(4), ("token_type_ids",)),
        Family("llava", vision_model("Llava", LLAMA, LLAVA_TOWER, image_token_index=IMAGE), square_picture(16)),
        Family("llava_next", vision_model("LlavaNext", LLAMA, LLAVA_TOWER, image_token_index=IMAGE,
            image_grid_pinpoints=PINPOINTS), _pinpoint_picture),
        Family("internvl", vision_model("InternVL", {"model_type": "qwen2"}, {**TOWER, "image_size": [16, 16],
            "patch_size": [4, 4]}, image_token_id=IMAGE, downsample_ratio=0.5), _tiled_picture),
        Family("idefics3", vision_model("Idefics3", LLAMA, SQUARES, **IDEFICS3), row_picture, per_row=True),
        Family("smolvlm", vision_model("SmolVLM", LLAMA, SQUARES, **IDEFICS3), row_picture, per_row=True),
        Family("qwen3", text_model("Qwen3")),
        Family("llama", text_model("Llama")),
        Family("gemma3_text", text_model("Gemma3", **WINDOWS)),
        Family("mistral", text_model("Mistral", sliding_window=24)),
    ]
}  # fmt: skip


STATE_SPACE = {"mamba_d_ssm": 32, "mamba_n_heads": 2, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 16}
GLM4V = {**MARKS, "image_start_token_id": OPEN, "image_end_token_id": CLOSE}
PERCEIVER = {"hidden_size": 32, "resampler_n_latents": 4, "resampler_depth": 1, "resampler_n_heads": 2}
PERCEIVER |= {"resampler_head_dim": 16, "num_key_value_heads": 1}
OVIS2_TOWER = {**SQUARES, "hidden_stride": 2, "vocab_size": 40, "num_visual_indicator_tokens": 2}
OVIS2: dict[str, Any] = {"visual_indicator_token_ids": [OPEN, CLOSE], "vocab_size": VOCABULARY, "hidden_size": 32}
MISTRAL = {"model_type": "mistral"}
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
GEMMA4 = {**WINDOWS, "global_head_dim": 16, "num_global_key_value_heads": 1}
GEMMA4 |= {"vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 0}
GEMMA4_TOWER = {**SQUARES, "num_key_value_heads": 2, "head_dim": 12, "pooling_kernel_size": 2}
GEMMA4_MARKS = {"image_token_id": IMAGE, "boi_token_id": OPEN, "eoi_token_id": CLOSE, "audio_config": None}
# Images that see themselves in windowed layers, and layers that take their keys from others.
GEMMA4_PUBLISHED = {**GEMMA4, **SHARED_KEYS, "use_bidirectional_attention": "vision"}


def gemma4_picture(seed: int) -> Picture:
    """16 patches, pooled to 4 tokens."""
    rows, columns = torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij")
    positions = torch.stack([columns.flatten(), rows.flatten()], dim=-1)[None]
    inputs = {"pixel_values": noise(seed, 1, 16, 3 * 4 * 4), "image_position_ids": positions}
    return Picture([OPEN, *[IMAGE] * 4, CLOSE], inputs)


GEMMA4_IMAGES = (gemma4_picture, ("mm_token_type_ids",))
# A prompt fills more than one chunk, and a chunk ends within the completions.
LLAMA4_BODY: dict[str, Any] = {"num_hidden_layers": 3, "no_rope_layers": [1, 0, 1], "attention_chunk_size": 12}
LLAMA4_BODY |= {"floor_scale": 16, "intermediate_size_mlp": 48, "num_local_experts": 2, "interleave_moe_layer_step": 2}
LLAMA4_TOWER = {**SQUARES, "projector_input_dim": 24, "projector_output_dim": 24, "vision_output_dim": 24}
LLAMA4_TOWER |= {"intermediate_size": 96}
LLAMA4 = {"image_token_index": IMAGE, "boi_token_index": OPEN, "eoi_token_index": CLOSE}


MAMBA = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}
LONG_ROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
OTHERS = {
    family.name: family
    for family in [
        Family("glm4v", vision_model("Glm4v", MROPE, {**QWEN_TOWER, "image_size": 16}, **GLM4V), *QWEN),
        Family("gemma4", vision_model("Gemma4", GEMMA4, GEMMA4_TOWER, **GEMMA4_MARKS), *GEMMA4_IMAGES),
        Family("idefics2", vision_model("Idefics2", MISTRAL, SQUARES, perceiver_config=PERCEIVER,
            image_token_id=IMAGE), row_picture, per_row=True),
        Family("mistral3", vision_model("Mistral3", MISTRAL, PIXTRAL, image_token_index=IMAGE, spatial_merge_size=2),
            mistral3_picture),
        Family("ovis2", vision_model("Ovis2", {"model_type": "qwen2"}, OVIS2_TOWER, image_token_id=IMAGE, **OVIS2),
            square_picture(4)),
        Family("paligemma", vision_model("PaliGemma", {"model_type": "gemma"}, SIGLIP, **PALIGEMMA),
            square_picture(16)),
        Family("lfm2_vl", vision_model("Lfm2Vl", LFM2, SIGLIP2, image_token_id=IMAGE, downsample_factor=2),
            lfm2_picture),
        Family("gemma4_published", vision_model("Gemma4", GEMMA4_PUBLISHED, GEMMA4_TOWER, **GEMMA4_MARKS),
            *GEMMA4_IMAGES),
        Family("gemma3n", text_model("Gemma3n", **SHARED_KEYS, activation_sparsity_pattern=[0.5] * 6, laurel_rank=4)),
        Family("llama4_text", text_model("Llama4", **LLAMA4_BODY)),
        Family("llama4", vision_model("Llama4", LLAMA4_BODY, LLAMA4_TOWER, **LLAMA4), square_picture(4)),
        Family("qwen2", text_model("Qwen2")),
        Family("qwen3_moe", text_model("Qwen3Moe", **EXPERTS)),
        Family("qwen3_next", text_model("Qwen3Next", **EXPERTS, **MIXED, shared_expert_intermediate_size=16)),
        Family("qwen3_5_moe", text_model("Qwen3_5Moe", **EXPERTS, **MIXED_3_5, shared_expert_intermediate_size=16)),
        Family("gemma2", text_model("Gemma2", **WINDOWS)),
        Family("gpt_oss", text_model("GptOss", **WINDOWS, num_local_experts=2, num_experts_per_tok=1,
            rope_parameters=rope())),
        Family("phi3", text_model("Phi3")),
        Family("phi3_longrope", text_model("Phi3", original_max_position_embeddings=36, rope_parameters=LONG_ROPE)),
        Family("falcon_h1", text_model("FalconH1", **STATE_SPACE)),
        Family("jamba", text_model("Jamba", attn_layer_period=2, attn_layer_offset=1)),
        Family("mamba", lambda: hf.MambaForCausalLM(hf.MambaConfig(**MAMBA))),
    ]
}  # fmt: skip


def build(name: "str | Family", seed: int = 0) -> Any:
    """The tiny model of a family, with random weights."""
    torch.manual_seed(seed)
    family = FAMILIES[name] if isinstance(name, str) else name
    return randomise(family.build(), seed)


def with_frozen_tower(model: Any) -> Any:
    """The model, without gradients in vision tower and merger."""
    for parameter in parameters_of_tower(base_of(causal_model(model))):
        parameter.requires_grad_(False)
    return model


def make_batch(
    name: "str | Family",
    *,
    images: Sequence[int] = (1, 1),
    generations: int = 3,
    text: Sequence[int] = (21, 33),
    completion_length: int = 12,
    seed: int = 0,
    order: Sequence[int] | None = None,
    returned: Sequence[int] = (),
) -> Batch:
    """Left-padded prompts of `text[i]` words with `images[i]` images, each with completions of unequal length.

    `order` rearranges the rows, which stand prompt by prompt otherwise. `returned`: images behind the second word of
    each completion of a prompt, which make it longer.
    """
    family = FAMILIES[name] if isinstance(name, str) else name
    generator = torch.Generator().manual_seed(seed)

    def words(count: int) -> list[int]:
        return torch.randint(TEXT, VOCABULARY, (count,), generator=generator).tolist()

    prompts, pictures = [], []
    for number, (count, length) in enumerate(zip(images, text, strict=True)):
        shown = [family.picture(seed + 10 * number + one) for one in range(count)] if family.picture else []
        tokens = words(length // 2)
        for picture in shown:
            tokens += picture.tokens
        prompts.append(tokens + words(length - length // 2))
        pictures.append(shown)
    longest = max(len(prompt) for prompt in prompts)
    completions, row_pictures, groups = [], [], []
    for number in range(len(prompts)):
        for one in range(generations):
            behind = [family.picture(seed + 100 + 10 * number + each) for each in range(sum(returned[one : one + 1]))]
            body = words(completion_length - (2 * one + number) % (completion_length - 2))
            completions.append(body[:2] + [token for picture in behind for token in picture.tokens] + body[2:])
            row_pictures.append(pictures[number] + behind)
            groups.append(number)
    completion_length = max(completion_length, *map(len, completions))
    rows, masks = [], []
    for number, body in zip(groups, completions, strict=True):
        missing, padding = longest - len(prompts[number]), completion_length - len(body)
        rows.append([PAD] * missing + prompts[number] + body + [PAD] * padding)
        masks.append([0] * missing + [1] * (len(prompts[number]) + len(body)) + [0] * padding)
    order = range(len(rows)) if order is None else order
    rows, masks, row_pictures, groups = ([part[i] for i in order] for part in (rows, masks, row_pictures, groups))
    ids, mask = torch.tensor(rows), torch.tensor(masks)
    inputs = {"input_ids": ids, "attention_mask": mask, **_pixels(family, row_pictures)}
    for kind in family.per_token:
        inputs[kind] = (ids == IMAGE).long()
    return Batch(inputs, completion_length, len(set(groups)), groups)


def _pixels(family: Family, row_pictures: list[list[Picture]]) -> dict[str, torch.Tensor]:
    flat = [picture for row in row_pictures for picture in row]
    if not flat:
        return {}
    if not family.per_row:
        return {key: torch.cat([picture.inputs[key] for picture in flat]) for key in flat[0].inputs}
    most = max(len(row) for row in row_pictures)
    padded = {}
    for key, example in flat[0].inputs.items():
        empty = torch.zeros_like(example)
        padded[key] = torch.cat(
            [torch.cat([p.inputs[key] for p in row] + [empty] * (most - len(row)), dim=1) for row in row_pictures]
        )
    return padded
