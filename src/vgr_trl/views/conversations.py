"""Conversations and tool turns with their images perturbed or dropped."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from PIL import Image

from vgr_trl.patches.trl import process_with_options
from vgr_trl.pixels import image_tensors
from vgr_trl.scoring_inputs import ImagesOfRows, Turns
from vgr_trl.tools import show_again

Perturb = Callable[..., list[Image.Image]]  # images of a conversation, index=its number -> as many images


def perturb_prompts(prompts: Sequence[Any], indices: Sequence[int], perturb: Perturb) -> tuple[list[Any], list[int]]:
    """Perturb the images of each distinct prompt once.

    Args:
        prompts: one prompt per row, a conversation whose image parts hold the images, or a text.
        indices: one number per row; rows with the same perturbed images share it, over all processes.
        perturb: returns the perturbed images of a conversation.

    Returns:
        The distinct prompts, perturbed, and for every row the place of its prompt among them.
    """
    firsts: dict[int, Any] = {}  # index -> its first prompt
    for prompt, index in zip(prompts, indices, strict=True):
        firsts.setdefault(index, prompt)
    position = {index: number for number, index in enumerate(firsts)}
    perturbed = []
    for index, prompt in firsts.items():
        images = images_in(prompt)
        perturbed.append(_replace_images(prompt, perturb(images, index=index)) if images else prompt)
    return perturbed, [position[index] for index in indices]


def drop_images(prompt: Any) -> Any:
    """Remove the images from a conversation; a text is returned unchanged."""
    return _replace_images(prompt, ())


def images_in(prompt: Any) -> list[Any]:
    """Return the images of a conversation, in order."""
    if isinstance(prompt, str):
        return []
    contents = [message["content"] for message in prompt if not isinstance(message["content"], str)]
    return [part["image"] for content in contents for part in content if part["type"] == "image"]


def _replace_images(prompt: Any, images: Sequence[Any]) -> Any:
    """Replace the images of a conversation, in order; image parts beyond the given images are removed."""
    if isinstance(prompt, str):
        return prompt
    left, messages = iter(images), []
    for message in prompt:
        if not isinstance(message["content"], str):
            parts = [
                {**part, "image": next(left, None)} if part["type"] == "image" else part for part in message["content"]
            ]
            kept = [part for part in parts if part["type"] != "image" or part["image"] is not None]
            message = {**message, "content": kept}
        messages.append(message)
    return messages


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
