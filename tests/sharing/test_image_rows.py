"""Which pixels belong to which row, from what a forward pass is given."""

import pytest
import torch

from vgr_trl.sharing.prefix_cache import UnsupportedModel
from vgr_trl.sharing.prefix_forward import rows_of_images


def placeholders(*rows):
    """(N, S) bool from strings: x is an image token."""
    length = max(map(len, rows))
    return torch.tensor([[character == "x" for character in row.ljust(length)] for row in rows])


def bounds(slices):
    return [(part.start, part.stop) for part in slices]


def test_grids_of_unequal_size_and_a_row_without_image():
    grids = torch.tensor([[1, 2, 4], [1, 4, 4], [1, 2, 2]])  # 2, 4 and 1 tokens
    inputs = {"pixel_values": torch.zeros(28, 3), "image_grid_thw": grids}
    found = rows_of_images(inputs, placeholders(" xx xxxx", "", "x"))
    assert bounds(found["image_grid_thw"]) == [(0, 2), (2, 2), (2, 3)]
    assert bounds(found["pixel_values"]) == [(0, 24), (24, 24), (24, 28)]


def test_images_or_tiles_of_equal_size():
    found = rows_of_images({"pixel_values": torch.zeros(4, 3, 2, 2)}, placeholders("xx xxxx", "", "xx"))
    assert bounds(found["pixel_values"]) == [(0, 3), (3, 3), (3, 4)]


def test_images_of_unequal_size_by_their_runs():
    inputs = {"pixel_values": torch.zeros(3, 5, 3, 2, 2), "image_sizes": torch.zeros(3, 2)}
    found = rows_of_images(inputs, placeholders("xx xxx", "x"))
    assert bounds(found["pixel_values"]) == bounds(found["image_sizes"]) == [(0, 2), (2, 3)]


def test_images_with_a_token_after_each_of_their_rows():
    """Mistral 3: 16 x 16 pixels are two runs of two tokens, 8 x 16 one of two; 64 pixels per token."""
    sizes = torch.tensor([[16, 16], [8, 16], [16, 16]])
    inputs = {"pixel_values": torch.zeros(3, 3, 16, 16), "image_sizes": sizes}
    found = rows_of_images(inputs, placeholders("xx xx xx", "xx xx"))
    assert bounds(found["pixel_values"]) == bounds(found["image_sizes"]) == [(0, 2), (2, 3)]


def test_pixels_padded_per_row():
    inputs = {"pixel_values": torch.zeros(2, 3, 3, 2, 2), "pixel_attention_mask": torch.zeros(2, 3, 2, 2)}
    found = rows_of_images(inputs, placeholders("x", ""))
    assert bounds(found["pixel_values"]) == bounds(found["pixel_attention_mask"]) == [(0, 1), (1, 2)]


def test_no_images():
    assert rows_of_images({"input_ids": torch.zeros(2, 2), "pixel_values": None}, placeholders("", "")) == {}


@pytest.mark.parametrize(
    ("inputs", "rows"),
    [
        ({"pixel_values": torch.zeros(8, 3), "image_grid_thw": torch.tensor([[1, 2, 4]])}, ("x", "x")),
        ({"pixel_values": torch.zeros(3, 3, 2, 2)}, ("xx", "xx")),
        ({"pixel_values": torch.zeros(2, 3, 2, 2)}, ("", "")),
        ({"pixel_values": torch.zeros(3, 5, 3, 2, 2), "image_sizes": torch.zeros(3, 2)}, ("xxxx", "x")),
        ({"pixel_values": torch.zeros(3, 1, 3, 2, 2)}, ("x", "x")),
        ({"pixel_values": torch.zeros(2, 4, 6), "spatial_shapes": torch.zeros(2, 2)}, ("x", "x")),
        ({"pixel_values": torch.zeros(2, 3, 2, 2), "pixel_attention_mask": torch.zeros(2, 2, 2)}, ("x", "x")),
        ({"image_grid_thw": torch.tensor([[1, 2, 4]])}, ("xx",)),
    ],
    ids=["grid", "tokens", "no tokens", "adjacent", "rows", "tiles of unequal size", "other input", "no pixels"],
)
def test_what_cannot_be_assigned_with_certainty_is_refused(inputs, rows):
    with pytest.raises(UnsupportedModel):
        rows_of_images(inputs, placeholders(*rows))


def test_images_without_a_token():
    """As where a row has been cut: nobody knows whose they are."""
    inputs = {"pixel_values": torch.zeros(8, 3), "image_grid_thw": torch.tensor([[1, 2, 4]])}
    with pytest.raises(UnsupportedModel, match="image tokens and image sizes that do not match"):
        rows_of_images(inputs, placeholders("  ", ""))
