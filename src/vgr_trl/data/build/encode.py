"""Images as they are stored: upright RGB within the limits, in their own bytes wherever those are that already."""

import hashlib
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from vgr_trl.data.rows.images.opening import image_bytes, read_image, to_rgb
from vgr_trl.data.rows.images.sizes import ImageLimits

SUFFIXES = {"JPEG": ".jpg", "PNG": ".png", "WEBP": ".webp"}  # formats that are stored as they are
JPEG_QUALITY = 95


@dataclass(frozen=True)
class Encoded:
    """An image file: its bytes, the suffix of its format, its size in pixels, and the hash of its pixels."""

    data: bytes
    suffix: str
    width: int
    height: int
    digest: str = ""


def encode_image(value: Any, root: Path, limits: ImageLimits, *, with_digest: bool = False) -> Encoded:
    """Return `value` as an image file of RGB pixels within `limits`.

    A JPEG that changes is written as JPEG of quality 95 without subsampling, any other image that changes as PNG.

    Args:
        value: an image, a path, or a dict with `bytes` or `path`.
        root: folder that relative paths start from.

    Raises:
        DataError: the image cannot be used; the message is the reason.
    """
    if not isinstance(value, Image.Image):
        value = {"bytes": image_bytes(value, root)}
    image = read_image(value, root, limits.max_image_pixels)
    kind, size = image.format, limits.size_of(*image.size)
    unchanged = (
        isinstance(value, dict)
        and kind in SUFFIXES
        and image.mode == "RGB"
        and "transparency" not in image.info
        and getattr(image, "n_frames", 1) == 1
        and size == image.size
    )
    image = to_rgb(image)
    if size != image.size:
        image = image.resize(size, Image.Resampling.LANCZOS)
    digest = pixel_digest(image) if with_digest else ""
    if unchanged:
        return Encoded(value["bytes"], SUFFIXES[str(kind)], *size, digest)
    stored_as = "JPEG" if kind in ("JPEG", "MPO") else "PNG"
    return Encoded(_written(image, stored_as), SUFFIXES[stored_as], *size, digest)


def pixel_digest(image: Image.Image) -> str:
    """Return a hash of size and pixels, the same for the same RGB image in another file format."""
    return hashlib.sha256(f"{image.width}x{image.height} ".encode() + image.tobytes()).hexdigest()


def _written(image: Image.Image, kind: str) -> bytes:
    buffer = io.BytesIO()
    plain = Image.new("RGB", image.size)  # without colour profile and metadata, which belonged to the original
    plain.paste(image)
    if kind == "JPEG":
        plain.save(buffer, kind, quality=JPEG_QUALITY, subsampling=0)
    else:
        plain.save(buffer, kind, compress_level=3)
    return buffer.getvalue()
