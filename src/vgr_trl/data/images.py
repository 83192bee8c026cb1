"""The images, videos and boxes of a row: find their files, check their headers, decode them."""

import base64
import io
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy
from huggingface_hub.constants import HF_HUB_CACHE
from PIL import Image, ImageOps, UnidentifiedImageError

from vgr_trl.errors import ConfigError, DataError, error_text

IMAGE_COLUMNS = ("image", "images")
NUMBERED_IMAGES = tuple(f"image_{number}" for number in range(1, 8))  # columns of MMMU-Pro
FURTHER_IMAGES = tuple(f"image{number}" for number in range(2, 8))  # behind `image`
MEDIA = (*IMAGE_COLUMNS, *NUMBERED_IMAGES, *FURTHER_IMAGES, "video", "videos")
TEACHER_IMAGES = "teacher_images"  # column of images that a teacher sees in place of the policy's
ORIGINAL_IMAGES = "original_images"  # column of a row's images before `degraded_by`, in training rollouts
PRIVILEGED_CONTEXT = "privileged_context"  # column of a text that a teacher alone reads, as TRL names it
FULL_IMAGES = "full_images"  # column of a row's images before `max_pixels` and other limits
FOLDER = "__folder__"  # column: the folder that a row's relative paths start from, where files lie in several
PLACE = "__place__"  # column: the number of a row in the user's data

LARGEST_FILE = 2**30  # bytes; more than an image within Pillow's limit of pixels takes
MOST_ELONGATED = 200  # the ratio of sides from which on Qwen's image processors refuse an image
MAX_SHORT_SIDE = 1024
DEEP_MODES = ("I", "F", "I;16", "I;16L", "I;16B", "I;16N")
# Formats that are recognised by their first bytes. Of the others, TGA accepts any bytes and EPS runs a program.
FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "MPO", "PNG", "PPM", "TIFF", "WEBP")
# No playlists, which name other files and addresses.
VIDEO_FORMATS = "asf,avi,flv,gif,matroska,mov,mp4,mpeg,mpegts,ogg,webm"
ADDRESS = re.compile(r"(?:https?|ftp|s3|gs|hf|file)://[^/]*|data:[\w/+.-]*(?=[;,])", re.IGNORECASE)
DATA_ADDRESS = re.compile(r"data:[\w/+.-]*;base64,", re.IGNORECASE)
# The base64 text of a JPEG, PNG, GIF or WEBP, as opposed to a path.
BASE64_IMAGE = re.compile(r"(?:/9j/|iVBORw0KGgo|R0lGOD|UklGR)[A-Za-z0-9+/\s]*={0,2}\s*")
# Fields of a message part that transformers reads or fetches a file from.
FILE_FIELDS = ("url", "path", "base64", "image_url", "video", "video_url", "audio", "audio_url")
ORIENTATION = 0x0112  # the EXIF tag
ENDS = {"JPEG": b"\xff\xd9", "MPO": b"\xff\xd9", "PNG": b"IEND\xaeB`\x82"}
TAIL = 4096  # bytes in which the header or end of a file is looked for, as cameras append data of their own

Size = tuple[int, int]  # width and height in pixels


def images_of(row: Mapping[str, Any]) -> list[Any]:
    """Return the images of a row, decoded or not, in order.

    Numbered columns count first, then `images`, then `image` with `image2`, `image3` and so on, as in TRL.
    """
    numbered = [row[name] for name in NUMBERED_IMAGES if row.get(name) is not None]
    further = [row[name] for name in FURTHER_IMAGES if row.get(name) is not None]
    return numbered or [*listed(row, "images", "image"), *further]


def videos_of(row: Mapping[str, Any]) -> list[Any]:
    """Return the undecoded videos of a row in order, from `videos` or else `video`."""
    return listed(row, "videos", "video")


def listed(row: Mapping[str, Any], *names: str) -> list[Any]:
    """Return the files in the first of the columns that has any: a file or a list of files."""
    values = (row[name] for name in names if row.get(name) is not None)
    return next(filter(None, (list(value) if isinstance(value, list | tuple) else [value] for value in values)), [])


def folder_of(row: Mapping[str, Any], root: Path) -> Path:
    """Return the folder that relative paths of a row start from: its own folder, or `root`."""
    return Path(row[FOLDER]) if row.get(FOLDER) else root


def path_within(root: Path, name: str | Path) -> Path:
    """Return the path that a row names, or raise `DataError` if it leads out of `root`, also by a symbolic link.

    The caches of the hub are allowed. `Path()` allows every path, for paths of the caller's own.
    """
    path = root / name
    try:
        real = path.resolve()
    except (OSError, ValueError, RuntimeError):  # nothing can be opened there
        return path
    allowed = (Path(folder).resolve() for folder in (root, HF_HUB_CACHE, downloaded()))
    if root != Path() and not any(real.is_relative_to(folder) for folder in allowed):
        raise DataError(f"file {str(path)[:200]} is outside {root}: give its --image_dir, or --image_dir shared")
    return path


def downloaded() -> Path:
    """Return the folder of data sets from the hub."""
    from datasets import config  # here, so that signals can be imported without `datasets`

    return Path(config.HF_DATASETS_CACHE)


def refuse_named_files(conversation: Sequence[Mapping[str, Any]]) -> None:
    """Raise `DataError` if a part of a conversation names a file or an address that transformers would read."""
    parts = [part for message in conversation if not isinstance(message["content"], str) for part in message["content"]]
    for part in parts:
        named = [name for name in FILE_FIELDS if part.get(name) is not None]
        named += ["image"] * isinstance(part.get("image"), str | bytes | dict)
        if named:
            problem = f"a part of its prompt names a file ({named[0]}); only image and video columns are read"
            raise DataError(f'{problem}, after cast_column("image", Image()) if a transform of yours gives them')


# Images


def open_image(value: Any, root: Path = Path()) -> Image.Image:
    """Return an upright RGB image, as `convert` stores it, with arguments and errors of `read_image`."""
    return to_rgb(read_image(value, root))


def read_image(value: Any, root: Path = Path()) -> Image.Image:
    """Return a fully decoded image of any mode, turned as its EXIF data say.

    Args:
        value: an image, as an array too, a path, base64 text, or a dict with `bytes` or `path`, as `datasets` stores
            undecoded images.
        root: folder that a relative path starts from.

    Raises:
        DataError: the image is missing, unreadable, truncated, empty or too large; the message is the reason.
    """
    image = value
    if not isinstance(value, Image.Image):
        with _reasons("image is unreadable"):
            image = _open(io.BytesIO(image_bytes(value, root)))
    _require_size(image.size)
    with _reasons("image is truncated or damaged"):
        image.load()
        turned = image.getexif().get(ORIENTATION, 1) in range(2, 9)
        return ImageOps.exif_transpose(image) if turned else image


def image_size(value: Any, root: Path = Path()) -> Size:
    """Return the size of an upright image from its header, with arguments and errors of `read_image`.

    A JPEG, PNG or WEBP that seems to lack its end is decoded, to be sure; other damage to the pixels is not found.
    """
    is_whole = True
    if isinstance(value, Image.Image):
        size = _upright_size(value)
    else:
        with _reasons("image is unreadable"), _opened(value, root) as file:
            image = _open(file)
            size, is_whole = _upright_size(image), _has_its_end(file, str(image.format))
    _require_size(size)
    return size if is_whole else read_image(value, root).size


def _open(file: BinaryIO) -> Image.Image:
    """Open an image, or raise `DataError` for a PPM with long comments, which Pillow reads for a minute."""
    start = file.read(TAIL)
    file.seek(0)
    fields = re.sub(rb"#[^\r\n]*", b"", start).split()
    if len(start) == TAIL and re.match(rb"P[0-6fFy]", start) and len(fields) < (3 if start[1:2] in b"14" else 4):
        raise DataError(f"image has a header of more than {TAIL} bytes")
    Image.init()  # all formats of this installation
    return Image.open(file, formats=[name for name in FORMATS if name in Image.OPEN])


def _upright_size(image: Image.Image) -> Size:
    # Pillow decodes a PNG to look for EXIF data behind its pixels, and turns the size of a TIFF itself.
    has_exif = image.format != "PNG" or not {"exif", "Raw profile type exif"}.isdisjoint(image.info)
    turned = has_exif and image.format != "TIFF" and image.getexif().get(ORIENTATION, 1) in range(5, 9)
    return image.size[::-1] if turned else image.size


def _has_its_end(file: BinaryIO, kind: str) -> bool:
    """Return whether an image file has the last bytes of its format, or its format has no fixed end."""
    length = file.seek(0, io.SEEK_END)
    if kind == "WEBP":
        file.seek(4)
        return int.from_bytes(file.read(4), "little") + 8 <= length
    file.seek(max(0, length - TAIL))
    return ENDS.get(kind, b"") in file.read()


def _require_size(size: Size, kind: str = "image") -> None:
    limit = Image.MAX_IMAGE_PIXELS
    if min(size) == 0 or max(size) >= MOST_ELONGATED * min(size) or (limit and size[0] * size[1] > limit):
        problem = f"{kind} has size {size[0]}x{size[1]}"
        raise DataError(f"{problem}: give 1 to {limit} pixels, with an aspect ratio below {MOST_ELONGATED}")


@contextmanager
def _reasons(problem: str) -> Iterator[None]:
    """Convert errors of a decoder in this block into a `DataError`."""
    try:
        yield
    except DataError:
        raise
    except UnidentifiedImageError as error:  # its text has an address in memory
        raise DataError(f"{problem}: not in a known image format") from error
    except Exception as error:  # decoders raise whatever damaged bytes lead them to
        raise DataError(f"{problem}: {error_text(error)}") from error


def image_bytes(value: Any, root: Path = Path()) -> bytes:
    """Return the encoded bytes of an undecoded image, or raise `DataError` if no file may be read."""
    with _reasons("image is unreadable"), _opened(value, root) as file:
        return file.read()


def _opened(value: Any, root: Path, kind: str = "image") -> BinaryIO:
    """Return the open file of an undecoded image or video."""
    if isinstance(value, Mapping):
        value = value["bytes"] if value.get("bytes") is not None else value.get("path")
    if isinstance(value, str) and ((address := DATA_ADDRESS.match(value)) or BASE64_IMAGE.fullmatch(value)):
        try:
            text = value[address.end() :] if address else value
            value = base64.b64decode("".join(text.split()), validate=True)
        except ValueError as error:
            raise DataError(f"{kind} is unreadable: the text is not base64 ({error})") from error
    if isinstance(value, numpy.ndarray):
        Image.fromarray(value).save(file := io.BytesIO(), "TIFF")
        value = file.getvalue()
    if isinstance(value, bytes):
        return io.BytesIO(value)
    if not isinstance(value, str | Path):
        raise DataError(f"{kind} is of type {type(value).__name__}, not a path, bytes or decoded")
    if address := ADDRESS.match(str(value)):
        raise DataError(f"{kind} is a URL ({address[0]}…), which is not downloaded: save the file and give its path")
    path = path_within(root, value)
    if not os.path.isfile(path):  # Path.is_file raises for a name that is too long
        problem = "is a folder" if os.path.isdir(path) else "does not exist"
        raise DataError(f"{kind} file {str(path)[:200]} {problem}")
    if kind == "image" and (size := path.stat().st_size) > LARGEST_FILE:
        raise DataError(f"image file {str(path)[:200]} has {size} bytes; the limit is {LARGEST_FILE}")
    return path.open("rb")


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert an image of any of Pillow's modes to RGB, with white behind transparent pixels.

    Images of more than 8 bits per channel are scaled from their whole range: 16 bits from 0 to 65535, whole numbers
    likewise unless all are below 256, floating point from 0 to 1, or else to 255.

    Raises:
        DataError: values are out of these ranges.
    """
    if image.mode in DEEP_MODES:
        values = numpy.asarray(image, dtype=numpy.float32)
        low, high = float(values.min()), float(values.max())
        full = {"F": 1 if high <= 1 else 255, "I": 255 if high < 256 else 65535}.get(image.mode, 65535)
        if not 0 <= low <= high <= full:
            raise DataError(f"image has mode {image.mode} and values from {low:g} to {high:g}, not 0 to {full}")
        image = Image.fromarray((values * (255 / full) + 0.5).astype(numpy.uint8))
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    image = image.convert("LA") if image.mode == "La" else image  # Pillow converts it to no other mode
    if not image.has_transparency_data:
        return image.convert("RGB")
    shown = Image.new("RGBA", image.size, "white")
    shown.alpha_composite(image.convert("RGBA"))
    return shown.convert("RGB")


@dataclass(frozen=True)
class ImageLimits:
    """Limits of an image's size, within which an image keeps its ratio of sides to within a pixel.

    Attributes:
        min_pixels: a smaller image is enlarged to this area; None: not.
        max_pixels: a larger image is reduced to this area, after `max_short_side`; None: not.
        max_short_side: an image whose shorter side is longer is reduced to this; None or 0: not.
        filter_big_images: whether rows with an image side above 1024 pixels are skipped.
    """

    min_pixels: int | None = None
    max_pixels: int | None = None
    max_short_side: int | None = None
    filter_big_images: bool = False

    def __post_init__(self) -> None:
        if self.min_pixels and self.max_pixels and self.min_pixels > self.max_pixels:
            raise ConfigError(f"min_pixels is {self.min_pixels}, above max_pixels {self.max_pixels}: lower it.")

    def size_of(self, width: int, height: int) -> Size:
        """Return the size within the limits for an image of `width` x `height` pixels, or raise `DataError`."""
        if self.filter_big_images and max(width, height) > MAX_SHORT_SIDE:
            raise DataError(f"image has size {width}x{height}: filter_big_images skips sides above {MAX_SHORT_SIDE}")
        area, scale = width * height, 1.0
        if self.max_short_side:
            scale = min(scale, self.max_short_side / min(width, height))
        if self.max_pixels:
            scale = min(scale, math.sqrt(self.max_pixels / area))
        if scale == 1 and self.min_pixels and area < self.min_pixels:
            scale = math.sqrt(self.min_pixels / area)
            larger = math.ceil(width * scale - 1e-9), math.ceil(height * scale - 1e-9)
            if self.max_pixels is None or larger[0] * larger[1] <= self.max_pixels:
                return larger
        # Rounded down, so that no limit is exceeded; the tolerance undoes the rounding of the scale itself.
        return max(1, math.floor(width * scale + 1e-9)), max(1, math.floor(height * scale + 1e-9))

    def fitted(self, image: Image.Image) -> Image.Image:
        """Resize an image to the limits, or raise `DataError` if its row must be skipped."""
        size = self.size_of(*image.size)
        return image if size == image.size else image.resize(size, Image.Resampling.LANCZOS)


# Videos


def frames_of(row: Mapping[str, Any], fps: float, most: int, root: Path = Path()) -> list[Image.Image]:
    """Return frames of all videos of a row in order, as RGB images, turned as the video says.

    Each video gives the frames at the times 0, 1/fps, 2/fps, … seconds, or the next frame shown. A video with fewer
    frames per second gives each of its frames once.

    Args:
        row: row of the data.
        fps: frames per second.
        most: largest number of frames of the row.
        root: folder that relative paths start from.

    Raises:
        ConfigError: PyAV is not installed.
        DataError: a video cannot be read, or there are too many frames; the message is the reason.
    """
    frames = list(islice((frame for value in videos_of(row) for frame in _sampled(value, fps, root)), most + 1))
    if len(frames) > most:
        limit = f"max_video_frames={most} frames at video_fps={fps:g}"
        raise DataError(f"its videos have more than {limit}: lower video_fps, or raise max_video_frames")
    return frames


def _sampled(value: Any, fps: float, root: Path) -> Iterator[Image.Image]:
    try:
        import av
    except ImportError as error:
        raise ConfigError("The data have videos, which need PyAV: pip install 'vgr_trl[video]'.") from error
    taken = 0
    start: Fraction | None = None
    with (
        _reasons("video cannot be decoded"),
        _opened(value, root, "video") as file,
        av.open(file, "r", options={"format_whitelist": VIDEO_FORMATS}) as container,
    ):
        stream: Any = container.streams.video[0]  # from PyAV 19 on, its numbers are no `Rational` to type checkers
        _require_size((stream.codec_context.width, stream.codec_context.height), kind="video")
        for number, frame in enumerate(container.decode(stream)):
            tick = Fraction(frame.time_base or 0)
            rate = stream.average_rate or stream.guessed_rate or 0
            time = frame.pts * tick if frame.pts is not None and tick else number / Fraction(rate)
            start = time if start is None else start
            due = int((time - start + tick / 2) * Fraction(fps))  # times are rounded to a tick of the file's clock
            if due >= taken:
                taken = due + 1
                turn = getattr(frame, "rotation", 0) % 360
                yield frame.to_image().rotate(turn, expand=True) if turn else frame.to_image()
        if not taken:
            raise DataError("video has no frames")


BOX_COLUMNS = {
    "bbox": "left, top, right and bottom as shares of the image, with left < right and top < bottom",
    "regions": "left, top, width and height as shares, or in pixels of its {} x {}, and within it",
}

Box = tuple[float, float, float, float]  # left, top, right, bottom, in [0, 1] of the image


def boxes_of(row: Mapping[str, Any], size: tuple[int, int], name: str = "A row") -> list[Box]:
    """Return the boxes of a row of the data, or an empty list.

    Args:
        row: row with `bbox`, one or several (left, top, right, bottom) in [0, 1] of the image, or `regions`, a list
            of (left, top, width, height), as converted sets have it, in pixels, or in [0, 1] if all values are.
        size: (width, height) of its image, in pixels.
        name: how messages call the row.

    Raises:
        DataError: a box has not four numbers, is empty, or leaves the image.
    """
    column = "bbox"
    try:
        if row.get("bbox") is None or numpy.size(row["bbox"]) == 0:
            column = "regions"
        stated = numpy.array([] if row.get(column) is None else row[column], dtype=float)
        if stated.size and stated.shape[-1] != 4:
            raise ValueError
    except (IndexError, TypeError, ValueError) as error:
        raise DataError(f"{name} has {row[column]!r} in its column {column}: give four numbers.") from error
    boxes = stated.reshape(-1, 4)
    if column == "regions":
        boxes = numpy.hstack([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]])
        boxes = boxes / [*size, *size] if boxes.size and boxes.max() > 1.001 else boxes
    for numbers, (left, top, right, bottom) in zip(stated.reshape(-1, 4).tolist(), boxes.tolist(), strict=True):
        if not (-1e-3 <= left < right <= 1.001 and -1e-3 <= top < bottom <= 1.001):
            form = BOX_COLUMNS[column].format(*size)
            raise DataError(f"{name} has the box {numbers} in its column {column}: give {form}.")
    return [(left, top, right, bottom) for left, top, right, bottom in boxes.tolist()]
