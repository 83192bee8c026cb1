"""Find the vision tokens inside the regions that questions are about.

The processor itself tells which part of an image is within a region: it gets an image of the same size that is white
there and black elsewhere, which it resizes, crops, pads and tiles like the image. This file adds how patches become
tokens.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat

import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from vgr_trl.data.images import Box, boxes_of
from vgr_trl.errors import DataError
from vgr_trl.pixels import RowImages, image_tensors
from vgr_trl.rollout import Rollout, describe_row
from vgr_trl.run import Run
from vgr_trl.views.perturbed_pass import images_in, replace_images

_WHOLE: list[Box] = [(0.0, 0.0, 1.0, 1.0)]


def region_mask(run: Run, rollout: Rollout, prompt_ids: torch.Tensor) -> torch.Tensor | None:
    """Mark the vision tokens inside each row's boxes, (N, P) bool; None if nothing reads boxes.

    Rows without boxes, or with several images, get no token.

    Args:
        run: measurements and processor.
        rollout: rows with their boxes and conversations.
        prompt_ids: (N, P), tokens of the prompts.
    """
    if "regions" not in run.measurement.needed:
        return None
    vision_tokens = torch.tensor(run.measurement.vision_token_ids, device=prompt_ids.device)
    vision = torch.isin(prompt_ids, vision_tokens)  # (N, P)
    region = torch.zeros_like(vision)
    size = 1 if rollout.greedy else run.completions_per_prompt
    boxes: dict[int, list[Box]] = {}  # number of the prompt -> its boxes
    members: dict[int, list[int]] = {}
    for row in range(len(rollout.rows)):
        images = images_in(rollout.messages[row])
        if len(images) == 1 and (
            row_boxes := boxes_of(rollout.rows[row], images[0].size, f"The {describe_row(rollout.rows[row])}")
        ):
            number = (rollout.first + row) // size
            boxes[number] = row_boxes
            members.setdefault(number, []).append(row)
    if not boxes:
        return region
    leaders = [rows[0] for rows in members.values()]

    def draw(regions: Iterable[list[Box]]) -> dict[str, Tensor]:
        """Return the pixel inputs of the leaders' prompts, whose images are replaced by drawings of regions."""
        prompts = [rollout.messages[row] for row in leaders]
        sizes = [images_in(prompt)[0].size for prompt in prompts]
        drawn = [[draw_regions(row_boxes, size)] for row_boxes, size in zip(regions, sizes, strict=False)]
        return image_tensors(run.tokenize([*map(replace_images, prompts, drawn)]).fields)

    shown, black, white = map(draw, (boxes.values(), repeat([]), repeat(_WHOLE)))
    lit = lit_share(*(inputs["pixel_values"] for inputs in (shown, black, white)))
    drawings = RowImages.count(shown, vision[leaders].cpu(), [1] * len(leaders))
    parts = drawings.slices["pixel_values"]
    for index, rows in enumerate(members.values()):
        places = vision[leaders[index]].nonzero().flatten()
        shares = token_shares(lit[parts[index]], drawings.rows[index], len(places))
        chosen = select_region(shares).to(region.device)
        for row in rows:
            region[row, vision[row]] = chosen
    return region


def boxes_in_pixels(boxes: Sequence[Box], size: tuple[int, int]) -> list[tuple[float, float, float, float]]:
    """Convert boxes to (left, top, width, height) in pixels of an image of this size, rounded to a millionth."""
    wide, high = size
    corners = (
        (left * wide, top * high, (right - left) * wide, (bottom - top) * high) for left, top, right, bottom in boxes
    )
    return [(round(x, 6), round(y, 6), round(w, 6), round(h, 6)) for x, y, w, h in corners]


def draw_regions(boxes: Sequence[Box], size: tuple[int, int]) -> Image.Image:
    """Draw a black image that is white within the boxes, each at least one pixel wide and high."""
    image = Image.new("RGB", size)
    for left, top, right, bottom in boxes:
        x, y = (min(round(start * side), side - 1) for start, side in ((left, size[0]), (top, size[1])))
        far = max(round(right * size[0]), x + 1), max(round(bottom * size[1]), y + 1)
        image.paste((255, 255, 255), (max(x, 0), max(y, 0), *far))
    return image


MIN_REGION_SHARE = 0.5  # a token belongs to a region if at least this share of it lies inside


def lit_share(region: Tensor, black: Tensor, white: Tensor) -> Tensor:
    """Return the share of white in each entry of `pixel_values`, in [0, 1]; 0 in padding.

    Args:
        region: `pixel_values` of the image that shows the region.
        black: `pixel_values` of a black image, of the same shape.
        white: `pixel_values` of a white image, of the same shape.
    """
    span = (white - black).float()
    share = (region - black).float() / span.masked_fill(span == 0, 1)
    return share.masked_fill(span == 0, 0).clamp(0, 1)


def select_region(shares: Tensor) -> Tensor:
    """Return the tokens of the region, (V,) bool: tokens at least half within it, or else the most covered tokens."""
    most = shares.max() if len(shares) else shares.sum()
    return (shares >= most.clamp(max=MIN_REGION_SHARE) - 1e-6) & (shares > 0)


def token_shares(lit: Tensor, inputs: Mapping[str, Tensor], num_tokens: int) -> Tensor:
    """Return the lit share of each vision token of one image, (V,) in [0, 1].

    Args:
        lit: share of white in each entry of the image's `pixel_values`, in [0, 1].
        inputs: pixel inputs of the image.
        num_tokens: V, vision tokens of the image.

    Raises:
        DataError: the pixels cannot be assigned to the tokens.
    """
    if "image_grid_thw" in inputs:  # Qwen, GLM: the patches of a token are adjacent
        patches = lit.flatten(1).mean(1)
        shares = patches.view(num_tokens, -1).mean(1) if num_tokens and not len(patches) % num_tokens else patches
    elif "spatial_shapes" in inputs or "image_sizes" in inputs:  # tiles of unequal size: unknown
        shares = lit.new_zeros(0)
    else:  # squares: one image, its tiles, or its tiles padded to the tiles of another row
        squares = lit.flatten(0, 1) if lit.ndim == 5 else lit
        if (mask := inputs.get("pixel_attention_mask")) is not None:
            squares = squares[mask.flatten(0, 1).flatten(1).any(1)]
        side = math.isqrt(num_tokens // max(len(squares), 1))
        pooled = adaptive_avg_pool2d(squares.mean(1, keepdim=True), side) if side else lit.new_zeros(0)
        shares = pooled.flatten()  # square by square, row by row
    if len(shares) != num_tokens:
        shapes = {name: tuple(value.shape) for name, value in inputs.items()}
        unknown = f"An image has {num_tokens} tokens and the pixel inputs {shapes}, which cannot be matched"
        raise DataError(f"{unknown}: switch off options that read regions for this processor.")
    return shares
