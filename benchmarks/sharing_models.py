"""Models with random weights, batches and questions of given sizes, for the benchmark of prompt sharing."""

from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from vgr_trl.demo.tiny_processor import EOS, PAD, TinyProcessor, build_processor

PATCH, MERGE = 14, 2  # pixels per patch, patches per side of a vision token


@dataclass(frozen=True)
class ModelShape:
    """Widths and depths of a Qwen2.5-VL."""

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

    @staticmethod
    def square(hidden: int, layers: int) -> "ModelShape":
        """As wide a vision tower as a language model, and half as deep."""
        depth = max(layers // 2, 1)
        return ModelShape(hidden, layers, 8, 2, 4 * hidden, 1024, hidden, depth, 2 * hidden, 8, (depth - 1,))


MODEL_SHAPES = {
    "qwen2.5-vl-3b": ModelShape(2048, 36, 16, 2, 11008, 151936, 1280, 32, 3420, 16, (7, 15, 23, 31), tied=True),
    "qwen2.5-vl-7b": ModelShape(3584, 28, 28, 4, 18944, 152064, 1280, 32, 3420, 16, (7, 15, 23, 31)),
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
    """A Qwen2.5-VL with random weights, made on `device`, whose image token is that of `tokenizer`."""
    ids = tokenizer.convert_tokens_to_ids
    half_head = shape.hidden // shape.heads // 2
    time = half_head // 4
    height = (half_head - time) // 2
    text = {
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.key_heads,
        "max_position_embeddings": 32768,
        "pad_token_id": ids(PAD),
        "eos_token_id": ids(EOS),
        "bos_token_id": None,
        "tie_word_embeddings": shape.tied,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e6,
            "mrope_section": [time, height, half_head - time - height],
        },
    }
    vision = {
        "depth": shape.vision_layers,
        "hidden_size": shape.vision_hidden,
        "out_hidden_size": shape.hidden,
        "num_heads": shape.vision_heads,
        "intermediate_size": shape.vision_intermediate,
        "patch_size": PATCH,
        "fullatt_block_indexes": list(shape.whole_image_layers),
    }
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=shape.tied,
        image_token_id=ids("<|image_pad|>"),
        video_token_id=ids("<|video_pad|>"),
        vision_start_token_id=ids("<|vision_start|>"),
        vision_end_token_id=ids("<|vision_end|>"),
    )
    torch.manual_seed(0)
    make: Any = Qwen2_5_VLForConditionalGeneration._from_config
    with torch.device(device):
        model = make(config, dtype=getattr(torch, dtype), attn_implementation=attention)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = ids(EOS), ids(PAD)
    return model.eval()


def make_processor() -> TinyProcessor:
    """A real processor with few words."""
    return build_processor(["word", " word"])


def make_batch(size: Size, tokenizer: Any, *, prompts: int, device: str, dtype: str) -> dict[str, torch.Tensor]:
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
        pixels = torch.randn(prompts, patches, 3 * 2 * PATCH * PATCH, generator=generator)
        batch["pixel_values"] = pixels.repeat_interleave(size.generations, 0).flatten(0, 1).to(getattr(torch, dtype))
        batch["image_grid_thw"] = torch.tensor([[1, *size.grid]] * len(ids))
        batch["mm_token_type_ids"] = (ids == image).long()
    return {name: value.to(device) for name, value in batch.items()}


def make_question(size: Size, processor: Any) -> dict[str, Any]:
    """A row of a data set whose prompt has exactly P tokens, V of them for its image."""
    row: dict[str, Any] = {}
    if size.vision:
        height, width = size.grid
        noise = torch.randint(256, (PATCH * height, PATCH * width, 3), generator=torch.Generator().manual_seed(0))
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
