"""Conversations with perturbed images: one for each prompt, or one for each completion; or without their images."""

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
    position: dict[int, int] = {}
    different: list[Any] = []
    for prompt, index in zip(prompts, indices, strict=True):
        if index not in position:
            position[index] = len(different)
            different.append(_with_images(prompt, partial(perturb, index=index)))
    return different, [position[index] for index in indices]


def _with_images(prompt: Any, perturb: Perturb) -> Any:
    images = images_in(prompt)
    if not images:
        return prompt
    replacements = iter(perturb(images))
    return [
        message
        if isinstance(message["content"], str)
        else {
            **message,
            "content": [
                {**part, "image": next(replacements)} if part["type"] == "image" else part
                for part in message["content"]
            ],
        }
        for message in prompt
    ]


def without_images(prompt: Any) -> Any:
    """Return a conversation whose messages have no images; a text as it is."""
    if isinstance(prompt, str):
        return prompt
    return [
        message
        if isinstance(message["content"], str)
        else {**message, "content": [part for part in message["content"] if part["type"] != "image"]}
        for message in prompt
    ]


def images_in(prompt: Any) -> list[Any]:
    """Return the images of a conversation, in order."""
    return [] if isinstance(prompt, str) else [part["image"] for part in _image_parts(prompt)]


def _image_parts(prompt: Any) -> list[dict[str, Any]]:
    return [
        part
        for message in prompt
        if not isinstance(message["content"], str)
        for part in message["content"]
        if part["type"] == "image"
    ]
