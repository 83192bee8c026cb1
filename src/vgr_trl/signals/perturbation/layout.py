"""Images whose parts are elsewhere, or missing: shuffled squares, and a part enlarged to the whole."""

import math

import numpy as np
from PIL import Image

from vgr_trl.config.ranges import check_integer, check_number
from vgr_trl.signals.perturbation.modes import check_image


def shuffle_patches(image: Image.Image, *, patch_size: int = 14, seed: int) -> Image.Image:
    """Return the image with its whole squares in another order; what is left at the right and lower edge stays.

    Args:
        image: PIL image of any mode.
        patch_size: side of a square in pixels, at least 1.
        seed: of the random generator, at least 0.

    Raises:
        ConfigError: a parameter is out of range.
        DataError: `image` is no PIL image.
    """
    check_image(image)
    check_integer("seed", seed, 0)
    check_integer("patch_size", patch_size, 1)
    rows, columns = image.height // patch_size, image.width // patch_size
    places = [(column * patch_size, row * patch_size) for row in range(rows) for column in range(columns)]
    result = image.copy()
    for (left, top), source in zip(places, np.random.default_rng(seed).permutation(len(places)), strict=True):
        x, y = places[source]
        result.paste(image.crop((x, y, x + patch_size, y + patch_size)), (left, top))
    return result


def crop_image(image: Image.Image, *, share: float = 0.5, seed: int) -> Image.Image:
    """Return a random part of the image, enlarged to its size.

    Args:
        image: PIL image of any mode.
        share: of the area, in (0, 1].
        seed: of the random generator, at least 0.

    Raises:
        ConfigError: a parameter is out of range.
        DataError: `image` is no PIL image.
    """
    check_image(image)
    check_integer("seed", seed, 0)
    check_number("share", share, 1e-9, 1, "in (0, 1]")
    if not min(image.size):
        return image.copy()
    wide, high = (max(1, round(side * math.sqrt(share))) for side in image.size)
    generator = np.random.default_rng(seed)
    left = int(generator.integers(image.width - wide + 1))
    top = int(generator.integers(image.height - high + 1))
    result = image.crop((left, top, left + wide, top + high)).resize(image.size, Image.Resampling.NEAREST)
    result.info = dict(image.info)
    return result
