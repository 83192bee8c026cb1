"""Perturb images, to measure how much a token depends on their content; show a teacher a better view of a row.

Every perturbation takes a PIL image of 8 bits per channel and returns a new one of the same mode and size. NumPy draws
the random numbers: its generators are seeded per image and give the same numbers on every machine.
"""

import inspect
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from PIL import Image, ImageFilter

from vgr_trl import registries
from vgr_trl.config import PERTURBATIONS
from vgr_trl.data.images import (
    DEEP_MODES,
    FULL_IMAGES,
    ORIGINAL_IMAGES,
    PRIVILEGED_CONTEXT,
    TEACHER_IMAGES,
    ImageLimits,
    boxes_of,
    listed,
)
from vgr_trl.errors import DataError
from vgr_trl.options import Checked, option
from vgr_trl.registries import declares


@dataclass(frozen=True)
class Seen:
    """A row under a view.

    Attributes:
        images: in place of those of its prompt.
        text: stands behind the prompt's last message.
    """

    images: Sequence[Image.Image]
    text: str = ""


def _split_opacity(image: Image.Image) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the colours, (height, width) for mode L, else (height, width, 3), and the opacity; None for L and RGB."""
    if image.mode in ("L", "RGB"):  # transparency by colour means nothing once colours change
        return np.asarray(image), None
    if image.mode in DEEP_MODES:
        raise DataError(f"An image of mode {image.mode} has more than 8 bits per channel: convert it to RGB.")
    rgba = np.asarray(image.convert("RGBA"))
    return rgba[..., :3], rgba[..., 3]


def _build_image(colours: np.ndarray, opacity: np.ndarray | None, like: Image.Image) -> Image.Image:
    """Build an image of the mode and size of `like` from these colours, rounded."""
    channels = colours if opacity is None else np.dstack([colours, opacity])
    mode = like.mode if opacity is None else "RGBA"
    result = Image.frombytes(mode, like.size, np.rint(channels).astype(np.uint8).tobytes())
    if like.mode == "P":  # the new colours get a new palette
        quantized = result if like.has_transparency_data else result.convert("RGB")
        result = quantized.quantize(256, method=Image.Quantize.FASTOCTREE if like.has_transparency_data else None)
    else:
        result = result.convert(like.mode, dither=Image.Dither.NONE)
    result.info = {key: value for key, value in like.info.items() if key != "transparency"}
    return result


def _paint(image: Image.Image, where: np.ndarray, grey: int) -> Image.Image:
    """Paint an opaque grey in [0, 255] at the pixels `where`, (height, width) bool."""
    colours, opacity = _split_opacity(image)
    colours = colours.copy()
    colours[where] = grey
    return _build_image(colours, None if opacity is None else np.where(where, 255, opacity), image)


def blacken_patches(image: Image.Image, *, patch_size: int = 14, black_prob: float = 0.5, seed: int) -> Image.Image:
    """Paint random squares of the image an opaque black.

    The squares start at the top left corner, so the right and lower edges may cut squares off. Each square is blackened
    independently of the others (random patch blackening of VPPO, https://huggingface.co/papers/2510.09285).

    Args:
        image: PIL image.
        patch_size: side of a square in pixels, at least 1.
        black_prob: probability that a square is blackened, in [0, 1].
        seed: seed of the random generator, at least 0.
    """
    side = min(patch_size, max(image.size))
    rows, columns = math.ceil(image.height / side), math.ceil(image.width / side)
    black = np.random.default_rng(seed).random((rows, columns)) < black_prob
    return _paint(image, black.repeat(side, 0).repeat(side, 1)[: image.height, : image.width], 0)


def add_gaussian_noise(image: Image.Image, *, std: float = 189.0, seed: int) -> Image.Image:
    """Add Gaussian noise to every colour channel of every pixel; transparency stays.

    Args:
        image: PIL image.
        std: standard deviation of the noise, in [0, 1e6], where 255 is the distance from black to white.
        seed: seed of the random generator, at least 0.
    """
    before, opacity = _split_opacity(image)
    noise = std * np.random.default_rng(seed).standard_normal(before.shape, dtype=np.float32)
    return _build_image((before + noise).clip(0, 255), opacity, image)


def gaussian_blur(image: Image.Image, *, radius: float = 6.0) -> Image.Image:
    """Blur the colours of the image; transparency stays.

    Args:
        image: PIL image.
        radius: standard deviation of the Gaussian in pixels, in [0, 1e6].
    """
    return _change_colours(image, lambda colours: colours.filter(ImageFilter.GaussianBlur(radius)))


def mask_image(image: Image.Image, *, value: int = 128) -> Image.Image:
    """Replace the image with one opaque grey, of the same mode and size.

    Args:
        image: PIL image.
        value: brightness in [0, 255].
    """
    return _paint(image, np.ones((image.height, image.width), bool), value)


def shuffle_patches(image: Image.Image, *, patch_size: int = 14, seed: int) -> Image.Image:
    """Shuffle the whole squares of the image; the remainders at the right and lower edge stay.

    Args:
        image: PIL image.
        patch_size: side of a square in pixels, at least 1.
        seed: seed of the random generator, at least 0.
    """
    rows, columns = image.height // patch_size, image.width // patch_size
    corners = [(column * patch_size, row * patch_size) for row in range(rows) for column in range(columns)]
    result = image.copy()
    for (left, top), source in zip(corners, np.random.default_rng(seed).permutation(len(corners)), strict=True):
        x, y = corners[source]
        result.paste(image.crop((x, y, x + patch_size, y + patch_size)), (left, top))
    return result


def crop_image(image: Image.Image, *, share: float = 0.5, seed: int) -> Image.Image:
    """Crop a random part of the image and enlarge it to the image's size.

    Args:
        image: PIL image.
        share: share of the area that is kept, in (0, 1].
        seed: seed of the random generator, at least 0.
    """
    wide, high = (max(1, round(side * math.sqrt(share))) for side in image.size)
    generator = np.random.default_rng(seed)
    left = int(generator.integers(image.width - wide + 1))
    top = int(generator.integers(image.height - high + 1))
    result = image.crop((left, top, left + wide, top + high)).resize(image.size, Image.Resampling.NEAREST)
    result.info = dict(image.info)
    return result


def diffusion_noise(image: Image.Image, *, steps: int = 500, seed: int) -> Image.Image:
    """Add the noise of a diffusion to the colours of the image and darken them; transparency stays.

    With x in [0, 1] the result is √ā x + √(1 - ā) ε, clipped to [0, 1], where ε is standard normal per channel and
    pixel and ā is `diffusion_signal(steps)` (NoisyRollout, https://huggingface.co/papers/2504.13055).

    Args:
        image: PIL image.
        steps: diffusion steps, in [0, 999]; 0 adds almost no noise.
        seed: seed of the random generator, at least 0.
    """
    (colours, opacity), left = _split_opacity(image), diffusion_signal(steps)
    noise = np.random.default_rng(seed).standard_normal(colours.shape)
    after = np.sqrt(left) * colours / 255 + np.sqrt(1 - left) * noise
    return _build_image(after.clip(0, 1) * 255, opacity, image)


def diffusion_signal(steps: int) -> float:
    """Return ā, the share of the signal's variance after some steps: the product of 1 - β over the steps 0 to `steps`.

    β at step i is sigmoid(-6 + 12 i / 999) · (0.005 - 1e-5) + 1e-5.
    """
    beta = 1 / (1 + np.exp(-np.linspace(-6, 6, 1000))) * (0.5e-2 - 1e-5) + 1e-5
    return float(np.cumprod(1 - beta)[steps])


def lower_resolution(image: Image.Image, *, scale: float = 0.25) -> Image.Image:
    """Shrink the colours of the image and enlarge them to its size again; transparency stays.

    Args:
        image: PIL image.
        scale: scale of both sides of the smaller image, in (0, 1].
    """
    smaller = [max(1, round(side * scale)) for side in image.size]

    def change(colours: Image.Image) -> Image.Image:
        return colours.resize(smaller, Image.Resampling.BOX).resize(image.size, Image.Resampling.BILINEAR)

    return _change_colours(image, change)


def compress_jpeg(image: Image.Image, *, quality: int = 10) -> Image.Image:
    """Compress the colours of the image as JPEG; transparency stays.

    Args:
        image: PIL image.
        quality: quality of Pillow's JPEG, in [1, 100].
    """

    def change(colours: Image.Image) -> Image.Image:
        file = io.BytesIO()
        colours.save(file, "JPEG", quality=quality)
        return Image.open(file)

    return _change_colours(image, change)


def _change_colours(image: Image.Image, change: Callable[[Image.Image], Image.Image]) -> Image.Image:
    """Return the image with changed colours, given as an image of mode L or RGB."""
    colours, opacity = _split_opacity(image)
    return _build_image(np.asarray(change(Image.fromarray(colours))), opacity, image)


def remove_image(image: Image.Image) -> Image.Image:
    """Raise `DataError`: images are removed from conversations, and there is no image to return here."""
    raise DataError("remove_image leaves no image to return: score the conversation without its images.")


for _name in PERTURBATIONS:
    registries.perturbations.register(_name)(globals()[_name])


def perturb_images(
    images: Sequence[Image.Image],
    name: str,
    parameters: Mapping[str, Any] | None = None,
    *,
    seed: int,
    step: int,
    index: int,
    first: int = 0,
) -> list[Image.Image]:
    """Return the images of one prompt, each perturbed with random numbers of its own.

    The same seed, step, index and place in the list give the same image on every process.

    Args:
        images: PIL images.
        name: a perturbation of this library, or of a plug-in.
        parameters: keyword arguments of the perturbation other than its seed.
        seed: the run's seed, at least 0.
        step: global step, at least 0.
        index: index over all processes of the prompt, or of the completion where each has images of its own.
        first: number of the row's images before `images`.

    Raises:
        ConfigError: there is no such perturbation.
        DataError: a plug-in does not return an image of the same size.
    """
    function, parameters = registries.perturbations.load(name), parameters or {}
    draws = "seed" in inspect.signature(function).parameters
    perturbed = []
    for place, image in enumerate(images, first):
        stream = {"seed": derive_seed(seed, step, index, place)} if draws else {}
        perturbed.append(function(image.copy(), **parameters, **stream))  # a plug-in may draw on its image
        if not isinstance(perturbed[-1], Image.Image) or perturbed[-1].size != image.size:
            raise DataError(f"The perturbation {name} did not return an image of the size {image.size}: return one.")
    return perturbed


def derive_seed(seed: int, step: int, index: int, image: int = 0) -> int:
    """Derive the seed of one image.

    Args:
        seed: the run's seed, at least 0.
        step: global step, at least 0.
        index: index of the prompt or completion over all processes.
        image: place of the image among the images of its row.
    """
    first, second = np.random.SeedSequence([seed, step, index, image]).generate_state(2, np.uint64)
    return int(first) << 64 | int(second)


# Views of rows: `view(images, row, *, seed, **options) -> images`, of any size and number; None if a row has none.


@dataclass
class CropOptions(Checked):
    """Options of the view `crop_to_box`."""

    crop_margin: float = option(0.1, "Margin of crop_to_box, as a share of the longer side of the boxes.", ge=0)
    crop_pixels: int | None = option(None, "Area to which crop_to_box shrinks larger crops, in pixels.", ge=1)


@registries.views.register("crop_to_box")
@declares(options=CropOptions)
def crop_to_box(
    images: Sequence[Image.Image],
    row: Mapping[str, Any],
    *,
    crop_margin: float = 0.1,
    crop_pixels: int | None = None,
) -> list[Image.Image] | None:
    """Crop the image to the rectangle around all boxes of the row; None without a box, or with several images.

    Args:
        images: images of the row.
        row: row of the data, with a column of boxes.
        crop_margin: added on each side, as a share of the longer side of the rectangle; the crop ends at the image.
        crop_pixels: area to which a larger crop is shrunk; None: not.
    """
    boxes = boxes_of(row, images[0].size) if len(images) == 1 else []
    if not boxes:
        return None
    low, high = np.array(boxes)[:, :2].min(0) * images[0].size, np.array(boxes)[:, 2:].max(0) * images[0].size
    margin, size = crop_margin * (high - low).max(), np.array(images[0].size)
    first = np.floor((low - margin).clip(0, size - 1).round(6)).astype(int)
    last = np.ceil((high + margin).clip(first + 1, size).round(6)).astype(int)
    return [ImageLimits(max_pixels=crop_pixels).fitted(images[0].crop((*first.tolist(), *last.tolist())))]


def _read_column(name: str, images: Sequence[Image.Image], row: Mapping[str, Any]) -> list[Image.Image] | None:
    """Return the images in a column of the row; None without any."""
    shown = listed(row, name)
    if any(not isinstance(image, Image.Image) for image in shown):
        cure = f'cast_column("{name}", List(Image())), or train by vgr-trl'
        raise DataError(f"The column {name} has a {type(shown[0]).__name__}, not a decoded image: {cure}.")
    return shown or None


registries.views.register("teacher_images")(partial(_read_column, TEACHER_IMAGES))
registries.views.register("sharper")(partial(_read_column, FULL_IMAGES))


@registries.views.register(PRIVILEGED_CONTEXT)
def privileged_context(images: Sequence[Image.Image], row: Mapping[str, Any]) -> Seen | None:
    """Return the images with the text of the column `privileged_context`, None without any."""
    return Seen(images, row[PRIVILEGED_CONTEXT]) if row.get(PRIVILEGED_CONTEXT) else None


@registries.views.register("clean")
def clean(images: Sequence[Image.Image], row: Mapping[str, Any]) -> list[Image.Image]:
    """Return the images of the data, where `noisy_generations` have seen perturbed ones."""
    return list(images)


@registries.views.register("original")
def original(images: Sequence[Image.Image], row: Mapping[str, Any]) -> list[Image.Image]:
    """Return the data's own images, where `degraded_by` has changed the rollout's."""
    return list(row.get(ORIGINAL_IMAGES) or images)


def show_view(
    images: Sequence[Image.Image], row: Mapping[str, Any], spec: str, parameters: Mapping[str, Any], *, seed: int
) -> Seen | None:
    """Show a row under a view; None if the row lacks the view, as rows without images do.

    Args:
        images: images of the row's prompt.
        row: row of the data.
        spec: a view of this library, or of a plug-in.
        parameters: options of the view.
        seed: seed of random numbers, which the view may take.

    Raises:
        ConfigError: there is no such view.
        DataError: the view returns neither images nor `Seen` nor None.
    """
    function = registries.views.load(spec)
    draws = {"seed": seed} if "seed" in inspect.signature(function).parameters else {}
    view = function([image.copy() for image in images], row, **parameters, **draws) if images else None
    seen = Seen(view) if isinstance(view, list | tuple) else view
    images = seen.images if isinstance(seen, Seen) else ()
    if seen is None or (images and all(isinstance(image, Image.Image) for image in images)):
        return seen
    raise DataError(f"The view {spec} returned {type(view).__name__}: return a list of images, Seen, or None.")
