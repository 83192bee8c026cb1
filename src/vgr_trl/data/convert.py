"""Convert questions to one schema: images encoded in parallel, rows written as Parquet or JSONL, statistics counted."""

import hashlib
import io
import json
import re
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, count, islice
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow
import pyarrow.parquet
from PIL import Image
from tqdm.auto import tqdm

from vgr_trl.data.columns import Candidate, Question
from vgr_trl.data.images import ImageLimits, image_bytes, read_image, to_rgb
from vgr_trl.data.prompts import LETTERS
from vgr_trl.data.read import READERS
from vgr_trl.utils import ConfigError, DataError, kill_workers, pool, publish, unfinished, write_atomic

SUFFIXES = {"JPEG": ".jpg", "PNG": ".png", "WEBP": ".webp"}  # formats that are stored as they are
JPEG_QUALITY = 95
ROWS_PER_TASK = 8
TASKS_PER_WORKER = 3  # one is worked on, one waits, and the result of one waits
ROWS_PER_FILE = 2000
ROW_GROUP_ROWS = 100  # what a stream reads at a time
SKIPPED = "skipped.jsonl"


@dataclass(frozen=True)
class Encoded:
    """An image file: its bytes, the suffix of its format, its size in pixels, and a hash of its pixels if wanted."""

    data: bytes
    suffix: str
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
    buffer = io.BytesIO()
    plain = Image.new("RGB", size)  # without colour profile and metadata, which belonged to the original
    plain.paste(image)
    if kind in ("JPEG", "MPO"):
        plain.save(buffer, "JPEG", quality=JPEG_QUALITY, subsampling=0)
        return Encoded(buffer.getvalue(), ".jpg", *size, digest)
    plain.save(buffer, "PNG", compress_level=3)
    return Encoded(buffer.getvalue(), ".png", *size, digest)


def pixel_digest(image: Image.Image) -> str:
    """Return a hash of size and pixels, the same for the same RGB image in another file format."""
    return hashlib.sha256(f"{image.width}x{image.height} ".encode() + image.tobytes()).hexdigest()


def encode_all(images: Sequence[Any], root: Path, limits: ImageLimits, with_digest: bool) -> list[Encoded] | str:
    """Return a row's images encoded, or why one of them cannot be used."""
    try:
        return [encode_image(image, root, limits, with_digest=with_digest) for image in images]
    except DataError as error:
        return str(error).rstrip(".")


def _encode_rows(rows: list[Sequence[Any]], encode: Callable[[Sequence[Any]], list[Encoded] | str]) -> list[Any]:
    return [encode(images) for images in rows]


def encode_candidates(
    candidates: Iterable[Candidate], output: "Output", with_digest: bool = False
) -> Iterator[tuple[Candidate, list[Encoded]]]:
    """Yield each candidate with its images encoded, in order; it becomes a reason where an image cannot be used.

    At most `ROWS_PER_TASK * TASKS_PER_WORKER * workers` rows are held at a time.

    Raises:
        DataError: a worker was killed from outside, or by an image.
    """
    encode = partial(encode_all, root=output.root, limits=output.limits, with_digest=with_digest)

    def images_of(candidate: Candidate) -> Sequence[Any]:
        return () if isinstance(candidate[1], str) else candidate[1].images

    def result(candidate: Candidate, images: list[Encoded] | str) -> tuple[Candidate, list[Encoded]]:
        return ((candidate[0], images), []) if isinstance(images, str) else (candidate, images)

    if output.workers == 0:
        yield from (result(candidate, encode(images_of(candidate))) for candidate in candidates)
        return
    executor, waiting, rows = pool(output.workers), deque[Any](), iter(candidates)
    try:
        while (batch := list(islice(rows, ROWS_PER_TASK))) or waiting:
            if batch:
                waiting.append((batch, executor.submit(_encode_rows, list(map(images_of, batch)), encode)))
            if not batch or len(waiting) >= TASKS_PER_WORKER * output.workers:
                finished, future = waiting.popleft()
                yield from map(result, finished, future.result())
    except BaseException as error:
        kill_workers(executor)
        if isinstance(error, BrokenProcessPool):
            raise DataError(
                "A process that decodes images ended unexpectedly, out of memory or by a harmful image: set "
                "--max_image_pixels, or use --workers 0 to see where."
            ) from error
        raise
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


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
        limit: rows after which to stop; None: all.
        workers: processes that decode images; 0: none beside this one.
        root: folder that relative paths of images start from.
        limits: of the images' sizes.
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
    root: Path = Path()
    limits: ImageLimits = field(default_factory=ImageLimits)

    def __post_init__(self) -> None:
        for name, least in (("rows_per_file", 1), ("limit", 1), ("workers", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name} is {value}: give an integer of at least {least}.")


def convert(
    candidates: Iterable[Candidate], output: Output, identity: Any = None, total: int | None = None
) -> "Statistics":
    """Write the questions among `candidates` to files, which appear when all are complete, and return their counts.

    Args:
        candidates: questions and reasons.
        identity: what the candidates depend on, as JSON; what an earlier call has finished with it is not made again.
        total: source rows, for the progress bar; None: not known.

    Raises:
        ConfigError: the folder holds something else.
        DataError: the source cannot be read, or no row is left.
    """
    if (finished := finished_split(output, identity)) is not None:
        return finished
    folder, statistics, files = output.folder, Statistics(), list[Path]()
    log = folder / SKIPPED
    before = log.read_bytes() if log.exists() and _records(folder) else b""  # the rows that other splits left out
    bar = tqdm(candidates, total=total, desc=f"convert ({output.split})", unit=" rows", delay=1)
    try:
        with unfinished(log).open("wb") as skipped:
            skipped.write(before)
            rows = islice(_usable(bar, output, statistics, skipped.write), output.limit)
            for number in count():
                part = islice(rows, output.rows_per_file)
                if (first := next(part, None)) is None:
                    break
                files.append(folder / f"{output.split}-{number:05d}.{output.kind}")
                WRITERS[output.kind](unfinished(files[-1]), chain([first], part), output)
        for path in (*files, log):
            publish(path)
    finally:
        for path in (*files, log):
            unfinished(path).unlink(missing_ok=True)
    if not files:
        raise DataError(_why_empty(statistics, log))
    record = {"identity": identity, "files": len(files), "counts": vars(statistics)}
    write_atomic(_record(folder, output.split), json.dumps(record, default=str).encode())
    return statistics


def _usable(
    candidates: Iterable[Candidate], output: Output, statistics: "Statistics", log: Callable[[bytes], Any]
) -> Iterator[tuple[Question, list[Encoded]]]:
    """Yield the questions that can be written, and count and list the others."""
    for (origin, found), images in encode_candidates(candidates, output):
        if not isinstance(found, str) and not output.several_images and len(images) != 1:
            found = f"it has {len(images)} images, where one is expected"
        elif not isinstance(found, str) and found.videos and not output.videos:
            found = "it has a video, but the set's first row has no column of videos"
        if isinstance(found, str):
            statistics.skip(found)
            log(json.dumps({"file": origin.file, "row": origin.row, "reason": found}).encode() + b"\n")
        else:
            statistics.add(found, images)
            yield found, images


def _why_empty(statistics: "Statistics", log: Path) -> str:
    if not statistics.reasons:
        return "There are no rows to write: the source has none that are asked for."
    kind, number = statistics.reasons.most_common(1)[0]
    return f"None of the {statistics.reasons.total()} rows can be used; {number} because: {kind}. {log} lists them all."


def finished_split(output: Output, identity: Any) -> "Statistics | None":
    """Return the counts of a split that an earlier call has finished, None if there is none; make the folder.

    Raises:
        ConfigError: it was made with other options, or the folder has other files of rows.
    """
    folder, split = output.folder, output.split
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder} is no folder to write to ({error.strerror}): choose another.") from error
    records = _records(folder)
    if split in records:
        before, now = records[split]["identity"], json.loads(json.dumps(identity, default=str))
        if before != now:
            names = [name for name in now if before.get(name) != now[name]] if isinstance(before, dict) else []
            raise ConfigError(
                f"{folder} holds a conversion with other {', '.join(names) or 'options'}: choose another folder, or "
                "delete it."
            )
        if len(list(folder.glob(f"{split}-*.{output.kind}"))) == records[split]["files"]:
            return Statistics.of(records[split]["counts"])
    for file in sorted(folder.iterdir()):
        if file.suffix.lower() not in (*READERS, ".arrow") or file.name.startswith(".") or file.name == SKIPPED:
            continue
        if not any(re.fullmatch(rf"{name}-\d+\.\w+", file.name) for name in records):
            raise ConfigError(
                f"{folder} has {file.name}, which no finished conversion made, and which would be read as rows of the "
                "set: choose another folder, or delete the file."
            )
    return None


def statistics_in(folder: Path) -> dict[str, "Statistics"]:
    """Return what each finished split in `folder` consists of; `train` first."""
    records = _records(folder)
    return {name: Statistics.of(records[name]["counts"]) for name in sorted(records, key=lambda name: name != "train")}


def _record(folder: Path, split: str) -> Path:
    return folder / f".{split}.converted.json"


def _records(folder: Path) -> dict[str, Any]:
    paths = sorted(folder.glob(".*.converted.json"))
    return {path.name.split(".")[1]: json.loads(path.read_text(encoding="utf-8")) for path in paths}


def schema(output: Output) -> pyarrow.Schema:
    """Return the columns of a Parquet file, with what `datasets` needs to know them as images."""
    from datasets import Features, Image, List, Value

    features: dict[str, Any] = {name: Value("string") for name in ("id", "source", "problem", "solution")}
    features["choices"] = List(Value("string"))
    features |= {"images": List(Image())} if output.several_images else {"image": Image()}
    if output.videos:
        features["videos"] = List(Value("string"))
    if output.regions:
        features["regions"] = List(List(Value("float32")))
    return Features(features).arrow_schema


def _row(question: Question, images: list[Any], output: Output) -> dict[str, Any]:
    names = ["id", "source", "problem", "solution", "choices"]
    names += [name for name in ("videos", "regions") if getattr(output, name)]
    row = {name: getattr(question, name) for name in names}
    return row | ({"images": images} if output.several_images else {"image": images[0]})


def _write_parquet(path: Path, rows: Iterator[tuple[Question, list[Encoded]]], output: Output) -> None:
    """Write rows with their images inside, uncompressed, as images are compressed already."""
    columns = schema(output)
    with pyarrow.parquet.ParquetWriter(
        path,
        columns,
        compression="none",
        use_dictionary=["source", "solution"],
        write_statistics=False,
        write_page_checksum=True,
    ) as writer:
        while group := list(islice(rows, ROW_GROUP_ROWS)):
            stored = [
                _row(question, [{"bytes": image.data, "path": None} for image in images], output)
                for question, images in group
            ]
            writer.write_table(pyarrow.Table.from_pylist(stored, schema=columns))


def _write_jsonl(path: Path, rows: Iterator[tuple[Question, list[Encoded]]], output: Output) -> None:
    """Write rows with paths of image files, which lie in `images` and are named by their content."""
    with path.open("w", encoding="utf-8") as file:
        for question, images in rows:
            names = []
            for image in images:
                name = hashlib.sha256(image.data).hexdigest()[:40]
                names.append(f"images/{name[:2]}/{name}{image.suffix}")
                target = output.folder / names[-1]
                if not target.exists() or target.stat().st_size != len(image.data):
                    target.parent.mkdir(parents=True, exist_ok=True)
                    write_atomic(target, image.data, sync=False)
            file.write(json.dumps(_row(question, names, output), ensure_ascii=False) + "\n")


WRITERS = {"parquet": _write_parquet, "jsonl": _write_jsonl}


OPEN = "open"
OTHERS = "others"
MOST_ANSWERS = 10_000  # different ones that are counted, so that memory stays bounded
LONGEST_ANSWER = 80  # characters
MOST_LINES = 12
SIDES = (32, 64, 128, 256, 512, 1024)  # pixels of the shorter side at which a class of sizes begins


@dataclass
class Statistics:
    """Counts over the rows of a set.

    Attributes:
        sources: rows by `source`.
        choices: rows by the number of their choices, `open` for none.
        letters: multiple-choice rows by their right letter.
        answers: open rows by their answer, at most `MOST_ANSWERS` different ones.
        images: rows by the number of their images.
        sizes: images by the class of their shorter side in pixels, see `size_class`.
        reasons: rows left out, by kind of reason.
    """

    sources: Counter[str] = field(default_factory=Counter)
    choices: Counter[str] = field(default_factory=Counter)
    letters: Counter[str] = field(default_factory=Counter)
    answers: Counter[str] = field(default_factory=Counter)
    images: Counter[str] = field(default_factory=Counter)
    sizes: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, counts: Mapping[str, Mapping[str, int]]) -> "Statistics":
        """Return the statistics whose `vars`, as JSON has them, are `counts`."""
        return cls(**{name: Counter(values) for name, values in counts.items()})

    def add(self, question: Question, images: Sequence[Encoded]) -> None:
        """Count a row, and its images by their sizes."""
        letter, answer = (question.solution, None) if question.choices else (None, question.solution)
        self.count(question.source, question.choices, len(images), letter, answer)
        self.sizes.update(size_class(image.width, image.height) for image in images)

    def count(
        self, source: str, choices: Sized | None, images: int, letter: str | None = None, answer: object = None
    ) -> None:
        """Count a row; `letter` of its right option, and `answer` to an open question, are None where not known."""
        self.sources[on_one_line(source)] += 1
        self.choices[str(len(choices)) if choices else OPEN] += 1
        self.images[str(images)] += 1
        if letter is not None:
            self.letters[letter] += 1
        if answer is not None:
            text = on_one_line(str(answer))[:LONGEST_ANSWER]
            self.answers[text if text in self.answers or len(self.answers) < MOST_ANSWERS else OTHERS] += 1

    def skip(self, reason: str) -> None:
        """Count a row that was left out."""
        self.reasons[on_one_line(kind_of(reason))] += 1

    @property
    def rows(self) -> int:
        """The number of rows."""
        return self.sources.total()


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


TITLES = {
    "sources": "rows by source",
    "choices": "rows by number of choices",
    "letters": "multiple-choice rows by right letter",
    "answers": "commonest answers to open questions",
    "images": "rows by number of images",
    "sizes": "images by pixels of the shorter side",
    "reasons": "left out",
}


def tables(statistics: Statistics) -> dict[str, dict[str, int]]:
    """Return the counts that are not empty under the names of `TITLES`, each in the order a person expects."""
    order: dict[str, Sequence[str]] = {
        "choices": [*map(str, range(2, len(LETTERS) + 1)), OPEN],
        "letters": LETTERS,
        "images": sorted(statistics.images, key=int),
        "sizes": [size_class(side, side) for side in (1, *SIDES)],
    }
    found = {}
    for name in TITLES:
        counts = getattr(statistics, name)
        found[name] = {key: counts[key] for key in order[name] if counts[key]} if name in order else commonest(counts)
    return {name: counts for name, counts in found.items() if counts}


def commonest(counts: Mapping[str, int]) -> dict[str, int]:
    """Return the first `MOST_LINES` names by their counts, and the others in one."""
    pairs = sorted(((name, number) for name, number in counts.items() if name != OTHERS), key=lambda pair: -pair[1])
    rest = counts.get(OTHERS, 0) + sum(number for _, number in pairs[MOST_LINES:])
    return dict(pairs[:MOST_LINES]) | ({OTHERS: rest} if rest else {})


def table_lines(statistics: Statistics) -> Iterator[str]:
    """Yield the tables as lines of text."""
    for table, counts in tables(statistics).items():
        total = sum(counts.values())
        lines = [f"  {number:>9,}  {number / total:>6.1%}  {name}" for name, number in counts.items()]
        yield from ("", TITLES[table], *lines)


def report(statistics: Statistics) -> str:
    """Return the counts as a text."""
    return "\n".join([f"{statistics.rows:,} rows", *table_lines(statistics)]) + "\n"


LONGEST_NAME = 24


def figures() -> ModuleType:
    """Return matplotlib's figures; call it before any work is done too.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib.figure
    except ImportError as error:
        raise ConfigError("A plot needs matplotlib, which is not installed: pip install vgr_trl[plots].") from error
    return matplotlib.figure


def plot(statistics: Mapping[str, Statistics], path: Path) -> None:
    """Draw the counts of one or more splits to `path`, a panel for each table and a colour for each split."""
    added: dict[str, Any] = {name: sum((getattr(of, name) for of in statistics.values()), Counter()) for name in TITLES}
    shown = tables(Statistics(**added))
    heights = [0.75 + 0.2 * len(names) * (len(statistics) + 0.6) for names in shown.values()]  # inches
    figure = figures().Figure(figsize=(9, sum(heights)), layout="constrained")
    panels = figure.subplots(len(shown), 1, height_ratios=heights, squeeze=False)[:, 0]
    for panel, (table, names) in zip(panels, shown.items(), strict=True):
        height = 0.8 / len(statistics)
        for number, (split, of) in enumerate(statistics.items()):
            counts = {name: getattr(of, table)[name] for name in names if name != OTHERS}
            if OTHERS in names:
                counts[OTHERS] = getattr(of, table).total() - sum(counts.values())
            places = [place + (number - (len(statistics) - 1) / 2) * height for place in range(len(names))]
            bars = panel.barh(places, list(counts.values()), height, label=split)
            panel.bar_label(bars, [f"{value:,}" for value in counts.values()], padding=3, fontsize="small")
        panel.set_yticks(range(len(names)), [name[:LONGEST_NAME].replace("$", r"\$") for name in names])
        panel.invert_yaxis()
        panel.margins(x=0.12)
        panel.set_title(TITLES[table], loc="left", fontweight="bold")
        panel.spines[["top", "right"]].set_visible(False)
    if len(statistics) > 1:
        panels[0].legend(frameon=False, loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
