"""Reading images from a data set, with a reason where one cannot be used."""

import io
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image, UnidentifiedImageError

from vgr_trl.errors import DataError

MOST_ELONGATED = 200  # the ratio of sides from which on Qwen's image processors refuse an image
DEEP_MODES = ("I", "F", "I;16", "I;16L", "I;16B", "I;16N")


def open_image(value: Any, root: Path = Path()) -> Image.Image:
    """Return `value` as a fully decoded image.

    Args:
        value: an image, a path, or a dict with `bytes` or `path` as `datasets` stores undecoded images.
        root: folder that relative paths start from.

    Raises:
        DataError: the image is missing, unreadable, truncated, empty or too large; the message is the reason.
    """
    if isinstance(value, Image.Image):
        return _decode(value)
    if isinstance(value, Mapping):
        value = io.BytesIO(value["bytes"]) if value.get("bytes") is not None else value.get("path")
    if isinstance(value, str | Path):
        value = root / value
        if not value.is_file():
            raise DataError(f"image file {value} does not exist")
        value = io.BytesIO(value.read_bytes())
    elif not isinstance(value, io.BytesIO):
        raise DataError(f"image is of type {type(value).__name__}, not an image, a path or bytes")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            image = Image.open(value)
    except UnidentifiedImageError as error:
        raise DataError("image is unreadable: not in a known image format") from error
    except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
        raise DataError(f"image has too many pixels (more than {Image.MAX_IMAGE_PIXELS}): scale it down") from error
    except (OSError, SyntaxError, ValueError) as error:
        raise DataError(f"image is unreadable: {error}") from error
    return _decode(image)


def _decode(image: Image.Image) -> Image.Image:
    width, height = image.size
    if 0 in image.size or max(image.size) >= MOST_ELONGATED * min(image.size):
        raise DataError(f"image has size {width}x{height}: both sides need pixels, at most {MOST_ELONGATED} to 1")
    if image.mode in DEEP_MODES:
        raise DataError(f"image has mode {image.mode}, which models read as black or white: convert it to 8 bits")
    try:
        image.load()
    except (OSError, SyntaxError, ValueError) as error:
        raise DataError(f"image is truncated or damaged: {error}") from error
    return image
