"""`<image>` in the text of a question marks the place of an image, as LLaVA, ms-swift and EasyR1 write it."""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from vgr_trl.errors import DataError

IMAGE_MARK = "<image>"
# What transformers reads a file from, or fetches it, while it writes a conversation down; an `image` may be one itself.
NAMES = ("url", "path", "base64", "image_url", "video", "video_url", "audio", "audio_url")

Part = dict[str, Any]


def require_marks(prompt: str | Sequence[Part], images: int, has_videos: bool = False) -> None:
    """Raise `DataError` if `prompt`, a text or a conversation, marks places of images, but not of as many as there are.

    Args:
        prompt: with marks in the texts of the user, or parts of type `image`.
        has_videos: whether it has videos, whose frames come before the text.
    """
    marks = prompt.count(IMAGE_MARK) if isinstance(prompt, str) else sum(map(_is_image, _parts_of(placed(prompt))))
    if marks and has_videos:
        raise DataError("its prompt marks places of images beside a video, whose frames come first: take them out")
    if marks and marks != images:
        raise DataError(f"its prompt has {marks} <image> marks, but there are {images} images")


def placed(conversation: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a conversation with a part of type `image` for each `<image>` in a text of the user, else as it is."""
    is_marked = any(IMAGE_MARK in str(part.get("text")) for part in _parts_of(conversation, "user"))
    if not is_marked and all(isinstance(message["content"], str) for message in conversation):
        return list(conversation)
    return [
        {**message, "content": list(chain.from_iterable(map(_split, parts)) if message["role"] == "user" else parts)}
        for message, parts in ((message, as_parts(message["content"])) for message in conversation)
    ]


def refuse_named_files(conversation: Sequence[dict[str, Any]]) -> None:
    """Raise `DataError` if a part of a conversation names a file or an address, which would be read or fetched."""
    for part in _parts_of(conversation):
        names = [name for name in NAMES if part.get(name) is not None]
        if names or isinstance(part.get("image"), str | bytes | dict):
            raise DataError(
                f"a part of its prompt names a file ({(names or ['image'])[0]}), which is neither read nor fetched: "
                "put images in the column images"
            )


def as_parts(content: Any) -> list[Part]:
    """Return the content of a message as parts, without what a table has filled in."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [{name: value for name, value in part.items() if value is not None} for part in content]


def texts_of(conversation: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the texts of a conversation."""
    return (part["text"] for part in _parts_of(conversation) if isinstance(part.get("text"), str))


def _split(part: Part) -> Iterator[Part]:
    if part.get("type") != "text" or IMAGE_MARK not in part["text"]:
        yield part
        return
    for number, text in enumerate(part["text"].split(IMAGE_MARK)):
        if number:
            yield {"type": "image"}
        if text:
            yield {"type": "text", "text": text}


def _parts_of(conversation: Sequence[dict[str, Any]], role: str | None = None) -> Iterator[Part]:
    return (
        part for message in conversation if role in (None, message["role"]) for part in as_parts(message["content"])
    )


def _is_image(part: Part) -> bool:
    return part.get("type") == "image"
