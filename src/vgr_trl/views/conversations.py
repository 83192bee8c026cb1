"""Conversations with their images perturbed or dropped."""

from collections.abc import Callable, Sequence
from typing import Any

from PIL import Image

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
