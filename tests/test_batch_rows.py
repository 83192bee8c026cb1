"""Which pixels belong to which row; rows made into inputs of scoring, joined and stored. Expected by hand."""

import pytest
import torch

from vgr_trl.pixels import UnknownParts, parts_by_counts, parts_by_tokens

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
