"""Tools that show the image of a row again, for `environment_factory` of a trainer.

    DAPOTrainer(model, rewards, args, train_dataset=rows, environment_factory=Zoom)

TRL makes one environment per completion, passes its row to `reset`, and offers the other methods to the policy.
"""

import inspect
import math
from collections.abc import Mapping
from typing import Any

from PIL import Image

from vgr_trl.data.images import images_of, open_image
from vgr_trl.errors import ConfigError, DataError
from vgr_trl.registries import import_attribute

SMALLEST = 28  # least width and height of a part in pixels: a token of Qwen's models
_PART = "vgr_trl_part"  # key in `Image.info`: the box, in pixels of the row's first image, that a part shows


class _ImageOfRow:
    """Keeps the first image of the row that a completion answers."""

    def reset(self, **row: Any) -> None:
        """Keep the first image of a row of the data.

        Raises:
            DataError: the row has no image, or its image cannot be read.
        """
        if not (images := images_of(row)):
            raise DataError("A row has no column `image` or `images` for the tools to look at: add one.")
        self._image = images[0] if isinstance(images[0], Image.Image) else open_image(images[0])  # as the model sees it


class Zoom(_ImageOfRow):
    """Shows a part of the row's first image, in the resolution of the data."""

    def zoom(self, box: list[float]) -> list[dict[str, Any]] | str:
        """
        Look at a part of the first image more closely.

        Args:
            box: Left, top, right and bottom of the part, as numbers from 0 to 1: 0 is the left or upper edge of the
                image, 1 the right or lower edge.

        Returns:
            The part of the image.
        """
        numbers = box if isinstance(box, list | tuple) else []
        is_box = len(numbers) == 4 and all(isinstance(side, int | float) and math.isfinite(side) for side in numbers)
        left, top, right, bottom = (min(max(float(side), 0.0), 1.0) for side in numbers) if is_box else (0.0,) * 4
        if right <= left or bottom <= top:
            wanted = "[left, top, right, bottom] with numbers from 0 to 1, left below right and top below bottom"
            return f"The box {box} is not a part of the image: give {wanted}."
        x, far_x = _to_pixels(left, right, self._image.width)
        y, far_y = _to_pixels(top, bottom, self._image.height)
        return [{"type": "image", "image": show_part(self._image, (x, y, far_x, far_y))}]


class LookAgain(_ImageOfRow):
    """Shows the row's first image once more."""

    def look_again(self) -> list[dict[str, Any]]:
        """
        Look at the whole first image once more.

        Returns:
            The image.
        """
        return [{"type": "image", "image": show_part(self._image, (0, 0, *self._image.size))}]


ENVIRONMENTS: Mapping[str, type] = {"zoom": Zoom, "look_again": LookAgain}


def load_environment(spec: str) -> Any:
    """Load the class that the option `environment` names: a key of `ENVIRONMENTS`, a dotted path or a file.

    Raises:
        ConfigError: the class does not exist, cannot be imported, or is not a class.
    """
    if spec in ENVIRONMENTS:
        return ENVIRONMENTS[spec]
    if "." not in spec:
        alternatives = "a dotted path (my_package.tools.MyTools) or a file (my_tools.py:MyTools)"
        raise ConfigError(f"environment is {spec!r}: give {' or '.join(ENVIRONMENTS)}, {alternatives}.")
    environment = import_attribute(spec, "environment")
    if not inspect.isclass(environment):
        raise ConfigError(f"environment is {spec}, which is of type {type(environment).__name__}: give a class.")
    return environment


def _to_pixels(start: float, stop: float, side: int) -> tuple[int, int]:
    """Return the first and last pixel of a part of a side; a part shorter than `SMALLEST` grows around its middle."""
    first, last = math.floor(start * side), math.ceil(stop * side)
    length = max(last - first, min(SMALLEST, side))
    first = min(max(first - (length - last + first) // 2, 0), side - length)
    return first, first + length


def show_part(image: Image.Image, box: tuple[int, int, int, int]) -> Image.Image:
    """Crop a part of a row's first image; the part remembers its box."""
    part = image.crop(box)
    part.info = {**image.info, _PART: box}
    return part


def show_again(part: Image.Image, image: Image.Image) -> Image.Image | None:
    """Crop the same part from another version of the image; None if `show_part` has not made the part."""
    box = part.info.get(_PART)
    return None if box is None else show_part(image, box)
