"""How large an image may be, and the size it is brought to, in conversion and in training."""

import math
from dataclasses import dataclass

from PIL import Image

from vgr_trl.errors import ConfigError, DataError

MAX_SHORT_SIDE = 1024


@dataclass(frozen=True)
class ImageLimits:
    """Bounds on an image's size; the ratio of the sides is kept to within a pixel.

    Attributes:
        min_pixels: a smaller image is enlarged to this area; None: not.
        max_pixels: a larger image is reduced to this area, after `max_short_side`; None: not.
        max_short_side: an image whose shorter side is longer is reduced to this; None: not.
        max_image_pixels: a larger image is left out before it is decoded; None: Pillow's own limit.

    Raises:
        ConfigError: a bound is below 1, or two bounds contradict each other.
    """

    min_pixels: int | None = None
    max_pixels: int | None = None
    max_short_side: int | None = MAX_SHORT_SIDE
    max_image_pixels: int | None = None

    def __post_init__(self) -> None:
        for name in ("min_pixels", "max_pixels", "max_short_side", "max_image_pixels"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ConfigError(f"{name} is {value!r}: give an integer of at least 1, or None for no such limit.")
        largest = self.max_pixels if self.max_short_side is None else self.max_short_side**2
        for bound in (self.max_pixels, largest):
            if self.min_pixels is not None and bound is not None and self.min_pixels > bound:
                raise ConfigError(
                    f"min_pixels is {self.min_pixels}, but max_pixels and max_short_side allow {bound} pixels: lower "
                    "min_pixels or raise the others."
                )
        pillow = Image.MAX_IMAGE_PIXELS
        for name in ("min_pixels", "max_image_pixels"):
            value = getattr(self, name)
            if value is not None and pillow is not None and value > pillow:
                raise ConfigError(
                    f"{name} is {value}, but Pillow refuses images of more than {pillow} pixels: give at most {pillow}."
                )

    def size_of(self, width: int, height: int) -> tuple[int, int]:
        """Return the size that an image of `width` x `height` pixels is brought to."""
        scale = 1.0
        if self.max_short_side is not None:
            scale = min(scale, self.max_short_side / min(width, height))
        if self.max_pixels is not None:
            scale = min(scale, math.sqrt(self.max_pixels / (width * height)))
        if scale < 1:
            return _within(width, height, scale)
        if self.min_pixels is not None and width * height < self.min_pixels:
            scale = math.sqrt(self.min_pixels / (width * height))
            larger = math.ceil(width * scale - 1e-9), math.ceil(height * scale - 1e-9)
            fits = self.max_pixels is None or larger[0] * larger[1] <= self.max_pixels
            return larger if fits else _within(width, height, scale)
        return width, height


def _within(width: int, height: int, scale: float) -> tuple[int, int]:
    """Round down, so that no limit is exceeded; the tolerance undoes the rounding of the scale itself."""
    return max(1, math.floor(width * scale + 1e-9)), max(1, math.floor(height * scale + 1e-9))


@dataclass(frozen=True)
class ImageRule:
    """What becomes of images that are too large or too small when rows are read for training.

    Attributes:
        limits: of the size; an image beyond them is brought within.
        leaves_out_larger: whether a row with an image above them is left out instead.
    """

    limits: ImageLimits = ImageLimits(max_short_side=None)
    leaves_out_larger: bool = False

    def check(self, image: Image.Image) -> None:
        """Raise `DataError` if the row of `image` is to be left out."""
        size = self.limits.size_of(*image.size)
        if self.leaves_out_larger and min(size) < min(image.size):
            raise DataError(
                f"image has size {image.width}x{image.height}, which filter_big_images leaves out: at most "
                f"{size[0]}x{size[1]} of that shape"
            )

    def fitted(self, image: Image.Image) -> Image.Image:
        """Return `image` within the limits."""
        size = self.limits.size_of(*image.size)
        return image if size == image.size else image.resize(size, Image.Resampling.LANCZOS)


ANY_SIZE = ImageRule()
