"""The grid of vision tokens against a real model: the token of a cell sees its pixels."""

from typing import Any

import pytest
import torch
from PIL import Image

from vgr_trl.demo.tiny_model import build_tiny_vlm

# 150 x 90 px is stretched to 140 x 84: 3 rows of 5 cells, in two windows of the tower.

ROWS, COLUMNS, SIZE = 3, 5, (150, 90)
CELL = (30, 30)  # pixels of the original image


@pytest.fixture(scope="module")
def tiny() -> tuple[Any, Any]:
    model, processor = build_tiny_vlm(["what is it?"], hidden_size=64, seed=0)
    return model.eval(), processor


def embedded(model: Any, processor: Any, image: Image.Image) -> torch.Tensor:
    """What the language model gets for each vision token, (V, hidden)."""
    inputs = processor.image_processor(images=[image], return_tensors="pt")
    assert (inputs["image_grid_thw"][0, 1:] // processor.image_processor.merge_size).tolist() == [ROWS, COLUMNS]
    with torch.no_grad():
        features = model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"])
    return torch.cat(list(features.pooler_output))


@pytest.mark.parametrize(("row", "column"), [(0, 4), (1, 3), (2, 0)])
def test_the_token_of_a_cell_sees_its_pixels(tiny: tuple[Any, Any], row: int, column: int) -> None:
    grey, painted = (Image.new("RGB", SIZE, (128, 128, 128)) for _ in range(2))
    painted.paste((255, 0, 0), (column * CELL[0], row * CELL[1], (column + 1) * CELL[0], (row + 1) * CELL[1]))
    change = (embedded(*tiny, painted) - embedded(*tiny, grey)).norm(dim=1)  # (V,)
    assert int(change.argmax()) == row * COLUMNS + column
