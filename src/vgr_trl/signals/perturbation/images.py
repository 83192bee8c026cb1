"""Images made harder to see, to find out how much a token depends on what they show.

Every function takes a PIL image of any mode and returns a new one of the same mode and size. NumPy draws the random
numbers: its generators are seeded per image and give the same numbers on every machine; transformers depends on it too.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image, ImageFilter

from vgr_trl import registries
from vgr_trl.config.plugins import REMOVE_IMAGE
from vgr_trl.config.ranges import check_integer, check_number
from vgr_trl.errors import ConfigError, DataError
from vgr_trl.signals.perturbation.diffusion import diffusion_noise
from vgr_trl.signals.perturbation.layout import crop_image, shuffle_patches
from vgr_trl.signals.perturbation.modes import (
    blurred,
    check_image,
    colours,
    from_array,
    is_wide,
    opaque_grey,
    white_level,
    with_colours,
)

_LARGEST = 1e6


def blacken_patches(image: Image.Image, *, patch_size: int = 14, black_prob: float = 0.5, seed: int) -> Image.Image:
    """Return the image with some of its squares painted an opaque black.

    The squares are laid from the top left corner; those at the right and lower edge may be cut off. Each is blackened
    independently of the others (random patch blackening of VPPO, https://huggingface.co/papers/2510.09285).

    Args:
        image: PIL image of any mode.
        patch_size: side of a square in pixels, at least 1.
        black_prob: probability that a square is blackened, in [0, 1].
        seed: of the random generator, at least 0.

    Raises:
        ConfigError: a parameter is out of range.
        DataError: `image` is no PIL image.
    """
    check_image(image)
    check_integer("patch_size", patch_size, 1)
    check_number("black_prob", black_prob, 0, 1, "in [0, 1]")
    side = min(patch_size, max(*image.size, 1))
    rows, columns = math.ceil(image.height / side), math.ceil(image.width / side)
    black = (_generator(seed).random((rows, columns)) < black_prob).astype(np.uint8) * 255
    result, value = opaque_grey(image, 0)
    if black.size:
        patches = Image.frombytes("L", (columns, rows), black.tobytes())
        if not is_wide(image):
            # With a mask of eight bits Pillow blends, which takes eight times as long; with one bit it fails on I;16.
            patches = patches.convert("1", dither=Image.Dither.NONE)
        mask = patches.resize((columns * side, rows * side), Image.Resampling.NEAREST)
        result.paste(value, None, mask.crop((0, 0, *image.size)))
    return result


def add_gaussian_noise(image: Image.Image, *, std: float = 189.0, seed: int) -> Image.Image:
    """Return the image with Gaussian noise added to every colour channel of every pixel; transparency stays.

    Args:
        image: PIL image of any mode.
        std: standard deviation of the noise, in [0, 1e6], where 255 is the distance from black to white.
        seed: of the random generator, at least 0.

    Raises:
        ConfigError: a parameter is out of range.
        DataError: `image` is no PIL image.
    """
    check_image(image)
    check_number("std", std, 0, _LARGEST, "in [0, 1e6]")
    generator, shown, white = _generator(seed), colours(image), white_level(image)
    before = np.asarray(shown)
    # Single precision cannot hold 32-bit integers.
    exact: type[np.float32 | np.float64] = np.float64 if is_wide(image) else np.float32
    noise = generator.standard_normal(before.shape, dtype=exact)
    noise *= std * white / 255
    noise += before
    noise.clip(min(0, before.min(initial=0)), white, out=noise)
    return with_colours(image, from_array(noise, shown))


def gaussian_blur(image: Image.Image, *, radius: float = 6.0) -> Image.Image:
    """Return the image with its colours blurred; transparency stays.

    Args:
        image: PIL image of any mode.
        radius: standard deviation of the Gaussian in pixels, in [0, 1e6].

    Raises:
        ConfigError: `radius` is out of range.
        DataError: `image` is no PIL image.
    """
    check_image(image)
    check_number("radius", radius, 0, _LARGEST, "in [0, 1e6]")
    shown = colours(image)
    if is_wide(image):
        return with_colours(image, from_array(blurred(np.asarray(shown, np.float64), radius), shown))
    return with_colours(image, shown.filter(ImageFilter.GaussianBlur(radius)) if min(image.size) else shown.copy())


def mask_image(image: Image.Image, *, value: int = 128) -> Image.Image:
    """Return an image of the same mode and size that is one opaque grey.

    Args:
        image: PIL image of any mode.
        value: brightness in [0, 255]; in a black-and-white image, 128 and more are white.

    Raises:
        ConfigError: `value` is out of range.
        DataError: `image` is no PIL image.
    """
    check_image(image)
    check_integer("value", value, 0)
    check_number("value", value, 0, 255, "in [0, 255]")
    result, grey = opaque_grey(image, value)
    result.paste(grey, (0, 0, *image.size))
    return result


PERTURBATIONS: dict[str, Callable[..., Image.Image]] = {
    function.__name__: function
    for function in (
        blacken_patches,
        add_gaussian_noise,
        gaussian_blur,
        mask_image,
        shuffle_patches,
        crop_image,
        diffusion_noise,
    )
}


def remove_image(image: Image.Image) -> Image.Image:
    """Raise, since no image is left: conversations without images are made by `without_images`."""
    raise DataError("remove_image leaves no image to return: score the conversation without it, see without_images.")


for _name, _function in (PERTURBATIONS | {REMOVE_IMAGE: remove_image}).items():
    registries.perturbations.register(_name)(_function)


def perturb_images(
    images: Sequence[Image.Image],
    name: str,
    parameters: Mapping[str, Any] | None = None,
    *,
    seed: int,
    step: int,
    index: int,
) -> list[Image.Image]:
    """Return the images of one prompt, each perturbed with random numbers of its own.

    The same seed, step, index and place in the list give the same image, on whichever process it is made.

    Args:
        images: PIL images of any mode.
        name: one of `PERTURBATIONS`, or of a plug-in.
        parameters: keyword arguments of that function other than the seed.
        seed: the run's seed, at least 0.
        step: global step, at least 0.
        index: index of the prompt, or of the completion where each has images of its own, over all processes.

    Raises:
        ConfigError: unknown name or parameter, or a number out of range.
        DataError: one of `images` is no PIL image, or a plug-in returns something else.
    """
    function, is_random = _find(name, parameters or {})
    perturbed = []
    for place, image in enumerate(images):
        stream = {"seed": derive_seed(seed, step, index, place)} if is_random else {}
        own = image if name in PERTURBATIONS else image.copy()  # a plug-in may draw on what it is given
        perturbed.append(function(own, **(parameters or {}), **stream))
        if not isinstance(perturbed[-1], Image.Image) or perturbed[-1].size != image.size:
            raise DataError(f"The perturbation {name} did not return an image of the size {image.size}: return one.")
    return perturbed


def _find(name: str, parameters: Mapping[str, Any]) -> tuple[Callable[..., Image.Image], bool]:
    """The perturbation of that name, and whether it draws random numbers."""
    function = registries.perturbations.load(name)
    takes = inspect.signature(function).parameters
    accepted = [key for key in takes if key not in ("image", "seed")]
    for key in parameters:
        if key not in accepted:
            raise ConfigError(f"The perturbation {name} got the parameter {key!r}: it accepts {', '.join(accepted)}.")
    return function, "seed" in takes


def derive_seed(seed: int, step: int, index: int, image: int = 0) -> int:
    """Return the seed of one image: the run's seed, global step, global index and place among its prompt's images.

    Raises:
        ConfigError: one of them is no integer of at least 0.
    """
    numbers = {"seed": seed, "step": step, "index": index, "image": image}
    for name, number in numbers.items():
        check_integer(name, number, 0)
    first, second = np.random.SeedSequence([int(number) for number in numbers.values()]).generate_state(2, np.uint64)
    return int(first) << 64 | int(second)


def _generator(seed: int) -> np.random.Generator:
    check_integer("seed", seed, 0)
    return np.random.default_rng(int(seed))
