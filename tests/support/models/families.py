"""One tiny random model per family, and batches of G completions per prompt as TRL hands them to it.

Their configurations are in `families.yaml`; `OTHERS` are text models of other kinds, and models that fall back.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers as hf
import yaml

from vgr_trl.sharing.model_support import base_of, causal_model
from vgr_trl.vision import parameters_of_tower

PAD, EOS, IMAGE, OPEN, CLOSE, VIDEO, TEXT = 0, 1, 2, 3, 4, 5, 8  # TEXT: the first of the ordinary tokens
VOCABULARY = 96
PIXEL_INPUTS = (
    *("pixel_values", "image_grid_thw", "image_sizes"),
    *("pixel_attention_mask", "image_position_ids", "spatial_shapes"),
)

TABLE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
BODY, PINPOINTS = TABLE["body"], TABLE["pinpoints"]


@dataclass(frozen=True)
class Picture:
    tokens: list[int]
    inputs: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Family:
    name: str
    build: Callable[[], Any]
    picture: Callable[[int], Picture] | None = None  # seed -> image
    per_token: tuple[str, ...] = ()  # token type inputs
    per_row: bool = False  # pixel inputs are padded to one entry per row
    lora: tuple[str, ...] = ("q_proj", "v_proj")


@dataclass
class Batch:
    inputs: dict[str, Any]
    completion_length: int
    prompts: int
    groups: list[int] = field(default_factory=list)

    def prompt_inputs(self) -> dict[str, Any]:
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


def text_model(kind: str, **options: Any) -> Callable[[], Any]:
    """`options`: what differs from `BODY`; of a kind with images, its text model alone."""

    def build() -> Any:
        config = getattr(hf, f"{kind}TextConfig", None) or getattr(hf, f"{kind}Config")
        return getattr(hf, f"{kind}ForCausalLM")(config(**{**BODY, **options}))

    return build


def qwen_picture(seed: int) -> Picture:
    grid = [1, 4, 4 + 2 * (seed % 2)]
    patches = grid[1] * grid[2]
    inputs = {"pixel_values": noise(seed, patches, 3 * 2 * 4 * 4), "image_grid_thw": torch.tensor([grid])}
    return Picture([OPEN, *[IMAGE] * (patches // 4), CLOSE], inputs)


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


def mistral3_picture(seed: int) -> Picture:
    """Two rows of two tokens, each row ended by a token of its own."""
    inputs = {"pixel_values": noise(seed, 1, 3, 16, 16), "image_sizes": torch.tensor([[16, 16]])}
    return Picture([IMAGE, IMAGE, OPEN, IMAGE, IMAGE, CLOSE], inputs)


def lfm2_picture(seed: int) -> Picture:
    """16 patches of one image, 8 of another with padding behind them; a token for every 2 by 2."""
    rows = 2 + 2 * (seed % 2)
    inputs = {
        "pixel_values": noise(seed, 1, 16, 3 * 4 * 4), "spatial_shapes": torch.tensor([[rows, 4]]),
        "pixel_attention_mask": (torch.arange(16) < 4 * rows).long()[None],
    }  # fmt: skip
    return Picture([OPEN, *[IMAGE] * rows, CLOSE], inputs)


def gemma4_picture(seed: int) -> Picture:
    """16 patches, pooled to 4 tokens."""
    rows, columns = torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij")
    positions = torch.stack([columns.flatten(), rows.flatten()], dim=-1)[None]
    inputs = {"pixel_values": noise(seed, 1, 16, 3 * 4 * 4), "image_position_ids": positions}
    return Picture([OPEN, *[IMAGE] * 4, CLOSE], inputs)


PICTURES = {
    "qwen": qwen_picture, "four": square_picture(4), "sixteen": square_picture(16), "tiled": _tiled_picture,
    "pinpoint": _pinpoint_picture, "row": row_picture, "mistral3": mistral3_picture, "lfm2": lfm2_picture,
    "gemma4": gemma4_picture,
}  # fmt: skip


def _from_table(name, kind, *, text=None, vision=None, options=None, bare=None, picture=None, **rest) -> Family:
    def with_images() -> Any:
        config = getattr(hf, f"{kind}Config")(text_config={**BODY, **text}, vision_config=vision, **options)
        return getattr(hf, f"{kind}ForConditionalGeneration")(config)

    def without_body() -> Any:
        return getattr(hf, f"{kind}ForCausalLM")(getattr(hf, f"{kind}Config")(**bare))

    build = without_body if bare else with_images if vision else text_model(kind, **text or {})
    tuples = {key: tuple(rest.pop(key)) for key in ("per_token", "lora") if key in rest}
    return Family(name, build, picture and PICTURES[picture], **tuples, **rest)


FAMILIES = {name: _from_table(name, **row) for name, row in TABLE["families"].items()}
OTHERS = {name: _from_table(name, **row) for name, row in TABLE["others"].items()}


def build(name: "str | Family", seed: int = 0) -> Any:
    torch.manual_seed(seed)
    family = FAMILIES[name] if isinstance(name, str) else name
    return randomise(family.build(), seed)


def with_frozen_tower(model: Any) -> Any:
    for parameter in parameters_of_tower(base_of(causal_model(model))):
        parameter.requires_grad_(False)
    return model


def make_batch(
    name: "str | Family", *, images: Sequence[int] = (1, 1), generations: int = 3, text: Sequence[int] = (21, 33),
    completion_length: int = 12, seed: int = 0, order: Sequence[int] | None = None, returned: Sequence[int] = (),
) -> Batch:  # fmt: skip
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
