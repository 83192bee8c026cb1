import io
import re
from pathlib import Path

import pytest
from PIL import Image

from vgr_trl.data.rows.images.opening import open_image
from vgr_trl.errors import DataError


def encoded(size=(40, 30), kind="PNG", mode="RGB") -> bytes:
    buffer = io.BytesIO()
    Image.effect_noise(size, 80).convert(mode).save(buffer, kind)
    return buffer.getvalue()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "BMP", "WEBP", "TIFF"])
def test_whole_images_are_read(kind, tmp_path):
    data = encoded(kind=kind)
    path = tmp_path / "image"
    path.write_bytes(data)
    for value in (path, str(path), {"bytes": data, "path": None}, {"bytes": None, "path": str(path)}):
        assert open_image(value).size == (40, 30)


def test_relative_paths_start_from_the_root(tmp_path):
    (tmp_path / "a.png").write_bytes(encoded())
    assert open_image("a.png", tmp_path).size == (40, 30)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "image is unreadable: not in a known image format"),
        (b"not an image at all", "image is unreadable: not in a known image format"),
        (encoded()[:400], "image is truncated or damaged"),
        (encoded((90, 90), kind="JPEG")[:1500], "image is truncated or damaged"),
    ],
)
def test_damaged_images_are_refused_with_the_reason(data, reason):
    with pytest.raises(DataError, match=re.escape(reason)):
        open_image({"bytes": data, "path": None})


def test_a_decompression_bomb_is_refused_before_it_is_decoded(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(DataError, match="image has too many pixels \\(more than 1000\\): scale it down"):
        open_image({"bytes": encoded((40, 40)), "path": None})
    with pytest.raises(DataError, match="too many pixels"):
        open_image({"bytes": encoded((80, 80)), "path": None})


def test_a_zero_size_image_is_refused():
    with pytest.raises(DataError, match="image has size 0x5"):
        open_image(Image.new("RGB", (0, 5)))


def test_missing_files_and_foreign_types_are_named(tmp_path):
    with pytest.raises(DataError, match="nowhere.png does not exist"):
        open_image(tmp_path / "nowhere.png")
    with pytest.raises(DataError, match="image is of type int"):
        open_image(7)
    with pytest.raises(DataError, match="image is of type NoneType"):
        open_image({"bytes": None, "path": None})


def test_a_folder_is_not_an_image(tmp_path: Path):
    with pytest.raises(DataError, match="is a folder"):
        open_image(tmp_path)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("", "image is an empty text, not a path"),
        ("https://example.org/a.png", "image is an address (https://example.org…), which is not fetched"),
        ("data:image/png;base64,AAAA", "image is an address (data:image/png…), which is not fetched"),
    ],
)
def test_what_is_no_path_is_said(value, reason):
    for given in (value, {"bytes": None, "path": value}):
        with pytest.raises(DataError, match=re.escape(reason)):
            open_image(given)
