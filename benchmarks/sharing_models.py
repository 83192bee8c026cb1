"""Models with random weights, batches and questions of given sizes, for the benchmark of prompt sharing."""

from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from transformers import (
    PaddleOCRVLProcessor,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from vgr_trl.demo.tiny_model import EOS, PAD, build_processor

MERGE = 2  # patches per side of a vision token


@dataclass(frozen=True)
class ModelShape:
    """Widths and depths of a Qwen2.5-VL or a Qwen3-VL."""

    hidden: int
    layers: int
    heads: int
    key_heads: int
    intermediate: int
    vocabulary: int
    vision_hidden: int
    vision_layers: int
    vision_intermediate: int
    vision_heads: int
    whole_image_layers: tuple[int, ...]  # the other layers of the vision tower see windows of 8 x 8 patches
    tied: bool = False
    head: int = 0  # width of an attention head; 0: hidden / heads
    deepstack: tuple[int, ...] | None = None  # layers of the tower whose features are added; None: a Qwen2.5-VL

    @staticmethod
    def square(hidden: int, layers: int) -> "ModelShape":
        """As wide a vision tower as a language model, and half as deep."""
        depth = max(layers // 2, 1)
        return ModelShape(hidden, layers, 8, 2, 4 * hidden, 1024, hidden, depth, 2 * hidden, 8, (depth - 1,))

    @property
    def head_width(self) -> int:
        """Of one attention head of the language model."""
        return self.head or self.hidden // self.heads

    @property
    def patch(self) -> int:
        """Pixels per side of a patch."""
        return 14 if self.deepstack is None else 16


MODEL_SHAPES = {
    "qwen2.5-vl-3b": ModelShape(2048, 36, 16, 2, 11008, 151936, 1280, 32, 3420, 16, (7, 15, 23, 31), tied=True),
    "qwen2.5-vl-7b": ModelShape(3584, 28, 28, 4, 18944, 152064, 1280, 32, 3420, 16, (7, 15, 23, 31)),
    "qwen2.5-vl-32b": ModelShape(5120, 64, 40, 8, 27648, 152064, 1280, 32, 3456, 16, (7, 15, 23, 31)),
    "qwen3-vl-2b": ModelShape(
        2048, 28, 16, 8, 6144, 151936, 1024, 24, 4096, 16, tuple(range(24)), True, 128, (5, 11, 17)
    ),
    "qwen3-vl-4b": ModelShape(
        2560, 36, 32, 8, 9728, 151936, 1024, 24, 4096, 16, tuple(range(24)), True, 128, (5, 11, 17)
    ),
    "qwen3-vl-8b": ModelShape(
        4096, 36, 32, 8, 12288, 151936, 1152, 27, 4304, 16, tuple(range(27)), False, 128, (8, 16, 24)
    ),
    "tiny-qwen2.5-vl": ModelShape(64, 2, 4, 2, 128, 1024, 32, 2, 64, 2, (1,)),
    "tiny-qwen3-vl": ModelShape(64, 2, 4, 2, 128, 1024, 32, 2, 64, 2, (0, 1), False, 32, (0,)),
}


@dataclass(frozen=True)
class Size:
    """What is computed: P prompt tokens, V vision tokens among them, T completion tokens, G completions per prompt."""

    prompt: int
    vision: int
    completion: int
    generations: int

    @staticmethod
    def parse(text: str) -> "Size":
        """From `P,V,T,G`."""
        return Size(*map(int, text.split(",")))

    def __str__(self) -> str:
        return f"{self.prompt},{self.vision},{self.completion},{self.generations}"

    @property
    def grid(self) -> tuple[int, int]:
        """Height and width of the image in patches, as square as possible."""
        sides = (side for side in range(1, self.vision + 1) if self.vision % side == 0)
        short = max(side for side in sides if side * side <= self.vision)
        return MERGE * short, MERGE * self.vision // short


def build_model(shape: ModelShape, tokenizer: Any, *, device: str, dtype: str, attention: str) -> Any:
    """A model with random weights, made on `device`, whose image token is that of `tokenizer`."""
    ids = tokenizer.convert_tokens_to_ids
    ends = {"pad_token_id": ids(PAD), "eos_token_id": ids(EOS), "bos_token_id": None}
    marks = {
        "image_token_id": ids("<|image_pad|>"),
        "video_token_id": ids("<|video_pad|>"),
        "vision_start_token_id": ids("<|vision_start|>"),
        "vision_end_token_id": ids("<|vision_end|>"),
    }
    config_class, model_class, text, vision = _parts(shape)
    config = config_class(text_config={**text, **ends}, vision_config=vision, tie_word_embeddings=shape.tied, **marks)
    torch.manual_seed(0)
    with torch.device(device):
        model = model_class._from_config(config, dtype=getattr(torch, dtype), attn_implementation=attention)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = ids(EOS), ids(PAD)
    return model.eval()


def _parts(shape: ModelShape) -> tuple[Any, Any, dict[str, Any], dict[str, Any]]:
    """Classes of configuration and model, and what the configurations of language model and tower say."""
    half = shape.head_width // 2
    text: dict[str, Any] = {
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.key_heads,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": shape.tied,
    }
    vision: dict[str, Any] = {
        "depth": shape.vision_layers,
        "hidden_size": shape.vision_hidden,
        "out_hidden_size": shape.hidden,
        "num_heads": shape.vision_heads,
        "intermediate_size": shape.vision_intermediate,
        "patch_size": shape.patch,
    }
    if shape.deepstack is None:
        time = half // 4
        height = (half - time) // 2
        rope = {"rope_theta": 1e6, "mrope_section": [time, height, half - time - height]}
        vision["fullatt_block_indexes"] = list(shape.whole_image_layers)
        classes: tuple[Any, Any] = (Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration)
    else:
        side = half * 5 // 16
        rope = {"rope_theta": 5e6, "mrope_section": [half - 2 * side, side, side], "mrope_interleaved": True}
        text["head_dim"] = shape.head_width
        vision |= {"deepstack_visual_indexes": list(shape.deepstack), "num_position_embeddings": 2304}
        classes = (Qwen3VLConfig, Qwen3VLForConditionalGeneration)
    text["rope_parameters"] = {"rope_type": "default", **rope}
    return *classes, text, vision


def make_processor(patch: int = 14) -> PaddleOCRVLProcessor:
    """A real processor with few words, for images of any size in patches of `patch` pixels."""
    processor = build_processor(["word", " word"])
    processor.image_processor.patch_size = patch
    processor.image_processor.size = {"shortest_edge": (MERGE * patch) ** 2, "longest_edge": 2**26}
    return processor


def make_batch(
    size: Size, tokenizer: Any, *, prompts: int, device: str, dtype: str, patch: int = 14
) -> dict[str, torch.Tensor]:
    """Rows of prompt and completion, (N, P + T) with N = prompts * generations, and one image per row."""
    generator = torch.Generator().manual_seed(0)
    image = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    words = torch.arange(16, len(tokenizer) - 8)

    def draw(rows: int, columns: int) -> torch.Tensor:
        return words[torch.randint(len(words), (rows, columns), generator=generator)]

    ids = draw(prompts, size.prompt)
    ids[:, 4 : 4 + size.vision] = image
    ids = ids.repeat_interleave(size.generations, 0)
    ids = torch.cat([ids, draw(len(ids), size.completion)], dim=1)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if size.vision:
        patches = MERGE * MERGE * size.vision
        pixels = torch.randn(prompts, patches, 3 * 2 * patch * patch, generator=generator)
        batch["pixel_values"] = pixels.repeat_interleave(size.generations, 0).flatten(0, 1).to(getattr(torch, dtype))
        batch["image_grid_thw"] = torch.tensor([[1, *size.grid]] * len(ids))
        batch["mm_token_type_ids"] = (ids == image).long()
    return {name: value.to(device) for name, value in batch.items()}


def make_question(size: Size, processor: Any, seed: int = 0) -> dict[str, Any]:
    """A row of a data set whose prompt has exactly P tokens, V of them for its image of noise."""
    row: dict[str, Any] = {}
    if size.vision:
        height, width = (side * processor.image_processor.patch_size for side in size.grid)
        noise = torch.randint(256, (height, width, 3), generator=torch.Generator().manual_seed(seed))
        row["image"] = Image.fromarray(noise.to(torch.uint8).numpy())
    words = 0
    for _ in range(3):
        row["prompt"] = [{"role": "user", "content": "word" + " word" * words}]
        missing = size.prompt - _tokens(row, processor)
        if not missing:
            return row
        words += missing
    raise ValueError(
        f"A prompt of {size.prompt} tokens is too short for an image of {size.vision} and the chat template."
    )


def _tokens(row: dict[str, Any], processor: Any) -> int:
    content = [{"type": "text", "text": row["prompt"][0]["content"]}]
    if "image" in row:
        content.insert(0, {"type": "image", "image": row["image"]})
    encoded = processor.apply_chat_template(
        [[{"role": "user", "content": content}]], add_generation_prompt=True, tokenize=True, return_dict=True
    )
    return len(encoded["input_ids"][0])
