"""Images that are larger than they look, and files that are no images, whatever they are called."""

import io
import os
import struct
import tracemalloc
import zlib
from contextlib import suppress

import pytest
from PIL import Image

from vgr_trl.data.images import open_image
from vgr_trl.utils import DataError

SIDE = 30_000


def chunk(name, data):
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width, height, *between):
    """A whole PNG of one bit a pixel, all black."""
    packer = zlib.compressobj(9)
    line = bytes(1 + (width + 7) // 8)
    data = b"".join(packer.compress(line) for _ in range(height)) + packer.flush()
    head = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + b"".join(between) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def tiff(width, height):
    tags = [(256, width), (257, height), (258, 8), (259, 1), (262, 1), (273, 8), (277, 1), (278, height), (279, 4)]
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
    return b"II*\0" + struct.pack("<I", 8) + struct.pack("<H", len(tags)) + entries + struct.pack("<I", 0)


def bmp(width, height):
    return b"BM" + struct.pack("<IHHIIiiHHIIiiII", 58, 0, 0, 54, 40, width, height, 1, 24, 0, 4, 0, 0, 0, 0) + bytes(4)


def gif(width, height):
    return b"GIF89a" + struct.pack("<HHBBB", width, height, 0x80, 0, 0) + bytes(6) + b";"


BOMBS = {
    "png": png(SIDE, SIDE),
    "tiff": tiff(SIDE, SIDE),
    "bmp": bmp(SIDE, SIDE),
    "gif": gif(65535, 65535),
    "ppm": b"P6 30000 30000 255\n",
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_before_it_is_unpacked(name):
    assert len(BOMBS[name]) < 200_000
    tracemalloc.start()
    with pytest.raises(DataError, match="image has too many pixels|image is unreadable"):
        open_image(BOMBS[name])
    assert tracemalloc.get_traced_memory()[1] < 5e6
    tracemalloc.stop()


def test_a_file_of_a_terabyte_of_nothing_is_not_read(tmp_path):
    (tmp_path / "a.png").write_bytes(png(8, 8))
    os.truncate(tmp_path / "a.png", 2**40)
    with pytest.raises(DataError, match="has 1099511627776 bytes: at most 1073741824 are read"):
        open_image("a.png", tmp_path)


@pytest.mark.parametrize("kind", [b"zTXt", b"iCCP", b"iTXt"])
def test_texts_and_profiles_that_unpack_to_much_are_not_kept(kind):
    packed = zlib.compress(bytes(200_000_000), 9)
    rest = b"\0\0" + packed if kind != b"iTXt" else b"\0\1\0\0\0" + packed
    tracemalloc.start()
    with suppress(DataError):
        assert open_image(png(8, 8, chunk(kind, b"a" + rest))).size == (8, 8)
    assert tracemalloc.get_traced_memory()[1] < 80e6
    tracemalloc.stop()


@pytest.mark.parametrize(
    "data",
    [
        b"just a text",
        b"<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'><image href='file:///etc/passwd'/></svg>",
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(x) run\n",
        b"<!doctype html><script>alert(1)</script>",
        b"\x80\x05\x95cos\nsystem\n",
        b"PK\x03\x04" + bytes(30),
        b"%PDF-1.7\n",
        b"",
    ],
)
def test_what_is_no_image_is_refused_whatever_its_name(tmp_path, data):
    for name in ("a.png", "a.jpg", "a.svg", "a.eps"):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(DataError, match="not in a known image format"):
            open_image(name, tmp_path)


def test_of_an_animation_the_first_picture_is_taken(tmp_path):
    frames = [Image.new("RGB", (8, 6), colour) for colour in ("red", "lime", "blue")]
    for kind in ("GIF", "PNG", "WEBP"):
        data = io.BytesIO()
        frames[0].save(
            data, kind, save_all=True, append_images=frames[1:], **({"lossless": True} if kind == "WEBP" else {})
        )
        image = open_image(data.getvalue())
        assert (image.mode, image.size, image.getpixel((0, 0))) == ("RGB", (8, 6), (255, 0, 0))
