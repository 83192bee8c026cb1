"""Which rows share a prompt, where a batch is split, which rows are trained together: without a model."""

import pytest
import torch
from support.models.families import IMAGE, build
from trl.trainer.utils import shuffle_sequence_dict, split_pixel_values_by_grid

from vgr_trl.sharing.lending import shuffle_whole_groups
from vgr_trl.sharing.prefix_split import check_inputs, find_groups, find_split
from vgr_trl.sharing.report import UnsupportedModel

CONFIG = build("qwen2_5_vl").config


def two_rows():
    """Two completions of two tokens behind a prompt of four."""
    ids = torch.tensor([[10, 11, 12, 13, 20, 21], [10, 11, 12, 13, 30, 31]])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": torch.zeros_like(ids)}


def test_inputs_that_cannot_be_split():
    """Images at the end of the prompt and behind, padding behind the first token, and outputs that are lacking."""
    for name, value, columns, reason in (
        ("input_ids", IMAGE, (3, 5), "images in completions"),
        ("mm_token_type_ids", 1, (3, 5), "images in completions"),
        ("attention_mask", 0, (2, 3), "not padded on the left"),
    ):
        for column in columns:
            inputs = two_rows()
            inputs[name][:, column] = value
            with pytest.raises(UnsupportedModel, match=reason):
                find_split(inputs, CONFIG, (3, 5))
    for asked in ({"return_dict": False}, {"output_attentions": True}):
        with pytest.raises(UnsupportedModel, match=next(iter(asked))):
            check_inputs({**two_rows(), **asked}, CONFIG)


def test_mask_and_pixels_tell_prompts_apart():
    ids, mask = torch.zeros(3, 2, dtype=torch.long), torch.tensor([[0, 1], [1, 1], [0, 1]])
    assert find_groups(ids, mask) == [0, 1, 0]
    pixels = [[torch.zeros(4, 2)], [torch.zeros(4, 2)], [torch.zeros(2, 2)]]
    assert find_groups(ids, None, pixels) == [0, 0, 1]
    assert find_groups(ids, mask, pixels) == [0, 1, 2]


def generation_batch():
    """Two prompts of two and one image, three completions each, with the pixels of a Qwen model."""
    grids = [[1, 2, 2], [1, 2, 4], [1, 2, 2]]
    images = [torch.full((grid[1] * grid[2], 3), float(number)) for number, grid in enumerate(grids)]
    of_rows = [[0, 1]] * 3 + [[2]] * 3
    return {
        "prompt_ids": torch.tensor([[5, 6]] * 6),
        "prompt_mask": torch.ones(6, 2, dtype=torch.long),
        "advantages": torch.arange(6.0),
        "num_items_in_batch": torch.tensor(17),
        "num_images": [2, 2, 2, 1, 1, 1],
        "pixel_values": torch.cat([images[number] for row in of_rows for number in row]),
        "image_grid_thw": torch.tensor([grids[number] for row in of_rows for number in row]),
        "old_per_token_logps": None,
    }


def test_the_shuffle_is_that_of_trl_with_groups_together():
    batch = split_pixel_values_by_grid(generation_batch())
    torch.manual_seed(3)
    theirs = shuffle_sequence_dict(batch)
    after = torch.rand(1)
    torch.manual_seed(3)
    ours = shuffle_whole_groups(batch)
    assert torch.equal(torch.rand(1), after)
    rows = ours["advantages"].tolist()
    assert [row < 3 for row in rows] in ([True] * 3 + [False] * 3, [False] * 3 + [True] * 3)
    assert rows[0] == theirs["advantages"][0]
    for group in ([0.0, 1.0, 2.0], [3.0, 4.0, 5.0]):
        assert [r for r in rows if r in group] == [r for r in theirs["advantages"].tolist() if r in group]
    assert ours["num_images"] == [2 if row < 3 else 1 for row in rows]
    for row, pixels, grid in zip(rows, ours["pixel_values"], ours["image_grid_thw"], strict=True):
        assert torch.equal(pixels, batch["pixel_values"][int(row)])
        assert torch.equal(grid, batch["image_grid_thw"][int(row)])
    assert ours["num_items_in_batch"] == 17
    assert ours["old_per_token_logps"] is None
