"""Videos as images: frames at a steady rate, for models that take several images."""

import io
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any

from PIL import Image

from vgr_trl.data.rows.columns import videos_of
from vgr_trl.data.rows.images.opening import MOST_ELONGATED
from vgr_trl.data.rows.images.places import path_within
from vgr_trl.errors import ConfigError, DataError, words_of

FORMATS = "asf,avi,flv,gif,matroska,mov,mp4,mpeg,mpegts,ogg,webm"  # none of those that name other files to be read
MARK = re.compile(r"[ \t]*<video>[ \t]*\n?")


@dataclass(frozen=True)
class VideoOptions:
    """How frames are taken from videos.

    Attributes:
        fps: frames per second of the video, above 0.
        max_frames: most frames of one row; a row with more is left out.

    Raises:
        ConfigError: a value is out of range.
    """

    fps: float = 2.0
    max_frames: int = 16

    def __post_init__(self) -> None:
        if not 0 < self.fps <= 1000:
            raise ConfigError(f"video_fps is {self.fps}: give a number above 0, at most 1000.")
        if self.max_frames < 1:
            raise ConfigError(f"max_video_frames is {self.max_frames}: give an integer of at least 1.")


DEFAULT_VIDEO_OPTIONS = VideoOptions()


def require_av() -> Any:
    """Return the module that decodes videos.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import av
    except ImportError as error:
        raise ConfigError(
            "The data have videos, and reading them needs PyAV: pip install 'vgr_trl[video]', or remove the column."
        ) from error
    return av


def frames_of(row: Mapping[str, Any], options: VideoOptions, root: Path = Path()) -> list[Image.Image]:
    """Return the frames of all videos of `row`, in order, as RGB images.

    Args:
        row: with `videos` or `video`, undecoded.

    Raises:
        ConfigError: PyAV is not installed.
        DataError: a video cannot be read, or there are too many frames; the message is the reason.
    """
    frames: list[Image.Image] = []
    for value in videos_of(row):
        frames += sample_frames(value, options, root)
        if len(frames) > options.max_frames:
            raise DataError(_too_many(options))
    return frames


def sample_frames(value: Any, options: VideoOptions, root: Path = Path()) -> list[Image.Image]:
    """Return a video's frames at the times 0, 1/fps, 2/fps, …: of each, the first frame shown then or later.

    A video with fewer frames per second gives each of its frames once. Frames are turned as the video says.

    Args:
        value: a path, bytes, or a dict with `bytes` or `path`.

    Raises:
        ConfigError: PyAV is not installed.
        DataError: the video is missing, unreadable, without pictures or too long; the message is the reason.
    """
    av = require_av()
    file = _opened(value, root)
    try:
        # The limit on formats keeps out lists of other files and addresses, which the decoder would go and read.
        with file, av.open(file, options={"format_whitelist": FORMATS}) as container:
            if not container.streams.video:
                raise DataError("video has no pictures")
            frames = list(islice(_sampled(container, options.fps), options.max_frames + 1))
    except DataError:
        raise
    except Exception as error:  # decoders raise whatever damaged bytes lead them to
        raise DataError(f"video cannot be decoded ({words_of(error)})") from error
    if not frames:
        raise DataError("video has no pictures")
    if len(frames) > options.max_frames:
        raise DataError(_too_many(options))
    return frames


def without_video_marks(prompt: Any) -> Any:
    """Return a prompt, a text or a conversation, without `<video>` marks: its frames are images.

    Raises:
        DataError: a message has a part of type `video`, whose place frames cannot take.
    """
    if isinstance(prompt, str):
        return MARK.sub("", prompt)
    return [{**message, "content": _without_marks(message["content"])} for message in prompt]


def refuse_single_image_models(processor: Any) -> None:
    """Raise `ConfigError` unless `processor` gives two images of a prompt more tokens than one."""
    name = type(processor).__name__
    try:
        one, two = (_length(processor, number) for number in (1, 2))
    except Exception as error:  # a processor for one image says so in its own way
        raise ConfigError(
            f"The data have videos, which become several images, but {name} does not take several "
            f"({words_of(error)}): use a model for several images, or remove the videos."
        ) from error
    if two <= one:
        raise ConfigError(
            f"The data have videos, which become several images, but {name} reads one image per prompt: use a model "
            "for several images, or remove the videos."
        )


def _length(processor: Any, images: int) -> int:
    content: list[dict[str, str]] = [{"type": "image"}] * images + [{"type": "text", "text": "?"}]
    text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    pictures = [Image.new("RGB", (112, 112), "white")] * images
    return len(processor(text=[text], images=[pictures])["input_ids"][0])


def _without_marks(content: Any) -> Any:
    if isinstance(content, str):
        return MARK.sub("", content)
    if any(isinstance(part, dict) and part.get("type") == "video" for part in content):
        raise DataError("its prompt has a part of type video: give the text alone, and the video in `videos`")
    return content


def _opened(value: Any, root: Path) -> Any:
    if isinstance(value, Mapping):
        value = value["bytes"] if value.get("bytes") is not None else value.get("path")
    if isinstance(value, bytes):
        return io.BytesIO(value)
    if not isinstance(value, str | Path):
        raise DataError(f"video is of type {type(value).__name__}, not a path or bytes")
    try:
        path = path_within(root, value)
        if path.is_file():
            return path.open("rb")
    except DataError:
        raise
    except (OSError, ValueError) as error:
        raise DataError(f"video file {str(root / value)[:200]!r} cannot be read ({error})") from error
    raise DataError(f"video file {str(path)[:200]} does not exist")


def _sampled(container: Any, fps: float) -> Iterator[Image.Image]:
    stream = container.streams.video[0]
    width, height = stream.codec_context.width, stream.codec_context.height
    limit = Image.MAX_IMAGE_PIXELS
    if limit is not None and width * height > limit:
        raise DataError(f"video has {width}x{height} pixels, more than {limit}: scale it down")
    if min(width, height) < 1 or max(width, height) >= MOST_ELONGATED * min(width, height):
        raise DataError(f"video has size {width}x{height}: both sides need pixels, at most {MOST_ELONGATED} to 1")
    rate = Fraction(fps)
    start, taken = None, 0
    for number, frame in enumerate(container.decode(stream)):
        time = _time(frame, number, stream)
        start = time if start is None else start
        slack = Fraction(frame.time_base or 0) / 2  # times are stored rounded to a tick of the file's clock
        due = int((time - start + slack) * rate)
        if due >= taken:
            taken = due + 1
            image = frame.to_image()
            turn = getattr(frame, "rotation", 0) % 360
            yield image.rotate(turn, expand=True) if turn else image


def _time(frame: Any, number: int, stream: Any) -> Fraction:
    """Seconds at which a frame is shown; from its number where the file does not say."""
    if frame.pts is not None and frame.time_base:
        return Fraction(frame.pts) * Fraction(frame.time_base)
    rate = stream.average_rate or stream.guessed_rate
    if not rate:
        raise DataError("video says neither when its frames are shown nor how many a second has")
    return Fraction(number) / Fraction(rate)


def _too_many(options: VideoOptions) -> str:
    return (
        f"its videos have more than max_video_frames={options.max_frames} frames at video_fps={options.fps:g}: "
        "lower video_fps, or raise max_video_frames"
    )
