"""Convert a question set to the common schema, in parallel and resumable."""

import hashlib
import io
import json
import os
import re
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Sized
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import pyarrow
import pyarrow.parquet
from PIL import Image
from tqdm.auto import tqdm

from vgr_trl.data.columns import Candidate, Origin, Question, with_images
from vgr_trl.data.images import ImageLimits, image_bytes, read_image, to_rgb
from vgr_trl.data.prompts import LETTERS
from vgr_trl.data.read import READERS
from vgr_trl.utils import (
    ConfigError,
    DataError,
    is_writable,
    kill_workers,
    pool,
    publish,
    sync_files,
    unfinished,
    write_whole,
)

# ---------------------------------------------------------------------------------------------------------------------
# The commonest answers to open questions: counted in bounded memory, shown in a dozen lines.


MOST_ANSWERS = 10_000  # different ones that are counted, so that memory stays bounded
LONGEST_ANSWER = 80  # characters
MOST_LINES = 12
OTHERS = "others"


def count_answer(answers: Counter[str], answer: object) -> None:
    """Add an answer, as one of `OTHERS` if it is another than the `MOST_ANSWERS` that came first."""
    text = " ".join(str(answer).split())[:LONGEST_ANSWER]
    answers[text if text in answers or len(answers) < MOST_ANSWERS else OTHERS] += 1


def commonest(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    """Return the first `MOST_LINES` names by their counts, and the others in one."""
    pairs = sorted(((name, count) for name, count in counts.items() if name != OTHERS), key=lambda pair: -pair[1])
    rest = counts.get(OTHERS, 0) + sum(count for _, count in pairs[MOST_LINES:])
    return [*pairs[:MOST_LINES], (OTHERS, rest)] if rest else pairs[:MOST_LINES]


def among(counts: Mapping[str, int], names: Collection[str]) -> dict[str, int]:
    """Return the counts of `names`, and of all others in one, so that the bars of several splits can be compared."""
    named = {name: counts.get(name, 0) for name in names if name != OTHERS}
    rest = sum(counts.values()) - sum(named.values())
    return named | ({OTHERS: rest} if rest else {})


# ---------------------------------------------------------------------------------------------------------------------
# Images as they are stored: upright RGB within the limits, in their own bytes wherever those are that already.


SUFFIXES = {"JPEG": ".jpg", "PNG": ".png", "WEBP": ".webp"}  # formats that are stored as they are
JPEG_QUALITY = 95


@dataclass(frozen=True)
class Encoded:
    """An image file: its bytes, the suffix of its format, its size in pixels, and the hash of its pixels."""

    data: bytes
    suffix: str
    width: int
    height: int
    digest: str = ""


def encode_image(value: Any, root: Path, limits: ImageLimits, *, with_digest: bool = False) -> Encoded:
    """Return `value` as an image file of RGB pixels within `limits`.

    A JPEG that changes is written as JPEG of quality 95 without subsampling, any other image that changes as PNG.

    Args:
        value: an image, a path, or a dict with `bytes` or `path`.
        root: folder that relative paths start from.

    Raises:
        DataError: the image cannot be used; the message is the reason.
    """
    if not isinstance(value, Image.Image):
        value = {"bytes": image_bytes(value, root)}
    image = read_image(value, root, limits.max_image_pixels)
    kind, size = image.format, limits.size_of(*image.size)
    unchanged = (
        isinstance(value, dict)
        and kind in SUFFIXES
        and image.mode == "RGB"
        and "transparency" not in image.info
        and getattr(image, "n_frames", 1) == 1
        and size == image.size
    )
    image = to_rgb(image)
    if size != image.size:
        image = image.resize(size, Image.Resampling.LANCZOS)
    digest = pixel_digest(image) if with_digest else ""
    if unchanged:
        return Encoded(value["bytes"], SUFFIXES[str(kind)], *size, digest)
    stored_as = "JPEG" if kind in ("JPEG", "MPO") else "PNG"
    return Encoded(_written(image, stored_as), SUFFIXES[stored_as], *size, digest)


def pixel_digest(image: Image.Image) -> str:
    """Return a hash of size and pixels, the same for the same RGB image in another file format."""
    return hashlib.sha256(f"{image.width}x{image.height} ".encode() + image.tobytes()).hexdigest()


def _written(image: Image.Image, kind: str) -> bytes:
    buffer = io.BytesIO()
    plain = Image.new("RGB", image.size)  # without colour profile and metadata, which belonged to the original
    plain.paste(image)
    if kind == "JPEG":
        plain.save(buffer, kind, quality=JPEG_QUALITY, subsampling=0)
    else:
        plain.save(buffer, kind, compress_level=3)
    return buffer.getvalue()


# ---------------------------------------------------------------------------------------------------------------------
# Images encoded by a few processes, in the order they were asked for, a bounded number of them at a time.


Item = TypeVar("Item")
ROWS_PER_TASK = 8
BYTES_PER_TASK = 8 * 2**20  # a task with larger images has fewer rows
TASKS_PER_WORKER = 3  # one in work, one waiting, one whose result waits to be taken


@dataclass(frozen=True)
class Encoding:
    """How images are encoded: where relative paths start, the limits, and whether pixels are hashed."""

    root: Path = Path()
    limits: ImageLimits = field(default_factory=ImageLimits)
    with_digest: bool = False


Encode = Callable[[Iterable[tuple[Item, Sequence[Any]]]], Iterator[tuple[Item, "list[Encoded] | str"]]]


@contextmanager
def encoder(encoding: Encoding, workers: int) -> Iterator[Encode[Any]]:
    """Yield a function that takes (item, images) pairs and yields (item, encoded images, or why one cannot be used).

    Order is kept. At most `ROWS_PER_TASK * TASKS_PER_WORKER * workers` rows are held at a time.

    Args:
        workers: processes; 0: this one.

    Raises:
        DataError: a process was ended from outside, or by an image.
    """
    if workers == 0:
        yield lambda rows: ((item, encode_all(images, encoding)) for item, images in rows)
        return
    executor = pool(workers)
    try:
        yield lambda rows: _spread(rows, executor, encoding, workers * TASKS_PER_WORKER)
    except BaseException:
        kill_workers(executor)
        raise
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def encode_all(images: Sequence[Any], encoding: Encoding) -> list[Encoded] | str:
    """Return a row's images encoded, or why one of them cannot be used."""
    try:
        return [
            encode_image(image, encoding.root, encoding.limits, with_digest=encoding.with_digest) for image in images
        ]
    except DataError as error:
        return str(error).rstrip(".")


def _encode_rows(rows: list[Sequence[Any]], encoding: Encoding) -> list[list[Encoded] | str]:
    return [encode_all(images, encoding) for images in rows]


def _spread(
    rows: Iterable[tuple[Item, Sequence[Any]]], executor: ProcessPoolExecutor, encoding: Encoding, most: int
) -> Iterator[tuple[Item, list[Encoded] | str]]:
    waiting: deque[tuple[list[Item], Future[list[list[Encoded] | str]]]] = deque()
    task: list[tuple[Item, Sequence[Any]]] = []

    def submit() -> None:
        items, images = [item for item, _ in task], [images for _, images in task]
        waiting.append((items, executor.submit(_encode_rows, images, encoding)))
        task.clear()

    def take() -> Iterator[tuple[Item, list[Encoded] | str]]:
        items, future = waiting.popleft()
        return zip(items, future.result(), strict=True)

    try:
        for pair in rows:
            task.append(pair)
            if len(task) == ROWS_PER_TASK or sum(_size(images) for _, images in task) >= BYTES_PER_TASK:
                submit()
            if len(waiting) >= most:
                yield from take()
        if task:
            submit()
        while waiting:
            yield from take()
    except BrokenProcessPool as error:
        raise DataError(
            "A process that decodes images ended unexpectedly, for want of memory or by a harmful image: set "
            "--max_image_pixels, or use --workers 0 to see where."
        ) from error


def _size(images: Sequence[Any]) -> int:
    found = (image.get("bytes") if isinstance(image, dict) else image for image in images)
    return sum(len(data) for data in found if isinstance(data, bytes))


# ---------------------------------------------------------------------------------------------------------------------
# What a set consists of: rows by source, choices, letters and image sizes, and what was left out and why.


OPEN = "open"
ANSWERS = "commonest answers to open questions"
SIDES = (32, 64, 128, 256, 512, 1024)  # pixels of the shorter side at which a class of sizes begins


@dataclass
class Statistics:
    """Counts over the rows of a set.

    Attributes:
        sources: rows by `source`.
        choices: rows by the number of their choices, `open` for none.
        letters: multiple-choice rows by their right letter.
        sizes: images by the class of their shorter side in pixels, see `size_class`.
        images: rows by the number of their images.
        answers: open rows by their answer, as `count_answer` counts.
        reasons: rows left out, by kind of reason.
    """

    sources: Counter[str] = field(default_factory=Counter)
    choices: Counter[str] = field(default_factory=Counter)
    letters: Counter[str] = field(default_factory=Counter)
    sizes: Counter[str] = field(default_factory=Counter)
    images: Counter[str] = field(default_factory=Counter)
    answers: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, counts: Mapping[str, Mapping[str, int]]) -> "Statistics":
        """Return the statistics that `counts`, as `as_dict` gives them, stand for."""
        return cls(**{name: Counter(counts.get(name, {})) for name in cls.__dataclass_fields__})

    def as_dict(self) -> dict[str, dict[str, int]]:
        """Return the counts as JSON has them."""
        return {name: dict(getattr(self, name)) for name in self.__dataclass_fields__}

    def add(self, question: Question, images: Sequence[Encoded]) -> None:
        """Count a row, and its images by their sizes."""
        letter, answer = (question.solution, None) if question.choices else (None, question.solution)
        self.count(question.source, question.choices, len(images), letter, answer)
        self.sizes.update(size_class(image.width, image.height) for image in images)

    def count(
        self, source: str, choices: Sized | None, images: int, letter: str | None = None, answer: object = None
    ) -> None:
        """Count a row; `letter` of its right option, and `answer` to an open question, are None where not known."""
        self.sources[source] += 1
        self.choices[str(len(choices)) if choices else OPEN] += 1
        self.images[str(images)] += 1
        if letter is not None:
            self.letters[letter] += 1
        if answer is not None:
            count_answer(self.answers, answer)

    def skip(self, reason: str) -> None:
        """Count a row that was left out."""
        self.reasons[kind_of(reason)] += 1

    @property
    def rows(self) -> int:
        """The number of rows."""
        return self.sources.total()


def together(parts: Iterable[Statistics]) -> Statistics:
    """Return the counts of several sets or splits added up."""
    whole = Statistics()
    for part in parts:
        for name in Statistics.__dataclass_fields__:
            getattr(whole, name).update(getattr(part, name))
    return whole


def size_class(width: int, height: int) -> str:
    """Return the class of an image's shorter side, `256 to 511` for example."""
    side = min(width, height)
    if side < SIDES[0]:
        return f"below {SIDES[0]}"
    if side >= SIDES[-1]:
        return f"{SIDES[-1]} and more"
    low = max(start for start in SIDES if start <= side)
    return f"{low} to {2 * low - 1}"


def kind_of(reason: str) -> str:
    """Return `reason` with an ellipsis for what differs from row to row: quotations, names of files, numbers."""
    reason = re.sub(r"(?<!\w)'[^']*'|\"[^\"]*\"|\([^()]*\)", "…", reason)
    reason = re.sub(r"((?:image|video) file) .+ (does not exist)", r"\1 … \2", reason)
    return re.sub(r"(?<!UTF-)\d[\d,.x]*(?<![,.])", "…", reason)[:160]


def on_one_line(text: str) -> str:
    """Return `text` of the data for a terminal: on one line, characters that do not show as their numbers."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode("ascii")
        for character in " ".join(text.split())
    )


def report(statistics: Statistics) -> str:
    """Return the counts as a text."""
    total = statistics.rows
    lines = [f"{total:,} rows"]
    for title, counts in tables(statistics).items():
        if counts:
            whole = sum(counts.values())
            lines += ["", title]
            lines += [f"  {count:>9,}  {count / whole:>6.1%}  {on_one_line(name)}" for name, count in counts.items()]
    return "\n".join(lines) + "\n"


def tables(statistics: Statistics, answers: Collection[str] | None = None) -> dict[str, dict[str, int]]:
    """Return the counts under their titles, each in the order a person expects.

    Args:
        answers: to open questions, which are shown; None: the commonest.
    """
    shown = dict(commonest(statistics.answers)) if answers is None else among(statistics.answers, answers)
    return {
        "rows by source": dict(statistics.sources.most_common()),
        "rows by number of choices": ordered(statistics.choices, [*map(str, range(2, len(LETTERS) + 1)), OPEN]),
        "multiple-choice rows by right letter": ordered(statistics.letters, LETTERS),
        ANSWERS: shown,
        "rows by number of images": dict(sorted(statistics.images.items(), key=lambda pair: int(pair[0]))),
        "images by pixels of the shorter side": ordered(statistics.sizes, _classes()),
        "left out": dict(statistics.reasons.most_common()),
    }


def _classes() -> list[str]:
    return [size_class(side, side) for side in (1, *SIDES)]


def ordered(counts: Mapping[str, int], order: Sequence[Any]) -> dict[str, int]:
    """Return those of the counts that are above 0, in an order."""
    return {name: counts[name] for name in order if counts.get(name)}


# ---------------------------------------------------------------------------------------------------------------------
# How far a conversion has come: what is finished stays, and what is not is made again.


try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

SKIPPED = "skipped.jsonl"
ROWS = (*READERS, ".arrow")  # files that `datasets` would read beside those written here


@dataclass(frozen=True)
class Progress:
    """Of one split in an output folder.

    Attributes:
        identity: the source and the options; a conversion is continued only by one of the same.
        taken: questions and reasons read from the source.
        parts: finished files.
        rows: rows in them.
        counts: of the rows written and left out, see `Statistics`.
        log_end: length of `skipped.jsonl`, in bytes, when the last file was finished.
        done: whether the source has no more.
    """

    identity: Any
    taken: int = 0
    parts: int = 0
    rows: int = 0
    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    log_end: int = 0
    done: bool = False

    @classmethod
    def begin(cls, folder: Path, split: str, identity: Any) -> "Progress":
        """Return where the conversion in `folder` stands; make the folder if there is none.

        One of which nothing was written, because it failed, is begun anew, or another in its place.

        Raises:
            ConfigError: the folder holds another conversion, one of another split that is not finished, or files with
                rows of other origin.
        """
        identity = json.loads(json.dumps(identity, default=str))
        folder.mkdir(parents=True, exist_ok=True)
        path = _path(folder, split)
        others = [name for name in _splits_in(folder) if name != split]
        if not path.exists():
            _refuse_foreign(folder, others)
            if begun := [name for name in others if not _read(folder, name).done]:
                raise ConfigError(
                    f"{folder} holds a conversion of {begun[0]} that is not finished: finish it first, or choose "
                    "another folder."
                )
            log = folder / SKIPPED
            return cls(identity, log_end=log.stat().st_size if log.exists() else 0)
        progress = _read(folder, split)
        if not progress.parts and not others:
            if progress.identity != identity:  # a kill may have left a file that this one would not replace
                _refuse_foreign(folder, others)
            return cls(identity)
        if progress.identity != identity:
            before = progress.identity if isinstance(progress.identity, dict) else {}
            differing = [name for name, value in identity.items() if before.get(name) != value]
            raise ConfigError(
                f"{folder} holds a conversion with other {', '.join(differing) or 'options'}: choose another folder, "
                "or delete it to begin anew."
            )
        return progress

    def save(self, folder: Path, split: str) -> None:
        """Write it down, at once or not at all."""
        write_whole(_path(folder, split), json.dumps(asdict(self)).encode())


class SkippedLog:
    """`skipped.jsonl`: one JSON object with `file`, `row` and `reason` for each row that was left out."""

    def __init__(self, folder: Path, end: int) -> None:
        """Continue the file after `end` bytes; what follows was written after the last file was finished."""
        self._file = (folder / SKIPPED).open("ab")
        self._file.truncate(min(end, self._file.tell()))

    def add(self, origin: Origin, reason: str) -> None:
        """Write down a row and why it was left out."""
        line = json.dumps({"file": origin.file, "row": origin.row, "reason": reason})
        self._file.write(line.encode() + b"\n")

    def end(self) -> int:
        """Return the length of the file once it is on the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return os.fstat(self._file.fileno()).st_size

    def close(self) -> None:
        """Close the file."""
        self._file.close()


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Keep other processes from writing to `folder` meanwhile, on systems that can.

    Raises:
        ConfigError: another process is writing to it, or it cannot be written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w")
    except OSError as error:
        raise ConfigError(f"{folder} is no folder to write to ({error.strerror}): choose another.") from error
    with lock as file:
        if fcntl is None:
            yield
            return
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(f"Another process is writing to {folder}: choose another folder, or wait.") from error
        yield


def statistics_in(folder: Path) -> dict[str, Statistics]:
    """Return what each split in `folder` consists of, as far as it is written; `train` first."""
    splits = sorted(_splits_in(folder), key=lambda name: (name != "train", name))
    return {split: Statistics.of(_read(folder, split).counts) for split in splits}


def _splits_in(folder: Path) -> list[str]:
    return sorted(path.name.split(".")[1] for path in folder.glob(".*.progress.json"))


def _refuse_foreign(folder: Path, splits: Sequence[str]) -> None:
    """Refuse files that readers of the folder would take for rows of it, those of converted splits apart."""
    for file in sorted(folder.iterdir()):
        if file.suffix.lower() not in ROWS or file.name.startswith(".") or file.name == SKIPPED:
            continue
        if not any(re.fullmatch(rf"{re.escape(split)}-\d+\.\w+", file.name) for split in splits):
            raise ConfigError(
                f"{folder} has {file.name}, which no conversion here made, and which would be read as rows of the "
                "set: choose another folder."
            )


def _read(folder: Path, split: str) -> Progress:
    path = _path(folder, split)
    try:
        return Progress(**json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError, OSError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read ({error}): delete {folder} or choose another folder.") from error


def _path(folder: Path, split: str) -> Path:
    return folder / f".{split}.progress.json"


# ---------------------------------------------------------------------------------------------------------------------
# Rows of the schema as files: Parquet with images inside, or JSONL with paths of images.
#
# Each file is written row group by row group under another name and gets its own name when it is whole.


ROW_GROUP_ROWS = 100  # what a stream reads at a time
ROW_GROUP_BYTES = 32 * 2**20  # a row group with larger images has fewer rows
IMAGES_FOLDER = "images"


class ParquetPart:
    """A Parquet file with `image`, or with `images` for rows of several, `videos` and `regions` if rows have any."""

    def __init__(self, path: Path, several_images: bool, videos: bool = False, regions: bool = False) -> None:
        self.path = path
        self.several_images = several_images
        self.videos, self.regions = videos, regions
        self.schema = schema(several_images, videos, regions)
        self.rows: list[dict[str, Any]] = []
        self.waiting = 0
        column = "images.list.element" if several_images else "image"
        self.writer = pyarrow.parquet.ParquetWriter(
            unfinished(path),
            self.schema,
            compression={name: "NONE" if name.endswith("bytes") else "ZSTD" for name in _leaves(self.schema)},
            use_dictionary=["source", "solution"],
            write_page_checksum=True,
            write_statistics=[name for name in _leaves(self.schema) if not name.startswith(column)],
        )

    def add(self, question: Question, images: Sequence[Encoded]) -> None:
        """Add a row; write a row group when there is enough for one."""
        stored = [{"bytes": image.data, "path": None} for image in images]
        shown = {"images": stored} if self.several_images else {"image": stored[0]}
        self.rows.append(_texts(question, self.videos, self.regions) | shown)
        self.waiting += sum(len(image.data) for image in images)
        if len(self.rows) >= ROW_GROUP_ROWS or self.waiting >= ROW_GROUP_BYTES:
            self._write()

    def finish(self) -> None:
        """Make the file whole and give it its name."""
        self._write()
        self.writer.close()
        publish(self.path)

    def drop(self) -> None:
        """Give the file up."""
        self.writer.close()
        unfinished(self.path).unlink(missing_ok=True)

    def _write(self) -> None:
        if self.rows:
            self.writer.write_table(pyarrow.Table.from_pylist(self.rows, schema=self.schema))
        self.rows, self.waiting = [], 0


class JsonlPart:
    """A JSONL file with paths of image files, which are in a folder beside it, named by their content."""

    def __init__(self, path: Path, several_images: bool, videos: bool = False, regions: bool = False) -> None:
        self.path = path
        self.several_images = several_images
        self.videos, self.regions = videos, regions
        self.file = unfinished(path).open("w", encoding="utf-8")
        self.images: list[Path] = []  # written, and perhaps not on the disk yet

    def add(self, question: Question, images: Sequence[Encoded]) -> None:
        """Write the images of a row, then the row."""
        paths = [self._stored(image) for image in images]
        shown = {"images": paths} if self.several_images else {"image": paths[0]}
        self.file.write(json.dumps(_texts(question, self.videos, self.regions) | shown, ensure_ascii=False) + "\n")

    def finish(self) -> None:
        """Make the file whole and give it its name."""
        self.file.close()
        sync_files(self.images)
        publish(self.path)

    def drop(self) -> None:
        """Give the file up; images that were written stay, to be found again."""
        self.file.close()
        unfinished(self.path).unlink(missing_ok=True)

    def _stored(self, image: Encoded) -> str:
        name = hashlib.sha256(image.data).hexdigest()[:40]
        relative = Path(IMAGES_FOLDER) / name[:2] / (name + image.suffix)
        path = self.path.parent / relative
        if not path.exists() or path.stat().st_size != len(image.data):
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished(path).write_bytes(image.data)
            unfinished(path).replace(path)
            self.images.append(path)
        return relative.as_posix()


Part = ParquetPart | JsonlPart
PARTS: dict[str, type[Part]] = {"parquet": ParquetPart, "jsonl": JsonlPart}


@cache
def schema(several_images: bool, videos: bool = False, regions: bool = False) -> pyarrow.Schema:
    """Return the columns of a Parquet file, with what `datasets` needs to know them as images."""
    from datasets import Features, Image, List, Value

    features: dict[str, Any] = {name: Value("string") for name in ("id", "source", "problem", "solution")}
    features["choices"] = List(Value("string"))
    features["images" if several_images else "image"] = List(Image()) if several_images else Image()
    if videos:
        features["videos"] = List(Value("string"))
    if regions:
        features["regions"] = List(List(Value("float32")))
    return Features(features).arrow_schema


def _texts(question: Question, videos: bool, regions: bool) -> dict[str, Any]:
    names = ["id", "source", "problem", "solution", "choices"]
    names += [name for name, wanted in (("videos", videos), ("regions", regions)) if wanted]
    return {name: getattr(question, name) for name in names}


def _leaves(columns: pyarrow.Schema) -> list[str]:
    """The dotted names by which Parquet knows the columns."""
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(columns.empty_table(), sink)
    stored = pyarrow.parquet.read_metadata(pyarrow.BufferReader(sink.getvalue())).schema
    return [stored.column(index).path for index in range(len(stored.names))]


# ---------------------------------------------------------------------------------------------------------------------
# Questions become files: images encoded, rows written part by part, rows that cannot be used listed.


ROWS_PER_FILE = 2000


@dataclass(frozen=True)
class Output:
    """Where and how rows are written.

    Attributes:
        folder: gets `SPLIT-00000.parquet`, … and `skipped.jsonl`.
        split: start of the file names, by which `datasets` knows the split.
        kind: `parquet` or `jsonl`.
        several_images: whether rows have `images` instead of `image`.
        videos: whether rows have `videos` too, as paths.
        regions: whether rows have `regions` too.
        rows_per_file: rows after which a file is finished; what is finished need not be made again after a kill.
        limit: rows after which to stop; None: all.
        workers: processes that decode images; 0: none beside this one.
        encoding: how images are encoded.
    """

    folder: Path
    split: str = "train"
    kind: str = "parquet"
    several_images: bool = False
    videos: bool = False
    regions: bool = False
    rows_per_file: int = ROWS_PER_FILE
    limit: int | None = None
    workers: int = 2
    encoding: Encoding = field(default_factory=Encoding)

    def __post_init__(self) -> None:
        if self.kind not in PARTS:
            raise ConfigError(f"The output format is {self.kind!r}: give one of {', '.join(PARTS)}.")
        if not self.split.isidentifier():
            raise ConfigError(f"The output split is {self.split!r}: give a word such as train.")
        for name, least in (("rows_per_file", 1), ("limit", 1), ("workers", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name} is {value}: give an integer of at least {least}.")


def convert(candidates: Iterable[Candidate], output: Output, identity: Any, total: int | None = None) -> Progress:
    """Write the questions among `candidates` to files, continuing what an earlier call has begun.

    Args:
        candidates: questions and reasons, the same and in the same order each time.
        identity: what the candidates depend on, as JSON; a folder begun with another is refused.
        total: source rows, for the progress bar; None: not known.

    Raises:
        ConfigError: the folder holds something else, lacks what was finished, or another process is writing to it.
        DataError: the source cannot be read, or no row is left.
    """
    with alone_in(output.folder):
        progress = Progress.begin(output.folder, output.split, identity)
        _require_parts(output, progress)
        if not progress.done:
            progress.save(output.folder, output.split)
            progress = _write(candidates, output, progress, total)
    if progress.rows == 0:
        raise DataError(_nothing_left(progress, output.folder / SKIPPED))
    return progress


def _part_path(output: Output, number: int) -> Path:
    return output.folder / f"{output.split}-{number:05d}.{output.kind}"


def _require_parts(output: Output, progress: Progress) -> None:
    for path in (_part_path(output, number) for number in range(progress.parts)):
        if not path.is_file():
            raise ConfigError(f"{path} was finished and is missing: put it back, or delete {output.folder}.")


def _nothing_left(progress: Progress, log: Path) -> str:
    skipped = Statistics.of(progress.counts).reasons
    if not skipped:
        return "There are no rows to write: the source has none that are asked for."
    kind, count = skipped.most_common(1)[0]
    return f"None of the {skipped.total()} rows can be used; {count} because: {kind}. {log} lists them all."


def _write(candidates: Iterable[Candidate], output: Output, progress: Progress, total: int | None) -> Progress:
    bar = tqdm(total=total, desc=f"convert ({output.split})", unit=" rows", delay=1)
    with bar, encoder(output.encoding, output.workers) as encode, closing(_Run(output, progress)) as run:
        waiting = islice(_shown(candidates, bar), run.taken, None)
        for (origin, candidate), found in encode(with_images(waiting)):
            run.take(origin, candidate, found)
            if run.is_full():
                break
        return run.commit(done=True)


class _Run:
    """The file in the making, and how far everything before it has come."""

    def __init__(self, output: Output, progress: Progress) -> None:
        self.output = output
        self.progress = progress
        self.log = SkippedLog(output.folder, progress.log_end)
        self.part: Part | None = None
        self.rows = 0  # in this part
        self.statistics = Statistics.of(progress.counts)
        self.taken = progress.taken

    def take(self, origin: Origin, candidate: Question | str, images: list[Encoded] | str) -> None:
        """Add a row, or list why there is none; finish the file when it has its rows."""
        self.taken += 1
        if isinstance(candidate, str):
            self._skip(origin, candidate)
        elif isinstance(images, str):
            self._skip(origin, images)
        elif not self.output.several_images and len(images) != 1:
            self._skip(origin, f"it has {len(images)} images, where one is expected")
        elif candidate.videos and not self.output.videos:
            self._skip(origin, "it has a video, but the set's first row has no column of videos")
        else:
            if self.part is None:
                path = _part_path(self.output, self.progress.parts)
                self.part = PARTS[self.output.kind](
                    path, self.output.several_images, self.output.videos, self.output.regions
                )
            self.part.add(candidate, images)
            self.statistics.add(candidate, images)
            self.rows += 1
            if self.rows == self.output.rows_per_file:
                self.commit()

    def is_full(self) -> bool:
        """Return whether as many rows are written as are wanted."""
        return self.output.limit is not None and self.progress.rows + self.rows >= self.output.limit

    def commit(self, done: bool = False) -> Progress:
        """Finish the file and write down how far the conversion has come."""
        if self.part is not None:
            self.part.finish()
        self.progress = replace(
            self.progress,
            parts=self.progress.parts + (self.part is not None),
            rows=self.progress.rows + self.rows,
            counts=self.statistics.as_dict(),
            taken=self.taken,
            log_end=self.log.end(),
            done=done,
        )
        self.progress.save(self.output.folder, self.output.split)
        self.part, self.rows = None, 0
        return self.progress

    def close(self) -> None:
        """Give up what is not finished."""
        if self.part is not None:
            self.part.drop()
        self.log.close()

    def _skip(self, origin: Origin, reason: str) -> None:
        self.log.add(origin, reason)
        self.statistics.skip(reason)


def _shown(candidates: Iterable[Candidate], bar: Any) -> Iterator[Candidate]:
    """The candidates, each source row of theirs shown in the progress bar."""
    last = None
    for candidate in candidates:
        if candidate[0] != last:
            last = candidate[0]
            bar.update()
        yield candidate


# ---------------------------------------------------------------------------------------------------------------------
# The report of a set as a picture; needs matplotlib, which nothing else here does.


FORMATS = (".png", ".svg", ".pdf")
LONGEST_NAME = 24
FEWEST_BARS = 2  # that a panel has room for, so that one alone is no block
BAR, AROUND = 0.2, 0.75  # inches: of a bar with its number, and of what is above and below the bars of a panel
INK, MUTED, RULE, RAISED = "#1a1d21", "#5a636e", "#dde1e6", "#f6f7f9"  # as report_page/src/style.css
COLOURS = ("#0072b2", "#d55e00", "#007d5c", "#a8477f", "#5c5c5c", "#8a6d00")  # as of runs in report_page/src/colours.ts


def figures_for(path: Path) -> ModuleType:
    """Return matplotlib's figures, which can be written to `path`: to be called before any work is done, too.

    Raises:
        ConfigError: matplotlib is not installed, the suffix of `path` is none of `FORMATS`, or it cannot be written.
    """
    if path.suffix.lower() not in FORMATS:
        raise ConfigError(f"The plot is {path}: give a file that ends in {', '.join(FORMATS)}.")
    if not is_writable(path):
        raise ConfigError(f"The plot is {path}, which cannot be written: give a file in a folder that can.")
    try:
        import matplotlib.figure
    except ImportError as error:
        raise ConfigError("A plot needs matplotlib, which is not installed: pip install vgr_trl[plots].") from error
    return matplotlib.figure


def plot(statistics: Mapping[str, Statistics], path: Path) -> None:
    """Draw the counts of one or more splits, a panel for each table and a colour for each split.

    Args:
        statistics: by name of the split.
        path: of the picture; its suffix says the format, one of `FORMATS`.

    Raises:
        ConfigError: as `figures_for`.
    """
    figures = figures_for(path)
    whole = {title: list(counts) for title, counts in tables(together(statistics.values())).items() if counts}
    shown = {split: tables(counts, whole.get(ANSWERS)) for split, counts in statistics.items()}
    columns = _columns({title: AROUND + BAR * _room(names) * (len(shown) + 0.6) for title, names in whole.items()})
    longest = max(sum(column.values()) for column in columns)
    figure = figures.Figure(figsize=(12, longest), layout="constrained")
    for part, column in zip(figure.subfigures(1, len(columns), squeeze=False).ravel(), columns, strict=True):
        below = longest - sum(column.values())
        heights = [*column.values(), max(below, 1e-3)]
        *panels, rest = part.subplots(len(heights), 1, height_ratios=heights)
        rest.set_axis_off()
        for panel, title in zip(panels, column, strict=True):
            names = whole[title]
            _draw(
                panel, title, names, {split: [of[title].get(name, 0) for name in names] for split, of in shown.items()}
            )
            if len(shown) > 1 and title == next(iter(whole)):
                panel.legend(frameon=False, labelcolor=INK, loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        figure.savefig(unfinished(path), format=path.suffix[1:].lower())
        publish(path)
    finally:
        unfinished(path).unlink(missing_ok=True)


def _columns(heights: Mapping[str, float]) -> list[dict[str, float]]:
    """The panels in two columns, each below the column that is shorter so far."""
    columns: list[dict[str, float]] = [{}, {}]
    for title, height in heights.items():
        min(columns, key=lambda column: sum(column.values()))[title] = height
    return [column for column in columns if column]


def _room(names: Sequence[str]) -> int:
    return max(len(names), FEWEST_BARS)


def _draw(panel: Any, title: str, names: Sequence[str], counts: Mapping[str, Sequence[int]]) -> None:
    height = 0.8 / len(counts)
    for number, (split, found) in enumerate(counts.items()):
        places = [index + (number - (len(counts) - 1) / 2) * height for index in range(len(names))]
        bars = panel.barh(places, found, height, label=split, color=COLOURS[number % len(COLOURS)])
        panel.bar_label(bars, [f"{count:,}" for count in found], padding=3, color=MUTED, fontsize="small")
    panel.set_yticks(range(len(names)), [_label(name) for name in names])
    panel.set_ylim(_room(names) - 0.5, -0.5)
    panel.margins(x=0.12)
    panel.set_title(title, loc="left", fontweight="bold", color=INK)
    panel.set_facecolor(RAISED)
    panel.spines[:].set_visible(False)
    panel.tick_params(length=0, colors=MUTED)
    panel.grid(axis="x", color=RULE)
    panel.set_axisbelow(True)


def _label(name: str) -> str:
    text = on_one_line(name)
    text = text if len(text) <= LONGEST_NAME else f"{text[: LONGEST_NAME - 1]}…"
    return text.replace("$", r"\$")
