"""A logged completion in a notebook: its tokens in colour, and its images beside what the model looked at."""

import base64
import math
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, Template

from vgr_trl.reporting.page import read_thumbnail
from vgr_trl.reporting.records import FOLDER, Completion, Numbers
from vgr_trl.utils import ConfigError, DataError

# ---------------------------------------------------------------------------------------------------------------------
# Colours for numbers per token that colour-blind readers can tell apart: blue below the middle, orange above.


Colour = tuple[int, int, int]

LOW: Colour = (33, 102, 172)
MIDDLE: Colour = (247, 247, 247)
HIGH: Colour = (179, 88, 6)


@dataclass(frozen=True)
class Quantity:
    """How a number per token is read.

    Attributes:
        title: its name for people.
        below, above: what values on either side of the middle mean; empty where there are none.
        ratio: the middle is 1 and twice as far as half; otherwise it is 0.
    """

    title: str
    below: str
    above: str
    ratio: bool = False


QUANTITIES = {
    "vgr": Quantity("vision gain ratio", "looks more", "looks less", ratio=True),
    "weights": Quantity("weight", "less of the credit", "more of the credit", ratio=True),
    "dependency": Quantity("dependency on the image", "", "depends on the image"),
    "advantages": Quantity("advantage", "made less likely", "made more likely"),
    "entropies": Quantity("entropy", "", "uncertain"),
    "logps": Quantity("log-probability", "unlikely", ""),
}


def positions(values: Sequence[float | None], ratio: bool) -> list[float | None]:
    """Return where each value lies between the farthest value below the middle, -1, and above it, 1; the middle is 0.

    Both sides have the same scale, that of the farthest value. None stays None.

    Args:
        values: finite numbers, or None where there is none.
        ratio: the middle is 1, distances are those of logarithms, and 0 or less is as far as it gets; otherwise the
            middle is 0 and distances are differences.
    """
    distances = [_distance(value, ratio) if value is not None else None for value in values]
    farthest = max((abs(distance) for distance in distances if distance and math.isfinite(distance)), default=1.0)
    return [None if distance is None else max(-1.0, min(1.0, distance / farthest)) for distance in distances]


def _distance(value: float, ratio: bool) -> float:
    if not ratio:
        return value
    return math.log(value) if value > 0 else -math.inf


def colour_at(position: float) -> Colour:
    """Return the colour of a position in [-1, 1]."""
    end = LOW if position < 0 else HIGH
    red, green, blue = (
        round(middle + abs(position) * (side - middle)) for middle, side in zip(MIDDLE, end, strict=True)
    )
    return red, green, blue


def text_colour(background: Colour) -> Colour:
    """Return black or white, whichever is easier to read on `background`, by the contrast that WCAG 2 defines."""
    luminance = _luminance(background)
    return (0, 0, 0) if (luminance + 0.05) / 0.05 >= 1.05 / (luminance + 0.05) else (255, 255, 255)


def css(colour: Colour) -> str:
    """Return the colour as CSS and SVG write it."""
    return "#{:02x}{:02x}{:02x}".format(*colour)


def _luminance(colour: Colour) -> float:
    parts = (channel / 255 for channel in colour)
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


SHOWN = 224  # pixels of the longer side of an image
DARKEST = 0.8  # opacity over a cell without attention
_TEMPLATE = Path(__file__).with_name("completion.html")


@dataclass(frozen=True)
class CompletionView:
    """HTML that a notebook shows in the place of the object; self-contained, without scripts."""

    html: str

    def _repr_html_(self) -> str:
        return self.html


def show_completion(
    completion: Completion, run_folder: str | Path, color_by: str = "vgr", token: int | None = None
) -> CompletionView:
    """Return a view of a logged completion: coloured tokens, and each image beside the attention over it.

    Every token and every cell of an image says its value when pointed at. Cells are the darker the less attention they
    get, relative to the cell that gets most.

    Args:
        completion: of a record that `vgr_trl.reporting.records.read_run` gives.
        run_folder: the run's `output_dir`, for the thumbnails.
        color_by: `vgr`, `weights`, `dependency`, `advantages`, `entropies` or `logps`.
        token: whose attention to show, counted from 0, or from the end if negative; None: the mean over all tokens.

    Raises:
        ConfigError: `color_by` or `token` is none of these.
        DataError: the completion's numbers do not fit its tokens or its images.
    """
    if color_by not in QUANTITIES:
        raise ConfigError(f"color_by is {color_by!r}: give {', '.join(QUANTITIES)}.")
    count = len(completion.tokens)
    if token is not None and not -count <= token < count:
        raise ConfigError(f"token is {token}, and the completion has {count} tokens: give one in [{-count}, {count}).")
    values = getattr(completion, color_by)
    if values is not None and len(values) != count:
        raise DataError(f"The completion has {count} tokens and {len(values)} values of {color_by}: log it again.")
    rewards = ", ".join(f"{name} {_number(value)}" for name, value in completion.rewards.items())
    return CompletionView(
        _template().render(
            prompt=_visible(completion.prompt),
            solution=None if completion.solution is None else _visible(completion.solution),
            reward=_number(completion.reward),
            rewards=rewards,
            right=None if completion.correct is None else ("right" if completion.correct else "wrong"),
            title=QUANTITIES[color_by].title,
            tokens=_tokens(completion.tokens, values, color_by),
            **_legend(values, color_by),
            images=_images(completion, Path(run_folder) / FOLDER, token),
        )
    )


@cache
def _template() -> Template:
    source = _TEMPLATE.read_text(encoding="utf-8")
    return Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(source)


def _tokens(tokens: list[str], values: Numbers | None, color_by: str) -> list[dict[str, str]]:
    quantity = QUANTITIES[color_by]
    values = [None] * len(tokens) if values is None else values
    shown = []
    for text, value, position in zip(tokens, values, positions(values, quantity.ratio), strict=True):
        style = "border-radius:3px;padding:2px 0;border:1px solid #ddd;"
        if position is not None:
            background = colour_at(position)
            style += f"background:{css(background)};color:{css(text_colour(background))}"
        shown.append({"text": _visible(text), "title": f"{quantity.title} {_number(value)}", "style": style})
    return shown


def _legend(values: Numbers | None, color_by: str) -> dict[str, Any]:
    quantity = QUANTITIES[color_by]
    found = [value for value in values or [] if value is not None]
    if not found:
        return {"measured": False, "legend": f"The {quantity.title} was not measured."}
    middle = "1" if quantity.ratio else "0"
    return {
        "measured": True,
        "below": quantity.below,
        "above": quantity.above,
        "colours": ",".join(css(colour_at(position)) for position in (-1.0, 0.0, 1.0)),
        "legend": f"{quantity.title} here {_number(min(found))} to {_number(max(found))}, {middle} in the middle. "
        "Point at a token for its value.",
    }


def _images(completion: Completion, folder: Path, token: int | None) -> list[dict[str, Any]]:
    cells = [image.grid[0] * image.grid[1] if image.grid is not None else 0 for image in completion.images]
    attention = _attention(completion, sum(cells), token) if all(cells) else None
    whose = "all tokens" if token is None else f"token {token % len(completion.tokens)}"
    shown, first = [], 0
    for number, (image, count) in enumerate(zip(completion.images, cells, strict=True), 1):
        longer = max(image.width, image.height, 1)
        size = max(1, round(image.width * SHOWN / longer)), max(1, round(image.height * SHOWN / longer))
        data = _data_uri(folder, image.file)
        label = f"Image {number}" + ("" if data else " (its thumbnail is missing)")
        own = attention[first : first + count] if attention else None
        if own is not None and attention is not None:
            label += f": as it is, and lit where {whose} looked"
        shown.append({"data": data, "shown": size, "label": label, "cells": _cells(own, image.grid, size, attention)})
        first += count
    return shown


def _attention(completion: Completion, cells: int, token: int | None) -> list[float] | None:
    """Attention on each cell of all images: of one token, or the mean over the tokens."""
    attention = completion.attention
    if attention is None or not completion.tokens:
        return None
    count = len(completion.tokens)
    if len(attention.scale) != count or len(attention.values) != count * cells:
        raise DataError(
            f"The completion has {count} tokens and {cells} cells of images, but {len(attention.values)} values of "
            "attention: log it again."
        )
    rows = [attention.row(index) for index in (range(count) if token is None else [token % count])]
    return [sum(column) / len(rows) for column in zip(*rows, strict=True)]


def _cells(
    own: list[float] | None, grid: tuple[int, int] | None, size: tuple[int, int], attention: list[float] | None
) -> list[dict[str, Any]]:
    if own is None or grid is None or attention is None or not (most := max(attention)):
        return []
    (rows, columns), (width, height), total = grid, size, sum(attention)
    return [
        {
            "x": round(width + 8 + column * width / columns, 2),
            "y": round(row * height / rows, 2),
            "width": round(width / columns, 2),
            "height": round(height / rows, 2),
            "opacity": round(DARKEST * (1 - own[row * columns + column] / most), 3),
            "title": f"row {row + 1}, column {column + 1}: {own[row * columns + column] / total:.1%} of the attention "
            "on the images",
        }
        for row in range(rows)
        for column in range(columns)
    ]


def _data_uri(folder: Path, file: str | None) -> str | None:
    """The thumbnail as a data URI; None if it is missing or lies elsewhere than the run's thumbnails."""
    content = None if file is None else read_thumbnail(folder, file)
    return None if content is None else "data:image/webp;base64," + base64.b64encode(content).decode()


def _visible(text: str) -> str:
    """Return `text` with line ends marked, and characters that do not show or that reorder text as their numbers."""
    return "".join(
        f"↵{char}"
        if char == "\n"
        else f"⟨U+{ord(char):04X}⟩"
        if unicodedata.category(char) in ("Cc", "Cf", "Cs") and char != "\t"
        else char
        for char in text
    )


def _number(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.4g}"
