"""Conversations with their images perturbed or dropped."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from PIL import Image

Perturb = Callable[..., list[Image.Image]]  # images of a conversation, index=its number -> as many images


def perturbed_prompts(prompts: Sequence[Any], indices: Sequence[int], perturb: Perturb) -> tuple[list[Any], list[int]]:
    """Return the different prompts with perturbed images, and for every row which of them is its own.

    Args:
        prompts: per row, a conversation whose image parts hold the images, or a text.
        indices: per row, a number that rows with the same perturbed images share, over all processes.
        perturb: returns the perturbed images of a conversation.
    """
    firsts: dict[int, Any] = {}  # index -> the first prompt with it
    for prompt, index in zip(prompts, indices, strict=True):
        firsts.setdefault(index, prompt)
    position = {index: number for number, index in enumerate(firsts)}
    different = [_replace_images(prompt, partial(perturb, index=index)) for index, prompt in firsts.items()]
    return different, [position[index] for index in indices]


def _replace_images(prompt: Any, perturb: Perturb) -> Any:
    if not (images := images_in(prompt)):
        return prompt
    perturbed = iter(perturb(images))

    def replace(part: dict[str, Any]) -> list[dict[str, Any]]:
        return [{**part, "image": next(perturbed)} if part["type"] == "image" else part]

    return _replace_parts(prompt, replace)


def drop_images(prompt: Any) -> Any:
    """Return a conversation whose messages have no images; a text as it is."""
    return _replace_parts(prompt, lambda part: [] if part["type"] == "image" else [part])


def images_in(prompt: Any) -> list[Any]:
    """Return the images of a conversation, in order."""
    if isinstance(prompt, str):
        return []
    contents = [message["content"] for message in prompt if not isinstance(message["content"], str)]
    return [part["image"] for content in contents for part in content if part["type"] == "image"]


def _replace_parts(prompt: Any, replace: Callable[[dict[str, Any]], list[dict[str, Any]]]) -> Any:
    """Return a conversation with other content parts; texts as they are."""
    if isinstance(prompt, str):
        return prompt
    return [
        message
        if isinstance(message["content"], str)
        else {**message, "content": [new for part in message["content"] for new in replace(part)]}
        for message in prompt
    ]
