"""Perturb the images of completions that call tools."""

from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image

from vgr_trl.patches.trl import process_with_options
from vgr_trl.pixels import image_tensors
from vgr_trl.scoring_inputs import ImagesOfRows, Turns
from vgr_trl.tools import show_again
from vgr_trl.views.conversations import Perturb


def perturb_turns(turns: Turns, numbers: Sequence[int], which: str, perturb: Perturb) -> list[list[Image.Image]]:
    """Perturb images of each row; return all images, the prompt's first.

    With `all`, a part of the first image shown by `vgr_trl.tools` becomes the same part of the perturbed image.

    Args:
        turns: images of prompts and tools.
        numbers: one number per row; rows with the same perturbed images of the prompt share it, over all processes.
        which: perturb `all` images, or only those of the `prompt` or of `tools`.
        perturb: returns perturbed images, given their number and the place of the first image in the row.
    """
    of_prompts: dict[int, list[Image.Image]] = {}
    shown = []
    for of_row, returned, number in zip(turns.images, turns.returned, numbers, strict=True):
        images, count = [*of_row], len(of_row) - len(returned)
        if which != "tools":
            if number not in of_prompts:
                of_prompts[number] = perturb(images[:count], index=number)
            images[:count] = of_prompts[number]
        if which != "prompt":
            images[count:] = perturb(images[count:], index=number, first=count)
        if which == "all" and count:
            parts = [show_again(part, images[0]) for part in of_row[count:]]
            images[count:] = [part or other for part, other in zip(parts, images[count:], strict=True)]
        shown.append(images)
    return shown


def rows_perturbed(turns: Turns, which: str) -> torch.Tensor:
    """Return the rows with an image that `perturb_turns` perturbs, (N,) bool."""
    returned = torch.tensor([*map(len, turns.returned)])
    every = torch.tensor([*map(len, turns.images)])
    return {"all": every, "tools": returned, "prompt": every - returned}[which] > 0


def process_images(processor: Any, images: ImagesOfRows) -> dict[str, torch.Tensor]:
    """Return the pixel inputs of the images of all rows, as TRL makes them for images of tools."""
    flat = [image for of_row in images for image in of_row]
    with process_with_options(processor):
        return image_tensors(processor.image_processor(images=flat, return_tensors="pt"))
