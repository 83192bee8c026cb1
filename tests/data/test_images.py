import io
from pathlib import Path

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from support.made_sets import encoded, picture

from vgr_trl.data.convert import encode_image, pixel_digest
from vgr_trl.data.images import ImageLimits, open_image, read_image, to_rgb
from vgr_trl.utils import DataError

HERE, LIMITS = Path(), ImageLimits()
ORIENTATION = 0x0112


def stored(value, limits=LIMITS) -> Image.Image:
    return Image.open(io.BytesIO(encode_image(value, HERE, limits).data))


def pixels(image: Image.Image) -> list:
    return [image.getpixel((x, y)) for y in range(image.height) for x in range(image.width)]


MODES = [
    ("1", 1, (255, 255, 255)),
    ("L", 77, (77, 77, 77)),
    ("P", 0, (0, 0, 0)),
    ("RGB", (1, 2, 3), (1, 2, 3)),
    ("RGBX", (1, 2, 3, 0), (1, 2, 3)),
    ("RGBA", (1, 2, 3, 255), (1, 2, 3)),
    ("RGBA", (1, 2, 3, 0), (255, 255, 255)),
    ("RGBA", (0, 0, 0, 51), (204, 204, 204)),  # a fifth of black on white
    ("RGBa", (0, 0, 0, 51), (204, 204, 204)),
    ("LA", (0, 0), (255, 255, 255)),
    ("LA", (9, 255), (9, 9, 9)),
    ("La", (0, 51), (204, 204, 204)),
    ("CMYK", (0, 0, 0, 0), (255, 255, 255)),
    ("CMYK", (255, 0, 0, 0), (0, 255, 255)),
    ("YCbCr", (255, 128, 128), (255, 255, 255)),
    ("HSV", (0, 0, 200), (200, 200, 200)),
    ("I", 255, (255, 255, 255)),
    ("I", 65535, (255, 255, 255)),
    ("I", 257 * 100, (100, 100, 100)),
    ("I;16", 65535, (255, 255, 255)),
    ("I;16", 257 * 100, (100, 100, 100)),
    ("I;16", 100, (0, 0, 0)),  # sixteen bits are read over their whole range, however dark the image
    ("I;16L", 257 * 100, (100, 100, 100)),
    ("I;16B", 257 * 100, (100, 100, 100)),
    ("F", 1.0, (255, 255, 255)),
    ("F", 0.4, (102, 102, 102)),
    ("F", 100.0, (100, 100, 100)),
]


@pytest.mark.parametrize(("mode", "value", "shown"), MODES)
def test_every_mode_becomes_rgb_on_white(mode, value, shown):
    image = to_rgb(Image.new(mode, (3, 2), value))
    assert (image.mode, image.size) == ("RGB", (3, 2))
    assert set(pixels(image)) == {shown}


def test_every_mode_of_pillow_is_tried():
    # PA and LAB are below; I;16N is I;16L or I;16B, by the machine.
    assert set(Image.MODES) - {"PA", "LAB", "I;16N"} <= {mode for mode, _, _ in MODES}


def test_a_palette_with_transparency_shows_white():
    image = Image.new("P", (2, 1))
    image.putpalette([10, 20, 30, 40, 50, 60])
    image.putpixel((1, 0), 1)
    image.info["transparency"] = 0
    assert pixels(to_rgb(image)) == [(255, 255, 255), (40, 50, 60)]
    assert pixels(to_rgb(Image.open(io.BytesIO(encoded(image, transparency=0))))) == [(255, 255, 255), (40, 50, 60)]
    with_alpha = image.convert("PA")
    assert to_rgb(with_alpha).getpixel((1, 0)) == (40, 50, 60)


def test_lab_is_read_by_its_profile():
    for value, shown in (((255, 128, 128), 255), ((0, 128, 128), 0)):
        assert to_rgb(Image.new("LAB", (1, 1), value)).getpixel((0, 0)) == pytest.approx((shown,) * 3, abs=1)


def test_a_transparent_colour_of_rgb_shows_white():
    image = Image.new("RGB", (2, 1), (1, 2, 3))
    image.putpixel((1, 0), (4, 5, 6))
    file = {"bytes": encoded(image, transparency=(1, 2, 3)), "path": None}
    assert pixels(stored(file)) == [(255, 255, 255), (4, 5, 6)]


@pytest.mark.parametrize(("mode", "value"), [("I", -1), ("I", 65536), ("F", 256.0), ("F", -0.1), ("F", float("nan"))])
def test_values_without_a_known_range_are_refused(mode, value):
    image = Image.new(mode, (3, 2))
    image.putpixel((1, 1), value)
    with pytest.raises(DataError, match=rf"image has mode {mode} and values from .* they must be 0 to"):
        to_rgb(image)


def test_sixteen_bits_survive_a_file():
    deep = Image.fromarray(numpy.array([[0, 257 * 9, 65535]], dtype=numpy.uint16))
    file = {"bytes": encoded(deep), "path": None}
    assert pixels(stored(file)) == [(0,) * 3, (9,) * 3, (255,) * 3]
    assert pixels(open_image(file)) == [(0,) * 3, (9,) * 3, (255,) * 3]


# Where the corners of an image lie after it is turned as EXIF says; corners are red, green, blue, white from the top
# left clockwise. From the table of the EXIF standard: 6, for example, has its row 0 at the right-hand side.
CORNERS = {1: "rgbw", 2: "grwb", 3: "bwrg", 4: "wbgr", 5: "rwbg", 6: "wrgb", 7: "bgrw", 8: "gbwr"}
COLOURS = {"r": (255, 0, 0), "g": (0, 255, 0), "b": (0, 0, 255), "w": (255, 255, 255)}


@pytest.mark.parametrize("orientation", CORNERS)
@pytest.mark.parametrize("kind", ["PNG", "TIFF", "WEBP"])
def test_images_are_turned_as_exif_says(orientation, kind):
    image = Image.new("RGB", (3, 2))
    for place, name in zip([(0, 0), (2, 0), (2, 1), (0, 1)], "rgbw", strict=True):
        image.putpixel(place, COLOURS[name])
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    file = {"bytes": encoded(image, kind, exif=exif, **({"lossless": True} if kind == "WEBP" else {})), "path": None}
    for turned in (stored(file), read_image(file)):
        right, bottom = turned.width - 1, turned.height - 1
        corners = [turned.getpixel(place) for place in ((0, 0), (right, 0), (right, bottom), (0, bottom))]
        assert corners == [COLOURS[name] for name in CORNERS[orientation]]
        assert turned.size == ((2, 3) if orientation >= 5 else (3, 2))
        assert turned.getexif().get(ORIENTATION, 1) == 1


def test_an_unknown_orientation_turns_nothing():
    exif = Image.Exif()
    exif[ORIENTATION] = 9
    data = encoded(Image.new("RGB", (3, 2)), "JPEG", exif=exif)
    assert stored({"bytes": data}).size == (3, 2)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_files_that_need_no_change_keep_their_bytes(kind):
    data = encoded(Image.effect_noise((40, 30), 80).convert("RGB"), kind)
    result = encode_image({"bytes": data, "path": None}, HERE, LIMITS)
    assert (result.data, result.width, result.height) == (data, 40, 30)
    assert Image.open(io.BytesIO(result.data)).format == kind
    assert result.suffix == {"JPEG": ".jpg", "PNG": ".png", "WEBP": ".webp"}[kind]


def test_other_files_are_written_anew_without_loss():
    image = Image.effect_noise((40, 30), 80).convert("RGB")
    for kind in ("BMP", "TIFF", "PPM"):
        result = encode_image({"bytes": encoded(image, kind)}, HERE, LIMITS)
        assert result.suffix == ".png"
        assert Image.open(io.BytesIO(result.data)).tobytes() == image.tobytes()
    frames = encoded(image, "PNG", save_all=True, append_images=[Image.new("RGB", (40, 30))])
    assert stored({"bytes": frames}).n_frames == 1
    assert stored({"bytes": frames}).tobytes() == image.tobytes()
    assert encode_image({"bytes": encoded(image.convert("L"), "JPEG")}, HERE, LIMITS).suffix == ".jpg"
    assert stored({"bytes": encoded(image.convert("L"), "JPEG")}).mode == "RGB"


def test_a_smaller_image_is_nearly_the_same_picture():
    gradient = Image.linear_gradient("L").convert("RGB").resize((512, 512))
    for kind in ("JPEG", "PNG"):
        small = stored({"bytes": encoded(gradient, kind)}, ImageLimits(max_pixels=128 * 128))
        assert (small.size, small.mode) == ((128, 128), "RGB")
        expected = numpy.asarray(gradient.resize((128, 128)), dtype=float)
        assert abs(numpy.asarray(small, dtype=float) - expected).max() <= 4


def test_images_with_too_many_pixels_are_left_out_before_they_are_decoded(monkeypatch):
    data = {"bytes": encoded(Image.new("RGB", (40, 40)))}
    assert encode_image(data, HERE, ImageLimits(max_image_pixels=1600)).width == 40
    monkeypatch.setattr(Image.Image, "load", lambda self: pytest.fail("decoded"))
    with pytest.raises(DataError, match="image has 40x40 pixels, more than max_image_pixels=1599"):
        encode_image(data, HERE, ImageLimits(max_image_pixels=1599))


def test_the_digest_is_of_the_pixels():
    image = Image.effect_noise((40, 30), 80).convert("RGB")
    digests = {
        encode_image({"bytes": encoded(image, kind)}, HERE, LIMITS, with_digest=True).digest
        for kind in ("PNG", "BMP", "TIFF")
    }
    assert digests == {pixel_digest(image)}
    assert pixel_digest(image) != pixel_digest(image.resize((30, 40)))
    assert pixel_digest(Image.new("RGB", (6, 2))) != pixel_digest(Image.new("RGB", (4, 3)))
    assert encode_image(picture(), HERE, LIMITS).digest == ""


WHOLE = {kind: encoded(Image.effect_noise((24, 17), 60).convert("RGB"), kind) for kind in ("PNG", "JPEG", "GIF", "BMP")}
WHOLE |= {kind: encoded(Image.effect_noise((24, 17), 60).convert("RGB"), kind) for kind in ("WEBP", "TIFF", "JPEG2000")}


@settings(max_examples=150, deadline=None)
@given(kind=st.sampled_from(sorted(WHOLE)), places=st.lists(st.tuples(st.integers(0, 10**6), st.binary(min_size=1))))
def test_damaged_files_give_an_image_or_a_reason(kind, places):
    data = bytearray(WHOLE[kind])
    for place, patch in places:
        start = place % len(data)
        data[start : start + len(patch)] = patch
    reason = None
    try:
        found = stored({"bytes": bytes(data)})
    except DataError as error:
        reason = str(error)
    if reason is not None:
        assert reason.startswith("image ")
    else:
        found.load()
        assert found.mode == "RGB"


@settings(max_examples=100, deadline=None)
@given(data=st.binary(max_size=400))
def test_random_bytes_are_no_image(data):
    with pytest.raises(DataError, match="image is unreadable"):
        encode_image({"bytes": data}, HERE, LIMITS)


@pytest.mark.parametrize("kind", sorted(WHOLE))
def test_files_are_read_by_any_name_of_them(kind, tmp_path):
    path = tmp_path / "image"
    path.write_bytes(WHOLE[kind])
    for value in (path, str(path), {"bytes": WHOLE[kind], "path": None}, {"bytes": None, "path": str(path)}):
        assert open_image(value).size == (24, 17)


def test_an_image_without_pixels_is_refused():
    with pytest.raises(DataError, match="image has size 0x5"):
        open_image(Image.new("RGB", (0, 5)))


@pytest.mark.parametrize("kind", sorted(WHOLE))
def test_truncated_files_are_refused(kind):
    for share in (0.3, 0.6, 0.9):
        data = WHOLE[kind][: int(share * len(WHOLE[kind]))]
        with pytest.raises(DataError, match="image is (truncated|unreadable)|image has size"):
            encode_image({"bytes": data}, HERE, LIMITS)


@pytest.mark.parametrize("value", [None, 3, 2.5, [], {}, {"bytes": "text"}, {"path": 7}, ["a"], "\0", "x" * 5000])
def test_what_is_no_image_is_named(value):
    with pytest.raises(DataError, match="image (is of type|file)"):
        encode_image(value, HERE, LIMITS)
