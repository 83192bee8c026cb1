"""Colours of numbers: positions by hand, and what keeps them readable."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vgr_trl.reporting.notebook import HIGH, LOW, MIDDLE, colour_at, css, positions, text_colour


def contrast(one: tuple[int, int, int], other: tuple[int, int, int]) -> float:
    """The contrast ratio of WCAG 2 (relative luminance of sRGB), from 1 to 21."""

    def luminance(colour: tuple[int, int, int]) -> float:
        parts = (channel / 255 for channel in colour)
        red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    darker, lighter = sorted(map(luminance, (one, other)))
    return (lighter + 0.05) / (darker + 0.05)


def test_positions_of_ratios_are_those_of_their_logarithms() -> None:
    # ln 4 is the farthest: ln 2 is half of it, and 1/4 as far on the other side.
    assert positions([1.0, 2.0, 4.0, 0.25, None], ratio=True) == pytest.approx([0, 0.5, 1, -1, None])


def test_positions_of_differences_start_at_nought() -> None:
    assert positions([0.0, 1.0, -4.0, None], ratio=False) == [0, 0.25, -1, None]


def test_a_ratio_of_nought_is_as_far_as_it_gets_and_does_not_stretch_the_scale() -> None:
    assert positions([0.0, 2.0, 1.0], ratio=True) == [-1, 1, 0]


def test_without_differences_all_are_in_the_middle() -> None:
    assert positions([1.0, 1.0], ratio=True) == [0, 0]
    assert positions([], ratio=False) == []
    assert positions([None], ratio=False) == [None]


def test_the_ends_and_the_middle_have_their_colours() -> None:
    assert (colour_at(-1), colour_at(0), colour_at(1)) == (LOW, MIDDLE, HIGH)
    assert css((0, 171, 255)) == "#00abff"


def test_contrast_is_that_of_wcag() -> None:
    # Published anchors: black on white 21, #777777 on white 4.48, a colour on itself 1.
    assert contrast((0, 0, 0), (255, 255, 255)) == pytest.approx(21)
    assert contrast((119, 119, 119), (255, 255, 255)) == pytest.approx(4.48, abs=0.005)
    assert contrast(HIGH, HIGH) == 1


@given(st.floats(-1, 1))
def test_text_is_readable_on_every_colour(position: float) -> None:
    background = colour_at(position)
    assert contrast(text_colour(background), background) >= 4.5


@given(st.lists(st.one_of(st.none(), st.floats(-1e300, 1e300)), max_size=20), st.booleans())
def test_positions_stay_in_their_range(values: list[float | None], ratio: bool) -> None:
    found = positions(values, ratio)
    assert [value is None for value in values] == [position is None for position in found]
    assert all(position is None or (math.isfinite(position) and -1 <= position <= 1) for position in found)
