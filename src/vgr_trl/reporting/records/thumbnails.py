"""Small pictures of a prompt's images, named by what they show."""

import io
from hashlib import sha1

from PIL import Image

LONGEST_SIDE = 256  # pixels
QUALITY = 80  # of WebP, of 100: about 5 kB for a photograph of that size


def shrunk(image: Image.Image) -> Image.Image:
    """Return an RGB copy of `image` whose longer side has at most 256 pixels; what is transparent shows white."""
    small = image.copy() if max(image.size) <= LONGEST_SIDE else image
    if small is image:
        ratio = LONGEST_SIDE / max(image.size)
        small = image.resize(
            (max(1, round(image.width * ratio)), max(1, round(image.height * ratio))), reducing_gap=2.0
        )
    if small.has_transparency_data:
        shown = Image.new("RGBA", small.size, "white")
        shown.alpha_composite(small.convert("RGBA"))
        small = shown
    return small.convert("RGB")


def thumbnail_file(image: Image.Image) -> tuple[str, bytes]:
    """Return name and content of the file of a shrunk image: the same picture has the same name."""
    data = io.BytesIO()
    image.save(data, "WEBP", quality=QUALITY)
    content = data.getvalue()
    return f"images/{sha1(content, usedforsecurity=False).hexdigest()}.webp", content
