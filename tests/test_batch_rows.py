"""Which pixels belong to which row; rows made into inputs of scoring, joined and stored. Expected by hand."""

import pytest
import torch

from vgr_trl.pixels import UnknownParts, number_images, parts_by_counts, parts_by_tokens
from vgr_trl.rows import Rows, join_rows
from vgr_trl.scoring_inputs import Prompts, build_scoring_inputs

IMAGE, PAD = 2, 9
GRIDS = torch.tensor([[1, 2, 4], [1, 4, 4], [1, 2, 2]])  # 8, 16 and 4 patches, four to a token
TILES = torch.tensor([[4, 4], [4, 4], [2, 4], [2, 2]])  # the first image: two tiles and a thumbnail of 8 patches
AREAS = torch.tensor([[16, 16], [8, 16], [16, 16]])  # 4, 2 and 4 tokens of 64 pixels

# Name -> pixel inputs, tokens per row, num_images, num_tiles, and the entries of the inputs that each row has.
# Rows have two images, none and one; tiles: three and one of one image each.
CASES = {
    "patches": (
        {"pixel_values": torch.zeros(28, 3), "image_grid_thw": GRIDS},
        ["xx xxxx", "", "x"], [2, 0, 1], None,
        {"pixel_values": [24, 0, 4], "image_grid_thw": [2, 0, 1]},
    ),
    "tiles of unequal size": (
        {
            "pixel_values": torch.zeros(4, 16, 3),
            "spatial_shapes": TILES,
            "pixel_attention_mask": torch.zeros(4, 16),
        },
        ["xxxx xxxx xx", "", "x"], [1, 0, 1], [3, 0, 1], [3, 0, 1],
    ),
    "rows padded to the most images": (
        {"pixel_values": torch.zeros(3, 2, 3, 4, 4), "pixel_attention_mask": torch.zeros(3, 2, 4, 4)},
        ["x x", "", "x"], [2, 0, 1], None, [1, 1, 1],
    ),
    "images of unequal size by area": (
        {"pixel_values": torch.zeros(3, 3, 16, 16), "image_sizes": AREAS},
        ["xx xx xx", "", "xx xx"], [2, 0, 1], None, [2, 0, 1],
    ),
    "images with positions": (
        {"pixel_values": torch.zeros(3, 9, 6), "image_position_ids": torch.zeros(3, 9, 2)},
        ["xxx xx", "", "xxx"], [2, 0, 1], None, [2, 0, 1],
    ),
    "tiles of one size": (
        {"pixel_values": torch.zeros(4, 3, 4, 4)}, ["xxxxxx", "", "xx"], [1, 0, 1], [3, 0, 1], [3, 0, 1],
    ),
}  # fmt: skip


def placeholders(rows):
    """(N, S) bool from strings: x is an image token."""
    length = max(map(len, rows))
    return torch.tensor([[character == "x" for character in row.ljust(length)] for row in rows])


def sizes(parts):
    """Entries of each row, that lie one behind the other from the first on."""
    for slices in parts.values():
        assert [part.start for part in slices] == [0, *(part.stop for part in slices[:-1])]
    return {name: [part.stop - part.start for part in slices] for name, slices in parts.items()}


@pytest.mark.parametrize("case", CASES)
def test_counts_and_tokens_give_the_same_parts(case):
    inputs, rows, num_images, num_tiles, entries = CASES[case]
    expected = entries if isinstance(entries, dict) else dict.fromkeys(inputs, entries)
    assert sizes(parts_by_counts(inputs, num_images, num_tiles)) == expected
    assert sizes(parts_by_tokens(inputs, placeholders(rows))) == expected


@pytest.mark.parametrize(
    ("inputs", "rows"),
    [
        ({"pixel_values": torch.zeros(8, 3), "image_grid_thw": torch.tensor([[1, 2, 4]])}, ["x", "x"]),
        ({"pixel_values": torch.zeros(3, 3, 2, 2)}, ["xx", "xx"]),
        ({"pixel_values": torch.zeros(3, 1, 3, 2, 2)}, ["x", "x"]),
    ],
)
def test_what_tokens_cannot_assign_with_certainty(inputs, rows):
    with pytest.raises(UnknownParts):
        parts_by_tokens(inputs, placeholders(rows))


def batch_of(ids, images=None, completions=((7,), (7, 8)), **fields):
    return build_scoring_inputs(
        Prompts(ids, images, fields), [list(row) for row in completions], pad_token_id=PAD, vision_token_ids=[IMAGE]
    )


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
        ({}, None),
    ],
)
def test_tiles_of_rows(fields, tiles):
    batch = batch_of(PROMPTS, TWO, **fields)
    assert batch["num_images"] == [1, 1]
    assert batch["num_tiles"] == tiles


def rows(prompt, completion, count=1, **columns):
    """Tokens counted up from 1, all of them valid."""
    wide = {
        "prompt_ids": torch.arange(1, prompt + 1).expand(count, -1),
        "prompt_mask": torch.ones(count, prompt, dtype=torch.long),
        "completion_ids": torch.arange(1, completion + 1).expand(count, -1),
        "completion_mask": torch.ones(count, completion, dtype=torch.long),
    }
    return Rows(prompt, completion, {**wide, **columns}, [{} for _ in range(count)])


def test_columns_that_only_one_has():
    """No tool: every token is the policy's. No type: 0."""
    one = rows(
        2,
        2,
        tool_mask=torch.tensor([[1, 0]]),
        token_type_ids=torch.tensor([[0, 1, 0, 0]]),
        importance_sampling_ratio=torch.tensor([[0.5]]),
        num_images=[2],
    )
    other = rows(1, 3, importance_sampling_ratio=torch.tensor([[2.0, 3.0, 4.0]]))
    joined = join_rows([one, other], pad_token_id=PAD).columns
    assert joined["tool_mask"].tolist() == [[1, 0, 1], [1, 1, 1]]
    assert joined["num_images"] == [2, 0]
    assert joined["token_type_ids"].tolist() == [[0, 1, 0, 0, 0], [0, 0, 0, 0, 0]]
    assert joined["importance_sampling_ratio"].tolist() == [[0.5, 0.5, 1.0], [2.0, 3.0, 4.0]]


def test_which_image_a_token_stands_for():
    """Two rows of images of 1 and 2 tokens, and of 2; with images of one size, as many tokens each; else unknown."""
    is_image = torch.tensor([[1, 0, 1, 1, 0], [0, 1, 1, 0, 0]]).bool()
    grids = torch.tensor([[1, 2, 2], [1, 4, 2], [1, 2, 4]])
    patches = {"pixel_values": torch.zeros(20, 3), "image_grid_thw": grids}
    assert number_images(patches, [2, 1], is_image).tolist() == [[1, 0, 2, 2, 0], [0, 1, 1, 0, 0]]
    equal = {"pixel_values": torch.zeros(5, 3, 4, 4)}
    assert number_images(equal, [3, 2], is_image).tolist() == [[1, 0, 2, 3, 0], [0, 1, 2, 0, 0]]
    assert not number_images(equal, [2, 3], is_image).any(), "3 tokens of 2 images, and 2 of 3"
    assert not number_images(patches, [], is_image).any()
