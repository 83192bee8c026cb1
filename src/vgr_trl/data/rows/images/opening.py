"""Reading images from a data set, with a reason where one cannot be used."""

import io
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps, UnidentifiedImageError

from vgr_trl.data.rows.images.places import path_within
from vgr_trl.errors import DataError, words_of

LARGEST_FILE = 2**30  # bytes; more than Pillow's limit of pixels takes without compression, and read as a whole
MOST_ELONGATED = 200  # the ratio of sides from which on Qwen's image processors refuse an image
DEEP_MODES = ("I", "F", "I;16", "I;16L", "I;16B", "I;16N")
# Formats that are recognised by their first bytes; of the others, some take any bytes for an image (TGA), some run a
# program (EPS).
FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "MPO", "PNG", "PPM", "TIFF", "WEBP")
ADDRESS = re.compile(r"(?:https?|ftp|s3|gs|hf|file)://[^/]*|data:[\w/+.-]*(?=[;,])", re.IGNORECASE)
ORIENTATION = 0x0112  # the EXIF tag


def open_image(value: Any, root: Path = Path()) -> Image.Image:
    """Return `value` as an upright RGB image, the same that `convert` stores.

    Args:
        value: an image, a path, or a dict with `bytes` or `path` as `datasets` stores undecoded images.
        root: as `path_within` takes it.

    Raises:
        DataError: the image is missing, unreadable, truncated, empty, too large, or of values that no mode has; the
            message is the reason.
    """
    return to_rgb(read_image(value, root))


def read_image(value: Any, root: Path = Path(), max_image_pixels: int | None = None) -> Image.Image:
    """Return `value` as a fully decoded image of any mode, turned as its EXIF data say.

    Args:
        max_image_pixels: larger images are refused before they are decoded; None: Pillow's limit.

    Raises:
        DataError: as in `open_image`, values apart.
    """
    if isinstance(value, Image.Image):
        return _decoded(value, max_image_pixels)
    data = image_bytes(value, root)
    try:
        with _quietly():
            image = Image.open(io.BytesIO(data), formats=_formats())
    except UnidentifiedImageError as error:
        raise DataError("image is unreadable: not in a known image format") from error
    except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
        raise DataError(f"image has too many pixels (more than {Image.MAX_IMAGE_PIXELS}): scale it down") from error
    except Exception as error:  # Pillow's decoders raise whatever damaged bytes lead them to
        raise DataError(f"image is unreadable: {words_of(error)}") from error
    return _decoded(image, max_image_pixels)


def image_bytes(value: Any, root: Path = Path()) -> bytes:
    """Return the encoded bytes of an undecoded image: bytes, a path, or a dict with `bytes` or `path`.

    Raises:
        DataError: it is none of these, or the file does not exist, cannot be read or lies outside of `root`.
    """
    if isinstance(value, Mapping):
        value = value["bytes"] if value.get("bytes") is not None else value.get("path")
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str | Path):
        raise DataError(f"image is of type {type(value).__name__}, not an image, a path or bytes")
    if not str(value):
        raise DataError("image is an empty text, not a path")
    if address := ADDRESS.match(str(value)):
        raise DataError(f"image is an address ({address[0]}…), which is not fetched: save it, and give its path")
    try:
        path = path_within(root, value)
        if path.is_file():
            if (size := path.stat().st_size) > LARGEST_FILE:
                raise DataError(f"image file {str(path)[:200]} has {size} bytes: at most {LARGEST_FILE} are read")
            return path.read_bytes()
        is_folder = path.is_dir()
    except DataError:
        raise
    except (OSError, ValueError) as error:
        raise DataError(f"image file {str(root / value)[:200]!r} cannot be read ({words_of(error)})") from error
    raise DataError(f"image file {str(path)[:200]} {'is a folder' if is_folder else 'does not exist'}")


def to_rgb(image: Image.Image) -> Image.Image:
    """Return `image`, of any mode of Pillow's, as RGB; what is transparent shows white.

    Images of more than 8 bits per channel are scaled from their whole range: 16 bits from 0 to 65535, whole numbers
    likewise unless all are below 256, floating point from 0 to 1, or else to 255.

    Raises:
        DataError: a pixel is outside these ranges, or not a number.
    """
    if image.mode in DEEP_MODES:
        image = _eight_bits(image)
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode == "La":
        image = image.convert("LA")  # Pillow has no shorter way
    if not image.has_transparency_data:
        return image.convert("RGB")
    shown = Image.new("RGBA", image.size, "white")
    shown.alpha_composite(image.convert("RGBA"))
    return shown.convert("RGB")


def _decoded(image: Image.Image, max_image_pixels: int | None) -> Image.Image:
    width, height = image.size
    if 0 in image.size or max(image.size) >= MOST_ELONGATED * min(image.size):
        raise DataError(f"image has size {width}x{height}: both sides need pixels, at most {MOST_ELONGATED} to 1")
    if max_image_pixels is not None and width * height > max_image_pixels:
        raise DataError(f"image has {width}x{height} pixels, more than max_image_pixels={max_image_pixels}")
    try:
        with _quietly():
            image.load()
    except Exception as error:  # as above
        raise DataError(f"image is truncated or damaged: {words_of(error)}") from error
    try:
        with _quietly():
            turned = image.getexif().get(ORIENTATION, 1) in range(2, 9)
            return ImageOps.exif_transpose(image) if turned else image
    except Exception as error:  # as above
        raise DataError(f"image has damaged EXIF data: {words_of(error)}") from error


def _eight_bits(image: Image.Image) -> Image.Image:
    import numpy  # here, so that a decoding process starts without it

    values = numpy.asarray(image, dtype=numpy.float32)
    low, high = float(values.min()), float(values.max())
    largest = 255 if image.mode == "F" else 65535
    if not (low >= 0 and high <= largest):
        raise DataError(f"image has mode {image.mode} and values from {low:g} to {high:g}: they must be 0 to {largest}")
    if image.mode == "F":
        full = 1.0 if high <= 1 else 255.0
    else:
        full = 255.0 if image.mode == "I" and high < 256 else 65535.0
    return Image.fromarray((values * (255 / full) + 0.5).astype(numpy.uint8))


@cache
def _formats() -> tuple[str, ...]:
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


@contextmanager
def _quietly() -> Iterator[None]:
    """Make Pillow's warning of a decompression bomb an error, and say nothing of doubtful metadata."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        yield
