"""The images and videos of a row: where they lie, and their pixels, or why there are none."""

import io
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from PIL import Image, ImageOps, UnidentifiedImageError

from vgr_trl.utils import ConfigError, DataError, error_text

IMAGE_COLUMNS = ("image", "images")
VIDEO_COLUMNS = ("video", "videos")

NUMBERED_IMAGES = tuple(f"image_{number}" for number in range(1, 8))  # of MMMU-Pro
FURTHER_IMAGES = tuple(f"image{number}" for number in range(2, 8))  # behind `image`
FOLDER = "__folder__"  # the column that says where a row's relative paths start, where files lie in several folders
PLACE = "__place__"  # the column in which rows carry their number on the way
LARGEST_FILE = 2**30  # bytes; more than Pillow's limit of pixels takes without compression, and read as a whole
MOST_ELONGATED = 200  # the ratio of sides from which on Qwen's image processors refuse an image
DEEP_MODES = ("I", "F", "I;16", "I;16L", "I;16B", "I;16N")
# Formats that are recognised by their first bytes; of the others, some take any bytes for an image (TGA), some run a
# program (EPS).
FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "MPO", "PNG", "PPM", "TIFF", "WEBP")
# None of those that name other files to be read.
VIDEO_FORMATS = "asf,avi,flv,gif,matroska,mov,mp4,mpeg,mpegts,ogg,webm"
ADDRESS = re.compile(r"(?:https?|ftp|s3|gs|hf|file)://[^/]*|data:[\w/+.-]*(?=[;,])", re.IGNORECASE)
# What transformers reads a file from, or fetches it, while it writes a conversation down; an `image` may be one itself.
NAMES = ("url", "path", "base64", "image_url", "video", "video_url", "audio", "audio_url")
ORIENTATION = 0x0112  # the EXIF tag
MAX_SHORT_SIDE = 1024
COLUMNS = ("bbox", "regions")

Box = tuple[float, float, float, float]  # left, top, right, bottom, in [0, 1] of the image
Size = tuple[int, int]  # width and height in pixels
JPEG_END, PNG_END = b"\xff\xd9", b"IEND\xaeB`\x82"
TAIL = 4096  # bytes at the end of a file in which its end is looked for, as cameras append data of their own
UNTURNED = {"exif", "Raw profile type exif"}


def files_of(row: Mapping[str, Any], *names: str) -> list[Any]:
    """Return the files in the first of the columns `names` that the row has something in, be it one or a list."""
    value = next((row[name] for name in names if row.get(name) is not None), None)
    return list(value) if isinstance(value, list | tuple) else [] if value is None else [value]


def images_of(row: Mapping[str, Any]) -> list[Any]:
    """Return the images of `row`, decoded or not, in order: numbered ones, else `images` before `image`, as in TRL.

    `image2`, `image3` and so on stand behind `image`.
    """
    numbered = [row[name] for name in NUMBERED_IMAGES if row.get(name) is not None]
    further = [row[name] for name in FURTHER_IMAGES if row.get(name) is not None]
    return numbered or [*files_of(row, "images", "image"), *further]


def videos_of(row: Mapping[str, Any]) -> list[Any]:
    """Return the videos of `row`, undecoded, in order; `videos` counts before `video`."""
    return files_of(row, "videos", "video")


def folder_of(row: Mapping[str, Any], root: Path) -> Path:
    """Return the folder that relative paths of `row` start from: `root`, where it does not say another."""
    return Path(row[FOLDER]) if row.get(FOLDER) else root


def path_within(root: Path, name: str | Path) -> Path:
    """Return the path that a row names.

    Args:
        root: folder that relative paths start from, and that no path leads out of, be it absolute, by `..` or by a
            symbolic link; what was downloaded from the hub lies in its caches. `Path()`: paths of the caller's own,
            which lead anywhere.
        name: as the row has it.

    Raises:
        DataError: the file lies elsewhere.
    """
    path = root / name
    try:
        real = path.resolve()
    except (OSError, ValueError, RuntimeError):  # nothing can be opened there
        return path
    if root != Path() and not any(real.is_relative_to(folder) for folder in (root.resolve(), *_caches())):
        raise DataError(f"file {str(path)[:200]} lies outside of {root}: give the folder of the files by --image_dir")
    return path


def refuse_named_files(conversation: Sequence[Mapping[str, Any]]) -> None:
    """Raise `DataError` if a part of a conversation names a file or an address, which would be read or fetched."""
    for message in conversation:
        for part in () if isinstance(message["content"], str) else message["content"]:
            names = [name for name in NAMES if part.get(name) is not None]
            if names or isinstance(part.get("image"), str | bytes | dict):
                name = (names or ["image"])[0]
                raise DataError(f"a part of its prompt names a file ({name}), which is neither read nor fetched")


def downloaded() -> Path:
    """Return the folder of data sets from the hub."""
    from datasets import config  # here, so that a decoding process starts without it

    return Path(config.HF_DATASETS_CACHE)


@cache
def _caches() -> tuple[Path, ...]:
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE).resolve(), downloaded().resolve()


def open_image(value: Any, root: Path = Path()) -> Image.Image:
    """Return `value` as an upright RGB image, the same that `convert` stores.

    Args:
        value: an image, a path, or a dict with `bytes` or `path` as `datasets` stores undecoded images.
        root: as `path_within` takes it.

    Raises:
        DataError: the image is missing, unreadable, truncated, empty, too large, or of values that no mode has; the
            message is the reason.
    """
    return to_rgb(read_image(value, root))


def image_size(value: Any, root: Path = Path(), max_image_pixels: int | None = None) -> Size:
    """Return the size of an upright image from its header; its pixels are not decoded.

    A file of JPEG, PNG or WEBP that seems to lack its end is decoded, to be sure. Args and errors as of `read_image`;
    damage within the pixels is not found.
    """
    if isinstance(value, Image.Image):
        return _upright_size(value, max_image_pixels)
    stored = _stored(value, root, "image")
    with _reasons("unreadable"), io.BytesIO(stored) if isinstance(stored, bytes) else stored.open("rb") as file:
        image = Image.open(file, formats=_formats())
        size, is_whole = _upright_size(image, max_image_pixels), _has_its_end(file, str(image.format))
    return size if is_whole else read_image(value, root, max_image_pixels).size


def _upright_size(image: Image.Image, max_image_pixels: int | None) -> Size:
    _require_size(image, max_image_pixels)
    # Pillow decodes a PNG to look for EXIF data behind its pixels.
    has_exif = image.format != "PNG" or not UNTURNED.isdisjoint(image.info)
    turned = has_exif and image.getexif().get(ORIENTATION, 1) in range(5, 9)
    return image.size[::-1] if turned else image.size


def _has_its_end(file: BinaryIO, kind: str) -> bool:
    """Return whether an image file has the bytes that its kind ends with, or is of a kind without such bytes."""
    length = file.seek(0, io.SEEK_END)
    file.seek(max(0, length - TAIL))
    end = file.read()
    if kind in ("JPEG", "MPO"):
        return JPEG_END in end
    if kind == "PNG":
        return PNG_END in end
    file.seek(4)
    return kind != "WEBP" or int.from_bytes(file.read(4), "little") + 8 <= length


def read_image(value: Any, root: Path = Path(), max_image_pixels: int | None = None) -> Image.Image:
    """Return `value` as a fully decoded image of any mode, turned as its EXIF data say.

    Args:
        max_image_pixels: larger images are refused before they are decoded; None: Pillow's limit.

    Raises:
        DataError: as in `open_image`, values apart.
    """
    image = value
    if not isinstance(value, Image.Image):
        data = image_bytes(value, root)
        with _reasons("unreadable"):
            image = Image.open(io.BytesIO(data), formats=_formats())
    _require_size(image, max_image_pixels)
    with _reasons("truncated or damaged"):
        image.load()
        turned = image.getexif().get(ORIENTATION, 1) in range(2, 9)
        return ImageOps.exif_transpose(image) if turned else image


def _require_size(image: Image.Image, max_image_pixels: int | None) -> None:
    width, height = image.size
    if min(image.size) == 0 or max(image.size) >= MOST_ELONGATED * min(image.size):
        raise DataError(f"image has size {width}x{height}: both sides need pixels, at most {MOST_ELONGATED} to 1")
    if max_image_pixels is not None and width * height > max_image_pixels:
        raise DataError(f"image has {width}x{height} pixels, more than max_image_pixels={max_image_pixels}")


@contextmanager
def _reasons(problem: str) -> Iterator[None]:
    """Turn what Pillow raises into a `DataError`, its warning of a decompression bomb too; others are ignored."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        try:
            yield
        except DataError:
            raise
        except UnidentifiedImageError as error:
            raise DataError("image is unreadable: not in a known image format") from error
        except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
            raise DataError(f"image has too many pixels (more than {Image.MAX_IMAGE_PIXELS}): scale it down") from error
        except Exception as error:  # decoders raise whatever damaged bytes lead them to
            raise DataError(f"image is {problem}: {error_text(error)}") from error


@cache
def _formats() -> tuple[str, ...]:
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


def image_bytes(value: Any, root: Path = Path()) -> bytes:
    """Return the encoded bytes of an undecoded image: bytes, a path, or a dict with `bytes` or `path`.

    Raises:
        DataError: it is none of these, or the file does not exist, cannot be read or lies outside of `root`.
    """
    found = _stored(value, root, "image")
    if isinstance(found, bytes):
        return found
    with _reasons("unreadable"):
        return found.read_bytes()


def _stored(value: Any, root: Path, kind: str) -> bytes | Path:
    """Return the bytes of an image or video, or the path of its file, which can be opened."""
    if isinstance(value, Mapping):
        value = value["bytes"] if value.get("bytes") is not None else value.get("path")
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str | Path):
        raise DataError(f"{kind} is of type {type(value).__name__}, not a path, bytes or decoded")
    if not str(value):
        raise DataError(f"{kind} is an empty text, not a path")
    if address := ADDRESS.match(str(value)):
        raise DataError(f"{kind} is an address ({address[0]}…), which is not fetched: save it, and give its path")
    path = path_within(root, value)
    try:
        if path.is_file():
            if kind == "image" and (size := path.stat().st_size) > LARGEST_FILE:
                raise DataError(f"image file {str(path)[:200]} has {size} bytes: at most {LARGEST_FILE} are read")
            return path
        problem = "is a folder" if path.is_dir() else "does not exist"
    except (OSError, ValueError) as error:
        problem = f"cannot be read ({error_text(error)})"
    raise DataError(f"{kind} file {str(path)[:200]} {problem}")


def to_rgb(image: Image.Image) -> Image.Image:
    """Return `image`, of any mode of Pillow's, as RGB; what is transparent shows white.

    Images of more than 8 bits per channel are scaled from their whole range: 16 bits from 0 to 65535, whole numbers
    likewise unless all are below 256, floating point from 0 to 1, or else to 255.

    Raises:
        DataError: a pixel is outside these ranges, or not a number.
    """
    if image.mode in DEEP_MODES:
        image = _eight_bits(image)
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode == "La":
        image = image.convert("LA")  # Pillow has no shorter way
    if not image.has_transparency_data:
        return image.convert("RGB")
    shown = Image.new("RGBA", image.size, "white")
    shown.alpha_composite(image.convert("RGBA"))
    return shown.convert("RGB")


def _eight_bits(image: Image.Image) -> Image.Image:
    import numpy  # here, so that a decoding process starts without it

    values = numpy.asarray(image, dtype=numpy.float32)
    low, high = float(values.min()), float(values.max())
    largest = 255 if image.mode == "F" else 65535
    if not (low >= 0 and high <= largest):
        raise DataError(f"image has mode {image.mode} and values from {low:g} to {high:g}: they must be 0 to {largest}")
    if image.mode == "F":
        full = 1.0 if high <= 1 else 255.0
    else:
        full = 255.0 if image.mode == "I" and high < 256 else 65535.0
    return Image.fromarray((values * (255 / full) + 0.5).astype(numpy.uint8))


@dataclass(frozen=True)
class ImageLimits:
    """Bounds on an image's size; the ratio of the sides is kept to within a pixel.

    Attributes:
        min_pixels: a smaller image is enlarged to this area; None: not.
        max_pixels: a larger image is reduced to this area, after `max_short_side`; None: not.
        max_short_side: an image whose shorter side is longer is reduced to this; None: not.
        max_image_pixels: a larger image is left out before it is decoded; None: Pillow's own limit.
        filter_big_images: True: an image of a side above 1024 pixels is left out.

    Raises:
        ConfigError: a bound is below 1, or `min_pixels` is above `max_pixels`.
    """

    min_pixels: int | None = None
    max_pixels: int | None = None
    max_short_side: int | None = MAX_SHORT_SIDE
    max_image_pixels: int | None = None
    filter_big_images: bool | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value!r}: give an integer of at least 1, or None for no such limit.")
        if self.min_pixels and self.max_pixels and self.min_pixels > self.max_pixels:
            raise ConfigError(f"min_pixels is {self.min_pixels}, above max_pixels {self.max_pixels}: lower it.")

    def size_of(self, width: int, height: int) -> tuple[int, int]:
        """Return the size that an image of `width` x `height` pixels is brought to, or raise `DataError`."""
        if self.filter_big_images and max(width, height) > MAX_SHORT_SIDE:
            excess = f"image has size {width}x{height}, which filter_big_images leaves out"
            raise DataError(f"{excess}: at most {MAX_SHORT_SIDE} on each side")
        scale = 1.0
        if self.max_short_side is not None:
            scale = min(scale, self.max_short_side / min(width, height))
        if self.max_pixels is not None:
            scale = min(scale, math.sqrt(self.max_pixels / (width * height)))
        if scale == 1 and self.min_pixels is not None and width * height < self.min_pixels:
            scale = math.sqrt(self.min_pixels / (width * height))
            larger = math.ceil(width * scale - 1e-9), math.ceil(height * scale - 1e-9)
            if self.max_pixels is None or larger[0] * larger[1] <= self.max_pixels:
                return larger
        # Rounded down, so that no limit is exceeded; the tolerance undoes the rounding of the scale itself.
        return max(1, math.floor(width * scale + 1e-9)), max(1, math.floor(height * scale + 1e-9))

    def fitted(self, image: Image.Image) -> Image.Image:
        """Return `image` within the limits, or raise `DataError` if its row is to be left out."""
        size = self.size_of(*image.size)
        return image if size == image.size else image.resize(size, Image.Resampling.LANCZOS)


ANY_SIZE = ImageLimits(max_short_side=None)


@dataclass(frozen=True)
class VideoOptions:
    """Options for sampling frames from videos.

    Attributes:
        fps: frames per second of the video, above 0.
        max_frames: most frames of one row; a row with more is left out.
    """

    fps: float = 2.0
    max_frames: int = 16


DEFAULT_VIDEO_OPTIONS = VideoOptions()


def refuse_single_image_models(processor: Any) -> None:
    """Raise `ConfigError` if a processor reads only the first of two images; one that fails says so itself."""

    def length(images: int) -> int:
        content: list[dict[str, str]] = [{"type": "image"}] * images + [{"type": "text", "text": "?"}]
        text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        pictures = [Image.new("RGB", (112, 112), "white")] * images
        return len(processor(text=[text], images=[pictures])["input_ids"][0])

    if length(2) <= length(1):
        raise ConfigError(
            f"The data have videos, which become several images, but {type(processor).__name__} reads one image per "
            "prompt: use a model for several images, or remove the videos."
        )


def frames_of(row: Mapping[str, Any], options: VideoOptions, root: Path = Path()) -> list[Image.Image]:
    """Return the frames of all videos of `row`, in order, as RGB images.

    Of each video these are the frames at the times 0, 1/fps, 2/fps, …: the first one shown then or later. A video with
    fewer frames per second gives each of its frames once. Frames are turned as the video says.

    Args:
        row: with `videos` or `video`: a path, bytes, or a dict with `bytes` or `path`, one or a list.

    Raises:
        ConfigError: PyAV is not installed.
        DataError: a video is missing, unreadable or without pictures, or there are too many frames; the message is the
            reason.
    """
    frames: list[Image.Image] = []
    for value in videos_of(row):
        frames += _frames(value, options, root)
        if len(frames) > options.max_frames:
            limit = f"max_video_frames={options.max_frames} frames at video_fps={options.fps:g}"
            raise DataError(f"its videos have more than {limit}: lower video_fps, or raise max_video_frames")
    return frames


def _frames(value: Any, options: VideoOptions, root: Path) -> list[Image.Image]:
    try:
        import av
    except ImportError as error:
        raise ConfigError("The data have videos, which need PyAV: pip install 'vgr_trl[video]'.") from error
    stored = _stored(value, root, "video")
    try:
        file = io.BytesIO(stored) if isinstance(stored, bytes) else stored.open("rb")
        # The limit on formats keeps out lists of other files and addresses, which the decoder would go and read.
        with file, av.open(file, options={"format_whitelist": VIDEO_FORMATS}) as container:
            frames = list(islice(_sampled(container, options.fps), options.max_frames + 1))
    except DataError:
        raise
    except Exception as error:  # decoders raise whatever damaged bytes lead them to
        raise DataError(f"video cannot be decoded ({error_text(error)})") from error
    if not frames:
        raise DataError("video has no pictures")
    return frames


def _sampled(container: Any, fps: float) -> Iterator[Image.Image]:
    if not container.streams.video:
        return
    stream = container.streams.video[0]
    width, height = stream.codec_context.width, stream.codec_context.height
    limit = Image.MAX_IMAGE_PIXELS or math.inf
    if width * height > limit or max(width, height) >= MOST_ELONGATED * min(width, height):
        raise DataError(f"video has size {width}x{height}: at most {limit} pixels and {MOST_ELONGATED} to 1 are read")
    start, taken = None, 0
    for number, frame in enumerate(container.decode(stream)):
        tick = Fraction(frame.time_base or 0)
        timed = frame.pts is not None and tick
        time = frame.pts * tick if timed else number / Fraction(stream.average_rate or stream.guessed_rate)
        start = time if start is None else start
        due = int((time - start + tick / 2) * Fraction(fps))  # times are stored rounded to a tick of the file's clock
        if due >= taken:
            taken = due + 1
            image = frame.to_image()
            turn = getattr(frame, "rotation", 0) % 360
            yield image.rotate(turn, expand=True) if turn else image


def boxes_of(row: Mapping[str, Any], size: tuple[int, int], name: str = "A row") -> list[Box]:
    """Return the boxes of a row of the data, none if it names none.

    Args:
        row: with `bbox`, (left, top, right, bottom) in [0, 1] of the image, or a list of such; or with `regions`, a
            list of (left, top, width, height) in pixels, or in [0, 1] if none reaches further, as converted sets have
            it.
        size: of its image, (width, height) in pixels.
        name: of the row, for messages.

    Raises:
        DataError: a box is none, empty, or beyond the image.
    """
    column, given = _given_boxes(row, name)
    if column == "bbox":
        boxes, form = given, "left, top, right and bottom as shares of the image, with left < right and top < bottom"
    else:
        wide, high = size if has_boxes_in_pixels(row, name) else (1, 1)
        boxes = [(left / wide, top / high, (left + w) / wide, (top + h) / high) for left, top, w, h in given]
        form = f"left, top, width and height as shares, or in pixels of its {size[0]} x {size[1]}, and within it"
    for stated, (left, top, right, bottom) in zip(given, boxes, strict=True):
        if not (-1e-3 <= left < right <= 1.001 and -1e-3 <= top < bottom <= 1.001):
            raise DataError(f"{name} has the box {stated} in its column {column}: give {form}.")
    return boxes


def box_problem(row: Mapping[str, Any], sizes: Sequence[Size]) -> str | None:
    """Return why the boxes of a row cannot be read, None if they can or it has not one image.

    Args:
        sizes: of its images, as the model gets them.
    """
    try:
        if len(sizes) == 1:
            boxes_of(row, sizes[0], "it")
    except DataError as error:
        return str(error).rstrip(".")
    return None


def has_boxes_in_pixels(row: Mapping[str, Any], name: str = "A row") -> bool:
    """Return whether the boxes of a row reach beyond 1, so that they are pixels and the image's size must be known."""
    column, boxes = _given_boxes(row, name)
    return column == "regions" and any(max(left + w, top + h) > 1.001 for left, top, w, h in boxes)


def _given_boxes(row: Mapping[str, Any], name: str) -> tuple[str, list[Box]]:
    """Return which column has the boxes of a row, and their four numbers as stated."""
    import numpy  # here, so that a decoding process starts without it

    column = "bbox"
    try:
        if row.get("bbox") is None or numpy.size(row["bbox"]) == 0:
            column = "regions"
        boxes = numpy.array([] if row.get(column) is None else row[column], dtype=float)
        if boxes.size and (boxes.ndim > 2 or boxes.shape[-1] != 4):
            raise ValueError
    except (IndexError, TypeError, ValueError) as error:
        raise DataError(f"{name} has {row[column]!r} in its column {column}: give four numbers.") from error
    return column, [(one, two, three, four) for one, two, three, four in boxes.reshape(-1, 4).tolist()]


def to_shares(boxes: Sequence[Box]) -> list[list[float]]:
    """Return boxes as converted sets have them: left, top, width and height, in [0, 1] of the image."""
    return [[left, top, right - left, bottom - top] for left, top, right, bottom in boxes]
