import io
import os
import struct
import tracemalloc
import zlib
from pathlib import Path
from unittest.mock import Mock

import pytest
import yaml
from datasets import Dataset
from PIL import Image, ImageOps
from support.made_sets import encoded

from vgr_trl.data.checked_rows import is_repeatable, prepare_rows
from vgr_trl.data.convert import encode_image
from vgr_trl.data.images import ImageLimits, image_size, open_image, read_image, to_rgb
from vgr_trl.errors import ConfigError, DataError

HERE, LIMITS = Path(), ImageLimits()
ORIENTATION = 0x0112
TABLE = yaml.safe_load(Path(__file__).with_name("images.yaml").read_text(encoding="utf-8"))


def stored(value, limits=LIMITS) -> Image.Image:
    return Image.open(io.BytesIO(encode_image(value, HERE, limits)[0]))


@pytest.mark.parametrize(("mode", "value", "shown"), TABLE["modes"])
def test_every_mode_becomes_rgb_on_white(mode, value, shown):
    image = to_rgb(Image.new(mode, (3, 2), tuple(value) if isinstance(value, list) else value))
    assert (image.mode, image.size, image.getcolors()) == ("RGB", (3, 2), [(6, tuple(shown))])


@pytest.mark.parametrize(("mode", "value"), [("I", -1), ("F", float("nan"))])
def test_values_outside_of_a_range_are_refused(mode, value):
    with pytest.raises(DataError, match=f"image has mode {mode} and values from"):
        to_rgb(Image.new(mode, (3, 2), value))


@pytest.mark.parametrize(("orientation", "kind"), [*((number, "PNG") for number in range(1, 9)), (6, "TIFF")])
def test_images_are_turned_as_exif_says(orientation, kind):
    image, exif = Image.effect_noise((3, 2), 80).convert("RGB"), Image.Exif()
    exif[ORIENTATION] = orientation
    file = {"bytes": encoded(image, kind, exif=exif), "path": None}
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(file["bytes"])))
    for turned in (stored(file), read_image(file)):
        assert (turned.size, turned.tobytes()) == (upright.size, upright.tobytes())
        assert turned.getexif().get(ORIENTATION, 1) == 1
    assert image_size(file) == upright.size == ((2, 3) if orientation >= 5 else (3, 2))


def test_files_that_need_no_change_keep_their_bytes_and_others_lose_nothing():
    image = Image.effect_noise((40, 30), 80).convert("RGB")
    for kind in ("JPEG", "PNG", "WEBP"):
        data, shown = encode_image({"bytes": encoded(image, kind), "path": None}, HERE, LIMITS)
        assert data == encoded(image, kind)
        assert shown.size == (40, 30)
    for kind in ("BMP", "TIFF", "PPM"):
        data, _ = encode_image({"bytes": encoded(image, kind)}, HERE, LIMITS)
        assert data.startswith(b"\x89PNG")
        assert Image.open(io.BytesIO(data)).tobytes() == image.tobytes()
    assert stored({"bytes": encoded(image.convert("L"), "JPEG")}).mode == "RGB"


def test_truncated_files_are_refused():
    for kind in ("PNG", "JPEG", "GIF", "WEBP", "TIFF"):
        whole = encoded(Image.effect_noise((24, 17), 60).convert("RGB"), kind)
        for share in (0.3, 0.6, 0.9):
            with pytest.raises(DataError, match="image is (truncated|unreadable)|image has size"):
                encode_image({"bytes": whole[: int(share * len(whole))]}, HERE, LIMITS)


@pytest.mark.parametrize(("limits", "size", "expected"), TABLE["sizes"])
def test_sizes_by_hand(limits, size, expected):
    size, expected = tuple(size), tuple(expected)
    assert ImageLimits(**limits).size_of(*size) == expected
    assert ImageLimits(**limits).size_of(*size[::-1]) == expected[::-1]
    assert ImageLimits(**limits).fitted(Image.new("RGB", size)).size == expected
    if max(size) > 1024:
        with pytest.raises(DataError, match="filter_big_images skips sides above 1024"):
            ImageLimits(**limits, filter_big_images=True).size_of(*size)
    with pytest.raises(ConfigError, match="above max_pixels 9"):
        ImageLimits(min_pixels=10, max_pixels=9)


def png(width, height):
    """Return a black PNG of one bit per pixel."""
    lines = zlib.compress(bytes(height * (1 + (width + 7) // 8)), 9)
    head, chunks = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0), b""
    for name, data in ((b"IHDR", head), (b"IDAT", lines), (b"IEND", b"")):
        chunks += struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
    return b"\x89PNG\r\n\x1a\n" + chunks


def test_a_bomb_is_refused_before_it_is_unpacked():
    bomb = png(30_000, 30_000)
    assert len(bomb) < 200_000
    tracemalloc.start()
    with pytest.raises(DataError, match="image is unreadable: Image size .900000000 pixels. exceeds limit"):
        open_image(bomb)
    assert tracemalloc.get_traced_memory()[1] < 5e6
    tracemalloc.stop()


def test_a_file_of_a_terabyte_of_nothing_is_not_read(tmp_path):
    (tmp_path / "a.png").write_bytes(png(8, 8))
    os.truncate(tmp_path / "a.png", 2**40)
    with pytest.raises(DataError, match="has 1099511627776 bytes; the limit is 1073741824"):
        open_image("a.png", tmp_path)


def test_what_is_no_image_is_refused_whatever_its_name(tmp_path):
    vector = b"<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'><image href='file:///etc/passwd'/></svg>"
    for data in (vector, b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(x) run\n", b""):
        for name in ("a.png", "a.eps"):
            (tmp_path / name).write_bytes(data)
            with pytest.raises(DataError, match="not in a known image format"):
                open_image(name, tmp_path)
    for value in (None, 3, {}, {"bytes": "text"}, {"path": 7}, "\0", "x" * 5000):
        with pytest.raises(DataError, match="image (is of type|file)"):
            open_image(value)


def test_a_prompt_is_decoded_once_for_its_completions_and_micro_batches(vision_trainer, monkeypatch):
    sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "num_generations": 4}
    trainer = vision_trainer(max_steps=2, compute_attention_metrics=False, rollout_log_steps=0, **sizes)
    opened = Mock(wraps=open_image)
    monkeypatch.setattr("vgr_trl.data.checked_rows.open_image", opened)
    trainer.train()
    assert opened.call_count == 3 * 4, "a batch is read ahead of the two steps"


def test_rows_of_a_transform_that_may_draw_lots_are_read_each_time(png):
    rows = Dataset.from_dict({"problem": ["a ?"], "solution": ["b"], "image": [str(png)]})
    assert is_repeatable(prepare_rows(rows, split="train", root=png.parent)[0])
    assert not is_repeatable(rows.with_transform(lambda batch: batch))
    assert not is_repeatable(rows.to_iterable_dataset())


def test_comments_in_a_ppm_are_read_within_reason():
    pixels = b"#" * 2**14
    for header in (b"P5 128 128 255 ", b"P5 # a\n128 #b\r 128\n255\n", b"P4\n1024 128\n"):
        assert image_size(header + pixels)[1] == 128
        assert open_image(header + pixels).height == 128
    for comments in (b"# " + b"x" * 2**14, b"#x\n" * 2**14):
        for read in (image_size, open_image):
            with pytest.raises(DataError, match="header of more than 4096 bytes"):
                read(b"P5 128 " + comments + b"\n128 255 " + pixels)
