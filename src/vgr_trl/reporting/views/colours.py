"""Colours for numbers per token that colour-blind readers can tell apart: blue below the middle, orange above."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

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
