"""Batches for scoring by hand: tokens as TRL pads them, and which tiles belong to which row."""

import pytest
import torch

from vgr_trl.batch import Prompts, build_scoring_inputs, rows_with_images

IMAGE, PAD = 2, 9


def batch_of(ids, images=None, completions=((7,), (7, 8)), **fields):
    return build_scoring_inputs(
        Prompts(ids, images, fields),
        [list(row) for row in completions],
        pad_token_id=PAD,
        vision_token_ids=[IMAGE],
    )


def test_prompts_are_padded_on_the_left_and_completions_on_the_right():
    batch = batch_of([[5], [5, 6]])
    assert batch["input_ids"].tolist() == [[PAD, 5, 7, PAD], [5, 6, 7, 8]]
    assert batch["attention_mask"].tolist() == [[0, 1, 1, 0], [1, 1, 1, 1]]
    assert (batch["num_images"], batch["num_tiles"]) == (None, None)


def test_rows_with_images():
    prompts = torch.zeros(3, 2)
    assert rows_with_images({"prompt_ids": prompts, "num_images": [2, 0, 1]}).tolist() == [True, False, True]
    assert rows_with_images({"prompt_ids": prompts}).tolist() == [False] * 3


PROMPTS = [[5, *[IMAGE] * 4], [5, *[IMAGE] * 12]]  # 4 tokens for each tile
TWO = [["one image"], ["another"]]


@pytest.mark.parametrize(
    ("fields", "tiles"),
    [
        ({"pixel_values": torch.zeros(4, 3, 2, 2)}, [1, 3]),
        ({"pixel_values": torch.zeros(2, 3, 2, 2)}, None),  # one entry per image
        ({"pixel_values": torch.zeros(4, 3)}, None),  # patches
        ({"pixel_values": torch.zeros(4, 3), "spatial_shapes": torch.full((4, 2), 4)}, [1, 3]),
        ({"pixel_values": torch.zeros(2, 3), "spatial_shapes": torch.ones(2, 2)}, [1, 1]),
        ({"pixel_values": torch.zeros(4, 3, 2, 2), "image_grid_thw": torch.ones(2, 3)}, None),
        ({}, None),
    ],
)
def test_tiles_of_rows(fields, tiles):
    batch = batch_of(PROMPTS, TWO, **fields)
    assert batch["num_images"] == [1, 1]
    assert batch["num_tiles"] == tiles
