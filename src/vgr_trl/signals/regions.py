"""Vision tokens of the regions that a question is about, for models whose pixel inputs are known.

The processor itself finds out what of an image is within a region: it gets an image of the same size that is white
there and black elsewhere, so that resizing, cropping, padding and tiles are its own. What is left is how patches and
tiles become tokens.
"""

from collections.abc import Mapping, Sequence
from math import isqrt

import torch
from PIL import Image

from vgr_trl.boxes import Box
from vgr_trl.utils import DataError


def boxes_in_pixels(boxes: Sequence[Box], size: tuple[int, int]) -> list[tuple[float, float, float, float]]:
    """Return boxes as (left, top, width, height) in pixels of an image of this size, to a millionth."""
    wide, high = size
    corners = (
        (left * wide, top * high, (right - left) * wide, (bottom - top) * high) for left, top, right, bottom in boxes
    )
    return [(round(x, 6), round(y, 6), round(w, 6), round(h, 6)) for x, y, w, h in corners]


def drawn(boxes: Sequence[Box], size: tuple[int, int]) -> Image.Image:
    """Return a black image of that size that is white within the boxes, each of at least one pixel."""
    image = Image.new("RGB", size)
    for left, top, right, bottom in boxes:
        x, y = (min(round(start * side), side - 1) for start, side in ((left, size[0]), (top, size[1])))
        far = max(round(right * size[0]), x + 1), max(round(bottom * size[1]), y + 1)
        image.paste((255, 255, 255), (max(x, 0), max(y, 0), *far))
    return image


ENOUGH = 0.5  # share of a token that has to be within the region


def lit_share(region: torch.Tensor, black: torch.Tensor, white: torch.Tensor) -> torch.Tensor:
    """Return how white pixels are, in [0, 1]; 0 where the image has no part in them, which is padding.

    Args:
        region, black, white: `pixel_values` of the image that shows the region, and of a black and a white one.
    """
    span = (white - black).float()
    share = (region - black).float() / span.masked_fill(span == 0, 1)
    return share.masked_fill(span == 0, 0).clamp(0, 1)


def select_region(shares: torch.Tensor) -> torch.Tensor:
    """Return which tokens (V,) stand for the region: those at least half within it, else those that are most."""
    most = shares.max() if len(shares) else shares.sum()
    return (shares >= most.clamp(max=ENOUGH) - 1e-6) & (shares > 0)


def token_shares(lit: torch.Tensor, given: Mapping[str, torch.Tensor], num_tokens: int) -> torch.Tensor:
    """Return how much of each vision token of one image is lit, (V,) in [0, 1].

    Args:
        lit: of the shape of its `pixel_values`, in [0, 1].
        given: its pixel inputs.
        num_tokens: V.

    Raises:
        DataError: the pixels cannot be assigned to the tokens.
    """
    if "image_grid_thw" in given:  # Qwen, GLM: the patches of a token stand together
        patches = lit.flatten(1).mean(1)
        found = patches.view(num_tokens, -1).mean(1) if num_tokens and not len(patches) % num_tokens else patches
    elif "spatial_shapes" in given or "image_sizes" in given:  # tiles of unequal size, or rows of them without padding
        found = lit.new_zeros(0)
    else:  # squares: of one image, of its tiles, or of its tiles padded to those of another row
        squares = lit.flatten(0, 1) if lit.ndim == 5 else lit
        if (mask := given.get("pixel_attention_mask")) is not None:
            squares = squares[mask.flatten(0, 1).flatten(1).any(1)]
        side = isqrt(num_tokens // max(len(squares), 1))
        found = torch.cat([_pooled(square.mean(0), side, side) for square in squares]) if side else lit.new_zeros(0)
    if len(found) != num_tokens:
        shapes = {name: tuple(value.shape) for name, value in given.items()}
        raise DataError(
            f"An image has {num_tokens} tokens and the pixel inputs {shapes}, of which it is not known which token "
            "stands for which pixels: switch off what reads regions for this processor."
        )
    return found


def _pooled(image: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """The mean of (height, width) in each cell of a grid, row by row."""
    pooled: torch.Tensor = torch.nn.functional.adaptive_avg_pool2d(image[None, None], (rows, columns))
    return pooled.flatten()
