"""A question as it is shown to a person: its texts, its right option, its images made small."""

import base64
import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from PIL import Image

from vgr_trl.data.rows.columns import images_of
from vgr_trl.data.rows.images.opening import to_rgb
from vgr_trl.data.rows.text.prompts import LETTERS

LONGEST_SIDE = 640  # pixels of a shown image; twelve questions stay far below 10 MB
MOST_IMAGES = 8  # of one question
QUALITY = 85


@dataclass(frozen=True)
class Picture:
    """A small copy of an image: a data URL, and width and height of the original in pixels."""

    url: str
    width: int
    height: int


@dataclass(frozen=True)
class Sampled:
    """A row to look at.

    Attributes:
        row: its 0-based place in the split.
        id, source: as stored, empty where there are none.
        messages: role and text of every message of the prompt.
        choices: letter, text and whether it is right, of every option.
        solution: as stored.
        pictures: its images, at most eight.
        more_images: how many images are not shown.
        length: tokens of the prompt, None where not measured.
    """

    row: int
    id: str
    source: str
    messages: list[tuple[str, str]]
    choices: list[tuple[str, str, bool]]
    solution: str
    pictures: list[Picture]
    more_images: int
    length: int | None


def sampled(row: Mapping[str, Any], index: int, right: str | None, length: int | None) -> Sampled:
    """Return what is shown of a row.

    Args:
        row: ready, with `prompt` and decoded images.
        index: its place in the split.
        right: letter of its right option, None for an open question.
        length: tokens of its prompt, None where not measured.
    """
    images = images_of(row)
    stated = row.get("solution") if row.get("solution") is not None else row.get("label_idx")
    return Sampled(
        row=index,
        id=_text(row.get("id")),
        source=_text(row.get("source")),
        messages=_messages(row["prompt"]),
        choices=[
            (letter, _text(choice), letter == right)
            for letter, choice in zip(LETTERS, row.get("choices") or (), strict=False)
        ],
        solution=_text(stated),
        pictures=[picture(image) for image in images[:MOST_IMAGES]],
        more_images=max(0, len(images) - MOST_IMAGES),
        length=length,
    )


def picture(image: Image.Image) -> Picture:
    """Return a small JPEG of `image`, what is transparent white, as a data URL."""
    width, height = image.size
    scale = min(1.0, LONGEST_SIDE / max(width, height))
    small = to_rgb(image).resize((max(1, round(width * scale)), max(1, round(height * scale))), reducing_gap=2.0)
    buffer = io.BytesIO()
    small.save(buffer, "JPEG", quality=QUALITY)
    return Picture("data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode(), width, height)


def _messages(prompt: Any) -> list[tuple[str, str]]:
    if isinstance(prompt, str):
        return [("text", _text(prompt))]
    return [(_text(message["role"]), _content(message["content"])) for message in prompt]


def _content(content: Any) -> str:
    if isinstance(content, str):
        return _text(content)
    parts = [part.get("text") or f"[{part.get('type')}]" if isinstance(part, Mapping) else part for part in content]
    return "\n".join(_text(part) for part in parts)


def _text(value: Any) -> str:
    """The text of a value, with a mark for what is no Unicode: a file could not hold it."""
    return "" if value is None else str(value).encode("utf-8", "replace").decode("utf-8")
