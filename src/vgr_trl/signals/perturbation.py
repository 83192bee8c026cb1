"""Images made harder to see."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from PIL import Image, ImageFilter

from vgr_trl import registries
from vgr_trl.config import REMOVE_IMAGE
from vgr_trl.options import check_integer, check_number
from vgr_trl.utils import ConfigError, DataError

# ---------------------------------------------------------------------------------------------------------------------
# Conversations with perturbed images: one for each prompt, or one for each completion; or without their images.


Perturb = Callable[..., list[Image.Image]]  # images of a conversation, index=its number -> as many images


def perturbed_prompts(prompts: Sequence[Any], indices: Sequence[int], perturb: Perturb) -> tuple[list[Any], list[int]]:
    """Return the different prompts with perturbed images, and for every row which of them is its own.

    Args:
        prompts: per row, a conversation whose image parts hold the images, or a text.
        indices: per row, a number that rows with the same perturbed images share, over all processes.
        perturb: returns the perturbed images of a conversation.
    """
    position: dict[int, int] = {}
    different: list[Any] = []
    for prompt, index in zip(prompts, indices, strict=True):
        if index not in position:
            position[index] = len(different)
            different.append(_with_images(prompt, partial(perturb, index=index)))
    return different, [position[index] for index in indices]


def _with_images(prompt: Any, perturb: Perturb) -> Any:
    images = images_in(prompt)
    if not images:
        return prompt
    replacements = iter(perturb(images))
    return [
        message
        if isinstance(message["content"], str)
        else {
            **message,
            "content": [
                {**part, "image": next(replacements)} if part["type"] == "image" else part
                for part in message["content"]
            ],
        }
        for message in prompt
    ]


def without_images(prompt: Any) -> Any:
    """Return a conversation whose messages have no images; a text as it is."""
    if isinstance(prompt, str):
        return prompt
    return [
        message
        if isinstance(message["content"], str)
        else {**message, "content": [part for part in message["content"] if part["type"] != "image"]}
        for message in prompt
    ]


def images_in(prompt: Any) -> list[Any]:
    """Return the images of a conversation, in order."""
    return [] if isinstance(prompt, str) else [part["image"] for part in _image_parts(prompt)]


def _image_parts(prompt: Any) -> list[dict[str, Any]]:
    return [
        part
        for message in prompt
        if not isinstance(message["content"], str)
        for part in message["content"]
        if part["type"] == "image"
    ]


# ---------------------------------------------------------------------------------------------------------------------
# Pillow's image modes: an opaque grey in each of them, and their colours without transparency or palette.


_WIDE = ("I", "F", "I;16", "I;16B", "I;16L", "I;16N")  # one channel of more than 8 bits
_PREMULTIPLIED = {"La": "LA", "RGBa": "RGBA"}


def check_image(image: object) -> None:
    """Raise `DataError` unless it is a PIL image."""
    if not isinstance(image, Image.Image):
        raise DataError(f"A perturbation got a value of type {type(image).__name__}: give a PIL image.")


def is_wide(image: Image.Image) -> bool:
    """Whether the image has one channel of more than 8 bits."""
    return image.mode in _WIDE


def white_level(image: Image.Image) -> float:
    """Return the value that stands for white: 255, 65535 for 16 bits.

    Modes I and F do not say which range they use. For them it is the smallest of 1 (only F), 255 and 65535 that holds
    the image's largest value, or else that value.
    """
    if not is_wide(image):
        return 255.0
    if image.mode.startswith("I;16"):
        return 65535.0
    largest = float(np.asarray(image).max(initial=0))
    return next((level for level in (1.0, 255.0, 65535.0)[image.mode == "I" :] if largest <= level), largest)


def opaque_grey(image: Image.Image, grey: int) -> tuple[Image.Image, float | tuple[int, ...]]:
    """Return a copy of the image and the pixel value that is an opaque grey in it, for `Image.paste`.

    The copy shows what the image shows. Only in a palette image that uses all 256 entries and has no such grey, the
    pixels of the rarest entry take the colour closest to theirs.

    Args:
        grey: brightness in [0, 255]; in a black-and-white image, 128 and more are white.
    """
    copy = image.copy()
    transparent = copy.info.get("transparency")
    if image.mode in ("P", "PA"):
        index = _palette_index(copy, grey)
        return copy, index if image.mode == "P" else (index, 255)
    value: float | tuple[int, ...]
    if image.mode == "1":
        value = 255 if grey >= 128 else 0
    elif image.mode == "CMYK":
        value = (0, 0, 0, 255 - grey)
    elif image.mode == "YCbCr":
        value = (grey, 128, 128)
    elif image.mode == "HSV":
        value = (0, 0, grey)
    elif image.mode == "LAB":
        lightness = Image.new("RGB", (1, 1), (grey,) * 3).convert("LAB").getchannel("L").tobytes()[0]
        value = (lightness, 128, 128)
    elif is_wide(image):
        value = grey / 255 * white_level(image)
        value = value if image.mode == "F" else round(value)
    else:
        bands = len(image.getbands())
        value = grey if bands == 1 else (grey, 255) if bands == 2 else (grey, grey, grey, 255)[:bands]
    if transparent is not None and transparent == value:
        del copy.info["transparency"]  # this very colour was marked as transparent
    return copy, value


def _palette_index(image: Image.Image, grey: int) -> int:
    """Index of an opaque grey in the palette of `image`, which gets one in place of an unused or its rarest entry."""
    table, wanted = _palette(image), np.array([grey, grey, grey, 255], np.uint8)
    pixels = np.asarray(image).copy()
    indices = pixels if image.mode == "P" else pixels[..., 0]
    used = np.bincount(indices.ravel(), minlength=256)
    there = np.flatnonzero((table == wanted).all(axis=1))
    if len(there):
        return int(there[0])
    index = int(used.argmin())
    if used[index]:
        distance = ((table.astype(int) - table[index].astype(int)) ** 2).sum(axis=1)
        distance[index] = distance.max() + 1
        indices[indices == index] = distance.argmin()
        image.frombytes(pixels.tobytes())
    table[index] = wanted
    _put_palette(image, table)
    return index


def _palette(image: Image.Image) -> np.ndarray:
    """The palette with its transparency, (256, 4) uint8: red, green, blue, opacity; unused entries are transparent."""
    entries = np.array(image.getpalette("RGBA") or [], np.uint8).reshape(-1, 4)
    table = np.zeros((256, 4), np.uint8)
    table[: len(entries)] = entries
    transparent = image.info.get("transparency")
    if isinstance(transparent, bytes):
        table[: len(transparent), 3] = np.frombuffer(transparent, np.uint8)[: len(table)]
    elif isinstance(transparent, int):
        table[transparent, 3] = 0
    return table


def _put_palette(image: Image.Image, table: np.ndarray) -> None:
    image.putpalette(table.tobytes(), "RGBA")
    image.info.pop("transparency", None)


def colours(image: Image.Image) -> Image.Image:
    """Return the colours of the image, without transparency: in mode L, RGB or CMYK, or as they are if wide."""
    if image.mode in _PREMULTIPLIED:
        return colours(image.convert(_PREMULTIPLIED[image.mode]))
    if is_wide(image) or image.mode in ("L", "RGB", "CMYK"):
        return image
    if image.mode == "1":
        return image.convert("L")
    if image.mode == "LA":
        return image.getchannel("L")
    if image.mode in ("RGBA", "RGBX"):
        return Image.merge("RGB", image.split()[:3])
    if image.mode == "P" and image.has_transparency_data:
        return colours(image.convert("RGBA"))
    return image.convert("RGB")


def with_colours(image: Image.Image, changed: Image.Image) -> Image.Image:
    """Return an image of the mode and transparency of `image` with the colours `changed`.

    A palette image gets a new palette of up to 256 colours.

    Args:
        changed: of the same size, in the mode that `colours(image)` has.
    """
    mode = image.mode
    if mode in _PREMULTIPLIED:
        return with_colours(image.convert(_PREMULTIPLIED[mode]), changed).convert(mode)
    if mode in ("LA", "RGBA", "RGBX"):
        result = Image.merge(mode, [*changed.split(), image.split()[-1]])
    elif mode == "P" and image.has_transparency_data:
        with_alpha = changed.copy()
        with_alpha.putalpha(image.convert("RGBA").getchannel("A"))
        result = with_alpha.quantize(256, method=Image.Quantize.FASTOCTREE)
    elif mode in ("P", "PA"):
        result = changed.quantize(256)
        if mode == "PA":
            result = result.convert("PA")
            result.putalpha(image.getchannel("A"))
    else:
        result = changed if changed.mode == mode else changed.convert(mode)
    result.info = {key: value for key, value in image.info.items() if mode != "P" or key != "transparency"}
    return result


def from_array(values: np.ndarray, like: Image.Image) -> Image.Image:
    """Return an image of the mode and size of `like` with these values, rounded where the mode has integers."""
    kind = np.asarray(like).dtype
    exact = values if kind.kind == "f" else np.rint(values)
    return Image.frombytes(like.mode, like.size, exact.astype(kind).tobytes())


def blurred(values: np.ndarray, radius: float) -> np.ndarray:
    """Return (height, width) values after a Gaussian blur, which Pillow has for 8 bits only; edges are continued."""
    reach = math.ceil(3 * radius)
    if not reach or not values.size:
        return values
    gaussian = np.exp(-0.5 * (np.arange(-reach, reach + 1) / radius) ** 2)
    gaussian /= gaussian.sum()
    for axis in (0, 1):
        length = values.shape[axis]
        taps = min(reach, length)
        beyond = reach - taps  # from there on, every pixel is the edge's: one tap stands for them all
        kernel = gaussian[beyond : len(gaussian) - beyond].copy()
        kernel[[0, -1]] += gaussian[:beyond].sum()
        margin = [(taps, taps) if other == axis else (0, 0) for other in (0, 1)]
        padded = np.moveaxis(np.pad(values, margin, mode="edge"), axis, 0)
        total = np.zeros_like(padded[:length])
        for start, weight in enumerate(kernel):
            total += weight * padded[start : start + length]
        values = np.moveaxis(total, 0, axis)
    return values


# ---------------------------------------------------------------------------------------------------------------------
# Noise as diffusion models add it to images.


STEPS = 1000


def diffusion_noise(image: Image.Image, *, steps: int = 500, seed: int) -> Image.Image:
    """Return the image after so many steps of a diffusion that adds Gaussian noise to its colours and darkens them.

    With x in [0, 1] it is √ā x + √(1 - ā) ε, ε standard normal per channel and pixel, and ā of `image_left`, cut to
    [0, 1]; transparency stays (NoisyRollout, https://huggingface.co/papers/2504.13055).

    Args:
        image: PIL image of any mode.
        steps: in [0, 999]; 0 is hardly any noise.
        seed: of the random generator, at least 0.

    Raises:
        ConfigError: a parameter is out of range.
        DataError: `image` is no PIL image.
    """
    check_image(image)
    check_integer("seed", seed, 0)
    check_integer("diffusion_steps", steps, 0)
    check_number("diffusion_steps", steps, 0, STEPS - 1, f"in [0, {STEPS - 1}]")
    shown, white = colours(image), white_level(image)
    before = np.asarray(shown, dtype=np.float64) / white
    left = image_left(steps)
    noise = np.random.default_rng(int(seed)).standard_normal(before.shape)
    after = np.sqrt(left) * before + np.sqrt(1 - left) * noise
    return with_colours(image, from_array(after.clip(0, 1) * white, shown))


def image_left(steps: int) -> float:
    """Return ā of a number of steps: the product of 1 - β over the steps 0 to `steps`.

    β of step i is sigmoid(-6 + 12 i / 999) · (0.005 - 1e-5) + 1e-5.
    """
    beta = 1 / (1 + np.exp(-np.linspace(-6, 6, STEPS))) * (0.5e-2 - 1e-5) + 1e-5
    return float(np.cumprod(1 - beta)[steps])


# ---------------------------------------------------------------------------------------------------------------------
# Images whose parts are elsewhere, or missing: shuffled squares, and a part enlarged to the whole.


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


# ---------------------------------------------------------------------------------------------------------------------
# Images made harder to see, to find out how much a token depends on what they show.
#
# Every function takes a PIL image of any mode and returns a new one of the same mode and size. NumPy draws the random
# numbers: its generators are seeded per image and give the same numbers on every machine; transformers depends on it
# too.


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
