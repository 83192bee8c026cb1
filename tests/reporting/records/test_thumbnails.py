"""Thumbnails: size, mode, and that the same picture has the same name."""

import io

import pytest
from PIL import Image

from vgr_trl.reporting.recorder import shrunk, thumbnail_file


@pytest.mark.parametrize(
    ("size", "expected"),
    [((512, 256), (256, 128)), ((100, 1000), (26, 256)), ((256, 256), (256, 256)), ((30, 20), (30, 20)),
     ((60_000, 3), (256, 1))],
)  # fmt: skip
def test_the_longer_side_has_at_most_256_pixels(size, expected):
    assert shrunk(Image.new("RGB", size)).size == expected


def test_the_original_stays_and_what_is_transparent_shows_white():
    original = Image.new("RGBA", (4, 4), (255, 0, 0, 0))
    small = shrunk(original)
    assert (small.mode, small.getpixel((0, 0))) == ("RGB", (255, 255, 255))
    assert (original.mode, original.getpixel((0, 0))) == ("RGBA", (255, 0, 0, 0))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "CMYK", "RGBA", "RGB"])
def test_every_mode_becomes_a_picture_that_opens(mode):
    name, content = thumbnail_file(shrunk(Image.new("RGB", (300, 40), (200, 30, 90)).convert(mode)))
    opened = Image.open(io.BytesIO(content))
    assert (opened.format, opened.size) == ("WEBP", (256, 34))
    assert len(name) == len("images/") + 40 + len(".webp")


def test_names_follow_the_content():
    red, red_too, blue = (Image.new("RGB", (9, 9), colour) for colour in ("red", "red", "blue"))
    assert thumbnail_file(red) == thumbnail_file(red_too)
    assert thumbnail_file(red)[0] != thumbnail_file(blue)[0]
