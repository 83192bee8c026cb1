"""The grid of vision tokens against a real model: attention on the token of a cell falls into its pixels."""

from typing import Any

import pytest
import torch
from PIL import Image

from vgr_trl.demo.tiny_model import build_tiny_vlm
from vgr_trl.signals import AttentionProbe, build_modality_masks
from vgr_trl.signals.ratios import special_token_ids

# 150 x 90 px is stretched to 140 x 84: 3 rows of 5 cells, in two windows of the tower.

ROWS, COLUMNS, SIZE = 3, 5, (150, 90)
CELL = (30, 30)  # pixels of the original image


@pytest.fixture(scope="module")
def tiny() -> tuple[Any, Any]:
    model, processor = build_tiny_vlm(["what is it?"], hidden_size=64, seed=0)
    return model.eval(), processor


def painted(processor: Any, row: int | None = None, column: int | None = None) -> Any:
    """Inputs of a grey image with one red cell, or without it."""
    image = Image.new("RGB", SIZE, (128, 128, 128))
    if row is not None and column is not None:
        image.paste((255, 0, 0), (column * CELL[0], row * CELL[1], (column + 1) * CELL[0], (row + 1) * CELL[1]))
    content = [{"type": "image"}, {"type": "text", "text": "what is it?"}]
    text = processor.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    inputs = processor(text=[text], images=[[image]], return_tensors="pt")
    merge = processor.image_processor.merge_size
    assert (inputs["image_grid_thw"][0, 1:] // merge).tolist() == [ROWS, COLUMNS]
    return inputs


def embedded(model: Any, inputs: Any) -> torch.Tensor:
    """What the language model gets for each vision token, (V, hidden)."""
    features = model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"])
    return torch.cat(list(features.pooler_output))


@pytest.mark.parametrize(("row", "column"), [(0, 4), (1, 3), (2, 0)])
def test_attention_on_the_token_of_a_cell_falls_into_its_pixels(tiny: tuple[Any, Any], row: int, column: int) -> None:
    model, processor = tiny
    inputs = painted(processor, row, column)
    with torch.no_grad():
        vision = embedded(model, inputs)  # (V, hidden)
        change = (vision - embedded(model, painted(processor))).norm(dim=1)
    token = int(change.argmax())  # the token that sees the red, whatever its place
    attend_only_to(model, vision, token)
    masks = build_modality_masks(
        inputs["input_ids"],
        inputs["attention_mask"],
        vision_token_ids=[model.config.image_token_id],
        special_token_ids=special_token_ids(processor),
    )
    with torch.no_grad(), AttentionProbe(model, masks, rows=[inputs["input_ids"].size(1) - 1], keep_rows=[0]) as probe:
        model(**inputs)
    attention = probe.kept[0][0, 0].tolist()  # of the first layer's only query, (V,)
    assert attention[row * COLUMNS + column] > 0.99


def attend_only_to(model: Any, vision: torch.Tensor, token: int) -> None:
    """Let every query of the first layer attend to the key of one vision token.

    All queries are the same vector, whose only entry is in the pair of dimensions that the position turns least (by
    3e-4 of the distance); the keys have in it how much their token is like `token` and unlike the other vision tokens.
    """
    layer = model.model.language_model.layers[0]
    with torch.no_grad():
        vision = layer.input_layernorm(vision)
        others = torch.cat([vision[:token], vision[token + 1 :]])
        texts = layer.input_layernorm(model.get_input_embeddings().weight)  # what else the queries may look at
        rest = torch.cat([others, texts])
        target = torch.zeros(len(rest) + 1)
        target[0] = 1.0
        likeness = torch.linalg.lstsq(torch.cat([vision[token][None], rest]), target[:, None], driver="gelsd").solution
        attention = layer.self_attn
        dimension = attention.head_dim // 2 - 1
        for projection in (attention.q_proj, attention.k_proj):
            projection.weight.zero_()
            projection.bias.zero_()
        for head in range(attention.q_proj.out_features // attention.head_dim):
            attention.q_proj.bias[head * attention.head_dim + dimension] = 1e4
        for head in range(attention.k_proj.out_features // attention.head_dim):
            attention.k_proj.weight[head * attention.head_dim + dimension] = likeness.flatten()
