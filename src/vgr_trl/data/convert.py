"""Convert questions to one schema: images encoded in parallel, rows written as Parquet, and counted."""

import hashlib
import io
import json
import re
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any

import pyarrow
import pyarrow.parquet
from datasets import Features, List, Value
from datasets import Image as ImageFeature
from PIL import Image
from tqdm.auto import tqdm

from vgr_trl.data.columns import Candidate, Question
from vgr_trl.data.images import ImageLimits, image_bytes, read_image, to_rgb
from vgr_trl.data.read import row_files
from vgr_trl.utils import ConfigError, DataError, pool, printable, publish, unfinished, write_atomic

KEPT = ("JPEG", "PNG", "WEBP")  # formats that are stored as they are
ENCODING: dict[str, dict[str, Any]] = {"JPEG": {"quality": 95, "subsampling": 0}, "PNG": {"compress_level": 3}}
ROWS_PER_TASK = 8
TASKS_PER_WORKER = 3  # one is worked on, one waits, and the result of one waits
ROWS_PER_FILE = 2000
ROW_GROUP_ROWS = 100  # what a stream reads at a time
SKIPPED = "skipped.jsonl"
TEXTS = ("id", "source", "problem", "solution", "choices")  # the columns of every set; others are in `Output.columns`


@dataclass(frozen=True)
class Encoded:
    """An image file: its bytes, its size in pixels, and a hash of its pixels if wanted."""

    data: bytes
    width: int
    height: int
    digest: str = ""


def encode_image(value: Any, root: Path, limits: ImageLimits, *, with_digest: bool = False) -> Encoded:
    """Return `value` as a file of upright RGB pixels within `limits`; a file that is that already keeps its bytes.

    A JPEG that changes is written as JPEG of quality 95 without subsampling, any other image that changes as PNG.

    Args:
        value: an image, a path, or a dict with `bytes` or `path`.
        root: folder that relative paths start from.

    Raises:
        DataError: the image cannot be used; the message is the reason.
    """
    data = None if isinstance(value, Image.Image) else image_bytes(value, root)
    image = read_image(value if data is None else {"bytes": data}, root, limits.max_image_pixels)
    kind, size = str(image.format), limits.size_of(*image.size)
    is_plain = image.mode == "RGB" and "transparency" not in image.info and size == image.size
    keeps_file = is_plain and kind in KEPT and getattr(image, "n_frames", 1) == 1  # of a damaged TIFF it raises
    image = to_rgb(image)
    if size != image.size:
        image = image.resize(size, Image.Resampling.LANCZOS)
    if data is None or not keeps_file:
        kind = "JPEG" if kind in ("JPEG", "MPO") else "PNG"
        plain, buffer = Image.new("RGB", size), io.BytesIO()  # without the original's colour profile and metadata
        plain.paste(image)
        plain.save(buffer, kind, **ENCODING[kind])
        data = buffer.getvalue()
    return Encoded(data, *size, pixel_digest(image) if with_digest else "")


def pixel_digest(image: Image.Image) -> str:
    """Return a hash of size and pixels, the same for the same RGB image in another file format."""
    return hashlib.sha256(f"{image.width}x{image.height} ".encode() + image.tobytes()).hexdigest()


@dataclass(frozen=True)
class Output:
    """Where and how rows are written.

    Attributes:
        folder: gets `SPLIT-00000.parquet`, … and `skipped.jsonl`.
        split: start of the file names, by which `datasets` knows the split.
        columns: `image` or `images`, and those of `videos` (paths) and `regions` that rows have.
        limit: rows after which to stop; None: all.
        workers: processes that decode images; 0: none beside this one.
        root: folder that relative paths of images start from.
        limits: of the images' sizes.
    """

    folder: Path
    split: str = "train"
    columns: tuple[str, ...] = ("image",)
    rows_per_file: int = ROWS_PER_FILE
    limit: int | None = None
    workers: int = 2
    root: Path = Path()
    limits: ImageLimits = field(default_factory=ImageLimits)


def encode_candidates(
    candidates: Iterable[Candidate], output: Output, with_digest: bool = False
) -> Iterator[Candidate]:
    """Yield the candidates in order with `images` of `Encoded`, or why an image of theirs cannot be used.

    At most `ROWS_PER_TASK * TASKS_PER_WORKER * workers` rows are in memory at a time.
    """
    encode = partial(_encode, output=output, with_digest=with_digest)
    if output.workers == 0:
        yield from map(encode, candidates)
        return
    waiting, rows = deque[Iterator[Candidate]](), iter(candidates)
    with pool(output.workers) as executor:
        while (batch := list(islice(rows, ROWS_PER_TASK))) or waiting:
            if batch:
                waiting.append(executor.map(encode, batch, chunksize=ROWS_PER_TASK))
            if not batch or len(waiting) >= TASKS_PER_WORKER * output.workers:
                yield from waiting.popleft()


def _encode(candidate: Candidate, output: Output, with_digest: bool) -> Candidate:
    origin, question = candidate
    if isinstance(question, str):
        return candidate
    encode = partial(encode_image, root=output.root, limits=output.limits, with_digest=with_digest)
    try:
        return origin, replace(question, images=list(map(encode, question.images)))
    except DataError as error:
        return origin, str(error).rstrip(".")


def convert(candidates: Iterable[Candidate], output: Output, identity: Mapping[str, Any]) -> "Counts":
    """Write the questions among `candidates` to files, which appear when all are complete, and return what they are.

    Args:
        candidates: questions and reasons.
        identity: what the candidates depend on, as JSON; what an earlier call has finished with it is not made again.

    Raises:
        ConfigError: the folder holds something else.
        DataError: the source cannot be read, or no row is left.
    """
    if (counts := finished(output, identity)) is not None:
        return counts
    counts, files, log = defaultdict(Counter), list[Path](), output.folder / SKIPPED
    others = log.read_bytes() if log.exists() and _records(output.folder) else b""  # rows that other splits left out
    try:
        with unfinished(log).open("wb") as skipped:
            skipped.write(others)
            bar = tqdm(candidates, desc=f"convert ({output.split})", unit=" rows", delay=1)
            rows = islice(_usable(bar, output, counts, skipped), output.limit)
            while (first := next(rows, None)) is not None:
                files.append(output.folder / f"{output.split}-{len(files):05d}.parquet")
                _write(unfinished(files[-1]), chain([first], islice(rows, output.rows_per_file - 1)), output)
        for path in (*files, log):
            publish(path)
    finally:
        for path in (*files, log):
            unfinished(path).unlink(missing_ok=True)
    if not files:
        nothing = ("the source has no rows that are asked for", 0)
        reason, number = next(iter(counts["reasons"].most_common(1)), nothing)
        total = counts["reasons"].total()
        raise DataError(f"None of the {total} rows can be used; {number} because: {reason}. {log} lists them all.")
    record = {"identity": identity, "files": len(files), "counts": counts}
    write_atomic(output.folder / f".{output.split}.converted.json", json.dumps(record, default=str).encode())
    return counts


def _usable(
    candidates: Iterable[Candidate], output: Output, counts: "Counts", skipped: IO[bytes]
) -> Iterator[Question]:
    """Yield the questions that can be written, and count and list the others."""
    for origin, found in encode_candidates(candidates, output):
        if isinstance(found, Question) and "image" in output.columns and len(found.images) != 1:
            found = f"it has {len(found.images)} images, where one is expected"
        elif isinstance(found, Question) and found.videos and "videos" not in output.columns:
            found = "it has a video, but the set's first row has no column of videos"
        if isinstance(found, str):
            counts["reasons"][kind_of(found)] += 1
            skipped.write(json.dumps({"file": origin.file, "row": origin.row, "reason": found}).encode() + b"\n")
        else:
            count_row(counts, found.source, found.choices, len(found.images), found.solution)
            counts["sizes"].update(power_class(min(image.width, image.height)) for image in found.images)
            yield found


def finished(output: Output, identity: Mapping[str, Any]) -> "Counts | None":
    """Return the counts of a split that an earlier call has finished, None if there is none; make the folder.

    Raises:
        ConfigError: it was made with other options, or the folder has other files of rows.
    """
    folder, split = output.folder, output.split
    folder.mkdir(parents=True, exist_ok=True)
    records = _records(folder)
    if record := records.get(split):
        now = json.loads(json.dumps(identity, default=str))
        if names := [name for name in now if record["identity"].get(name) != now[name]]:
            raise ConfigError(f"{folder} holds a conversion with other {', '.join(names)}: choose another folder.")
        if len(list(folder.glob(f"{split}-*.parquet"))) == record["files"]:
            return statistics_in(folder)[split]
    for file in row_files(folder):
        if not any(re.fullmatch(rf"{name}-\d+\.\w+", file.name) for name in records):
            raise ConfigError(f"{folder} has {file.name}, which no finished conversion made: choose another folder.")
    return None


def statistics_in(folder: Path) -> dict[str, "Counts"]:
    """Return what each finished split in `folder` consists of; `train` first."""
    records = sorted(_records(folder).items(), key=lambda record: record[0] != "train")
    return {split: {name: Counter(counts) for name, counts in record["counts"].items()} for split, record in records}


def _records(folder: Path) -> dict[str, Any]:
    return {path.name.split(".")[1]: json.loads(path.read_bytes()) for path in folder.glob(".*.converted.json")}


def _row(question: Question, columns: Iterable[str]) -> dict[str, Any]:
    images = [{"bytes": image.data, "path": None} for image in question.images]
    row = {name: getattr(question, name, None) for name in columns}
    return row | {"image": images[0] if images else None, "images": images}


def _write(path: Path, rows: Iterator[Question], output: Output) -> None:
    """Write rows with their images inside, uncompressed, as images are compressed already."""
    text, texts = Value("string"), List(Value("string"))
    types = dict.fromkeys(TEXTS, text) | {"choices": texts, "image": ImageFeature(), "images": List(ImageFeature())}
    types |= {"videos": texts, "regions": List(List(Value("float32")))}
    schema = Features({name: types[name] for name in (*TEXTS, *output.columns)}).arrow_schema
    options = {"compression": "none", "write_statistics": False, "write_page_checksum": True}
    with pyarrow.parquet.ParquetWriter(path, schema, use_dictionary=["source", "solution"], **options) as writer:
        while group := list(islice(rows, ROW_GROUP_ROWS)):
            stored = [_row(row, schema.names) for row in group]
            writer.write_table(pyarrow.Table.from_pylist(stored, schema=schema))


Counts = dict[str, Counter[str]]
"""Counts over the rows of a set, under the names of `TITLES`."""
TITLES = {
    "sources": "rows by source",
    "choices": "rows by number of choices",
    "letters": "multiple-choice rows by right letter",
    "answers": "commonest answers to open questions",
    "images": "rows by number of images",
    "sizes": "images by pixels of the shorter side",
    "lengths": "prompt length in tokens, images included",
    "reasons": "left out",
}
BY_COUNT = ("sources", "answers", "reasons")  # the tables of which the commonest are listed
LONGEST_ANSWER = 80  # characters
MOST_LINES = 12


def count_row(counts: Counts, source: str, choices: Sized | None, images: int, right: Any = None) -> None:
    """Count a row; `right` is the letter of its right option or the answer to an open question, None if not known."""
    counts["sources"][on_one_line(source)] += 1
    counts["choices"][str(len(choices)) if choices else "open"] += 1
    counts["images"][str(images)] += 1
    if right is not None and choices:
        counts["letters"][right] += 1
    elif right is not None:
        counts["answers"][on_one_line(str(right))[:LONGEST_ANSWER]] += 1


def power_class(number: int) -> str:
    """Return the powers of two that a number above 0 lies between, `256 to 511` for example."""
    low = 1 << (number.bit_length() - 1)
    return f"{low} to {2 * low - 1}"


def kind_of(reason: str) -> str:
    """Return `reason` with an ellipsis for what differs from row to row: quotations, names of files, numbers."""
    reason = re.sub(r"(?<!\w)'[^']*'|\"[^\"]*\"|\([^()]*\)", "…", reason)
    reason = re.sub(r"((?:image|video) file) .+ (does not exist)", r"\1 … \2", reason)
    return on_one_line(re.sub(r"(?<!UTF-)\d[\d,.x]*(?<![,.])", "…", reason)[:160])


def on_one_line(text: str) -> str:
    """Return `text` of the data for a terminal: on one line, characters that do not show as their numbers."""
    return printable(" ".join(text.split()))


def tables(counts: Counts) -> dict[str, dict[str, int]]:
    """Return the counts that are not empty: the commonest of some, the others in the order of numbers or letters."""
    found = {}
    for table in filter(counts.get, TITLES):
        in_order = sorted(counts[table].items(), key=lambda pair: (len(pair[0]), pair[0]))
        found[table] = dict(counts[table].most_common(MOST_LINES) if table in BY_COUNT else in_order)
    return found


def report(counts: Counts) -> str:
    """Return the tables as a text."""
    lines = []
    for table, numbers in tables(counts).items():
        lines += ["", TITLES[table]]
        total = counts[table].total()
        lines += [f"  {number:>9,}  {number / total:>6.1%}  {name}" for name, number in numbers.items()]
    return "\n".join(lines)
