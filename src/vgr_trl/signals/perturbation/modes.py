"""Pillow's image modes: an opaque grey in each of them, and their colours without transparency or palette."""

import math

import numpy as np
from PIL import Image

from vgr_trl.errors import DataError

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
