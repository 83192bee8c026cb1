"""Convert rows to one schema: questions with their images encoded, written as Parquet, and counted.

Converted rows have `id`, `source`, `problem`, `choices` (2 to 10 texts, or none for an open question), `solution` (the
letter of the right option, else a text) and `image`, or `images` where a set has questions about several; `videos` has
paths, `regions` boxes where a set says what a question is about: left, top, width and height as shares of the image.
"""

import hashlib
import io
import json
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

import pyarrow.compute
import pyarrow.parquet
from datasets import Dataset, Features, List, Value, concatenate_datasets
from datasets import Image as ImageFeature
from PIL import Image

from vgr_trl.boxes import boxes_of, to_shares
from vgr_trl.data.counts import Counts, count_row, kind_of, power_class
from vgr_trl.data.images import (
    ADDRESS,
    ImageLimits,
    image_bytes,
    image_size,
    path_within,
    read_image,
    to_rgb,
)
from vgr_trl.data.lengths import SIZES
from vgr_trl.data.load import row_files
from vgr_trl.data.prompts import LETTERS
from vgr_trl.data.public_sets import Converter
from vgr_trl.data.read_row import KEYS, UNREADABLE, Keys, read_row, renamed_row, text_of, undecoded, value_of
from vgr_trl.data.rows import REASON
from vgr_trl.rewards.answers import Solution, resolve_solution
from vgr_trl.utils import ConfigError, DataError, RewardError, publish, unfinished, write_atomic

KEPT = ("JPEG", "PNG", "WEBP")  # formats that are stored as they are
ENCODING: dict[str, dict[str, Any]] = {"JPEG": {"quality": 95, "subsampling": 0}, "PNG": {"compress_level": 3}}
ROWS_PER_FILE = 2000
ROWS_IN_MEMORY = 16  # of each process
ROW_GROUP_ROWS = 100  # what a stream reads at a time
SKIPPED = "skipped.jsonl"
DIGESTS, ROW = "__digests__", "__row__"
TEXTS = {name: Value("string") for name in ("id", "source", "problem", "solution")} | {"choices": List(Value("string"))}
BOXES = List(List(Value("float32")))
FEATURES = Features(
    TEXTS
    | {"images": List(ImageFeature(decode=False)), "videos": List(Value("string")), "regions": BOXES}
    | {REASON: Value("string"), ROW: Value("int64"), "file": Value("string")}
    | {SIZES: List(List(Value("int32"))), DIGESTS: List(Value("string"))}
)


@dataclass(frozen=True)
class Rules:
    """Rules for converting rows.

    Attributes:
        converter: of the set.
        file: what the rows come from, for messages and ids.
        keys: names of the columns.
        root: folder that relative paths of images start from, and that none leads out of.
        limits: of the images' sizes.
    """

    converter: Converter
    file: str
    keys: Keys = KEYS
    root: Path = Path()
    limits: ImageLimits = field(default_factory=ImageLimits)


def convert_rows(rows: Dataset, rules: Rules, folder: Path, workers: int = 2) -> Dataset:
    """Return the rows in the schema, with undecoded images, pixel digests and sizes; or `REASON` why one is none.

    Args:
        folder: for files that the result lies in.
        workers: processes that decode images; 0: none beside this one.
    """
    return undecoded(rows).map(
        partial(_converted, rules=rules),
        batched=True,
        batch_size=ROWS_IN_MEMORY,
        writer_batch_size=ROWS_IN_MEMORY,
        with_indices=True,
        remove_columns=rows.column_names,
        features=FEATURES,
        num_proc=workers or None,
        cache_file_name=str(folder / "converted.arrow"),
        load_from_cache_file=False,
        desc=f"Converting {Path(rules.file).name}",
    )


def convert_subset(
    rows: Dataset, rules: Rules, folder: Path, workers: int, ids: set[str] | None, most: int | None
) -> Dataset:
    """Convert the rows with the given ids, and no more rows than it takes to get `most` usable ones.

    Args:
        ids: None: all.
        most: usable rows after which to stop; None: all.
    """
    rows = rows.add_column(ROW, range(len(rows)))
    column = next((name for name in (rules.converter.id_column, "id") if name in rows.column_names), None)
    if ids is not None and column is not None:
        rows = rows.select([place for place, name in enumerate(rows[column]) if str(name) in ids])
    if not len(rows):
        raise DataError(f"None of the ids is in {rules.file}: check the file of ids.")
    parts, start, step = list[Dataset](), 0, most or len(rows)
    while not parts or (start < len(rows) and (most or 0) > sum(part[REASON].count(None) for part in parts)):
        folder = Path(mkdtemp(dir=folder))
        parts.append(convert_rows(rows.select(range(start, min(start + step, len(rows)))), rules, folder, workers))
        start += step
    made = concatenate_datasets(parts)
    chosen, usable = list[int](), 0
    for place, (name, reason) in enumerate(zip(made["id"], made[REASON], strict=True)):
        if usable != most and (ids is None or name is None or name in ids):
            chosen.append(place)
            usable += reason is None
    return made.select(chosen)


def _converted(batch: Mapping[str, list[Any]], places: list[int], rules: Rules) -> dict[str, list[Any]]:
    made = []
    for place, values in zip(places, zip(*batch.values(), strict=True), strict=True):
        row = dict(zip(batch, values, strict=True))
        place = row.pop(ROW, place)  # in the source, of which these may be some rows
        about = {ROW: place, "file": rules.file}
        for found in _questions(row, place, rules):
            empty: dict[str, Any] = dict.fromkeys(FEATURES)
            made.append(empty | about | ({REASON: found} if isinstance(found, str) else found))
    return {name: [row[name] for row in made] for name in FEATURES}


def _questions(row: Mapping[str, Any], place: int, rules: Rules) -> Iterator[dict[str, Any] | str]:
    """Yield the questions of a published row in the schema, or why it asks none."""
    if row.get(UNREADABLE) is not None:
        yield str(row[UNREADABLE])
        return
    try:
        parts: list[Any] = list(rules.converter.rows(renamed_row(row, rules.keys)))
    except (DataError, RewardError) as error:
        parts = [str(error).rstrip(".")]
    for part in parts:
        try:
            yield part if isinstance(part, str) else to_schema(part, place, rules)
        except (DataError, RewardError) as error:
            yield str(error).rstrip(".")


def to_schema(row: Mapping[str, Any], place: int, rules: Rules) -> dict[str, Any]:
    """Return a row that `read_row` understands in the schema; raise `DataError` or `RewardError` with the reason."""
    question, converter = read_row(row), rules.converter
    if isinstance(question, str):
        raise DataError(question)
    problem: Any = question.prompt
    if not isinstance(problem, str):
        if len(problem) != 1 or problem[0]["role"] != "user":
            raise DataError("its prompt is a conversation: a converted row has a text, or one message of the user")
        problem = text_of(problem[0], "content")
    images, videos = ([_full_path(value, rules.root) for value in of] for of in (question.images, question.videos))
    for video in videos:
        if not isinstance(video, str) or not os.path.isfile(video):  # Path.is_file raises for a name that is too long
            raise DataError(f"video file {str(video)[:200]} does not exist")
    if not converter.several_images and not images:
        raise DataError("it has no image")
    if not converter.several_images and len(images) != 1:
        raise DataError(f"it has {len(images)} images, where one is expected")
    if not problem.strip():
        raise DataError("its question is empty")
    size_of = partial(image_size, root=rules.root, max_image_pixels=rules.limits.max_image_pixels)
    boxes = to_shares(boxes_of(row, size_of(images[0]))) if len(images) == 1 else []
    encoded = [encode_image(value, rules.root, rules.limits) for value in images]
    source = row["source"] if isinstance(row.get("source"), str) else Path(rules.file).stem
    assert question.right is not None
    solution, choices = _solution(question.right)
    return {
        "id": _id(row, place, rules),
        "source": source,
        "problem": problem.strip(),
        "solution": solution,
        "choices": choices,
        "images": [{"bytes": image.data, "path": None} for image in encoded],
        "videos": videos,
        "regions": boxes,
        SIZES: [(image.width, image.height) for image in encoded],
        DIGESTS: [image.digest for image in encoded],
    }


def _solution(resolved: Solution) -> tuple[str, list[str] | None]:
    """Return the letter of the right option, or the text, as JSON where several are accepted; and the options."""
    solution = resolved.text if resolved.index is None else LETTERS[resolved.index]
    if resolved.others:
        solution = json.dumps([each.text for each in (resolved, *resolved.others)], ensure_ascii=False)
    elif resolved.index is not None:
        resolve_solution(solution, resolved.choices or None)  # in the form that training is going to read
    return solution, [choice.strip() for choice in resolved.choices] or None


def _id(row: Mapping[str, Any], place: int, rules: Rules) -> str:
    value = value_of(row, rules.converter.id_column, "id")
    is_one = isinstance(value, str | int) and not isinstance(value, bool) and value != ""
    return str(value) if is_one else f"{Path(rules.file).name}-{place}"


def _full_path(value: Any, root: Path) -> Any:
    """Return a file of a row, as a full path where it is a path, or raise `DataError` if that leads out of `root`."""
    if isinstance(value, Mapping) and value.get("bytes") is None:
        value = value.get("path")
    is_path = isinstance(value, str) and value and not ADDRESS.match(value)
    return str(path_within(root, value).absolute()) if is_path else value


@dataclass(frozen=True)
class Encoded:
    """An image file: its bytes, its size in pixels, and a hash of its pixels, the same in any lossless format."""

    data: bytes
    width: int
    height: int
    digest: str


def encode_image(value: Any, root: Path, limits: ImageLimits) -> Encoded:
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
    return Encoded(data, *size, hashlib.sha256(f"{size} ".encode() + image.tobytes()).hexdigest())


# Writing


@dataclass(frozen=True)
class Output:
    """Output of a conversion: `SPLIT-00000.parquet`, … and `skipped.jsonl` in `folder`.

    Attributes:
        identity: what the rows depend on, as JSON; a split that is finished with the same identity is not made again.
    """

    folder: Path
    identity: Mapping[str, Any]
    rows_per_file: int = ROWS_PER_FILE


@contextmanager
def working_folder(output: Output) -> Iterator[Path]:
    """Give a folder for files that are large and not the result; it is removed."""
    output.folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".unfinished-", dir=output.folder) as folder:
        yield Path(folder)


def write_split(rows: Dataset, split: str, output: Output, columns: Sequence[str]) -> None:
    """Write the rows without a `REASON` as files that appear when all are complete, and list the others.

    Args:
        rows: of `convert_rows`.
        columns: `image` (every row has one) or `images`, and those of `videos` and `regions` to write. All splits of a
            set need the same, or `datasets` refuses to load them together.

    Raises:
        DataError: no row is left.
    """
    reasons, log = list(rows[REASON]), output.folder / SKIPPED
    about = rows.select_columns(["file", ROW, REASON])
    lines = [json.dumps({"file": row["file"], "row": row[ROW], "reason": row[REASON]})
             for row in about if row[REASON] is not None]  # fmt: skip
    kept = log.read_text(encoding="utf-8") if log.exists() and set(_records(output.folder)) - {split} else ""
    text = kept + "".join(f"{line}\n" for line in lines)
    usable = rows.select([place for place, reason in enumerate(reasons) if reason is None])
    counts = count_rows(rows)
    if not len(usable):
        write_atomic(log, text.encode())
        reason, number = next(iter(counts["reasons"].most_common(1)), ("the source has no rows that are asked for", 0))
        raise DataError(f"None of the {len(rows)} rows can be used; {number} because: {reason}. {log} lists them all.")
    starts = range(0, len(usable), output.rows_per_file)
    paths = [output.folder / f"{split}-{number:05d}.parquet" for number in range(len(starts))]
    try:
        for start, path in zip(starts, paths, strict=True):
            part = usable.select(range(start, min(start + output.rows_per_file, len(usable))))
            _write(unfinished(path), part, [*TEXTS, *columns])
        write_atomic(log, text.encode())
        for path in paths:
            publish(path)
    finally:
        for path in paths:
            unfinished(path).unlink(missing_ok=True)
    record = {"identity": output.identity, "files": len(paths), "counts": counts}
    write_atomic(output.folder / f".{split}.converted.json", json.dumps(record, default=str).encode())


def _write(path: Path, rows: Dataset, columns: list[str]) -> None:
    """Write rows with their images inside, uncompressed, as images are compressed already."""
    types = {**FEATURES, "image": ImageFeature(), "images": List(ImageFeature())}
    schema = Features({name: types[name] for name in columns}).arrow_schema
    options = {"compression": "none", "write_statistics": False, "write_page_checksum": True}
    with pyarrow.parquet.ParquetWriter(path, schema, use_dictionary=["source", "solution"], **options) as writer:
        for table in rows.with_format("arrow").iter(ROW_GROUP_ROWS):
            if "image" in columns:
                table = table.append_column("image", pyarrow.compute.list_flatten(table["images"]))
            writer.write_table(table.select(columns).cast(schema))


def finished(split: str, output: Output) -> bool:
    """Return whether an earlier call has finished a split; make the folder.

    Raises:
        ConfigError: it was made with other options, or the folder has other files of rows.
    """
    output.folder.mkdir(parents=True, exist_ok=True)
    records = _records(output.folder)
    if record := records.get(split):
        now = json.loads(json.dumps(output.identity, default=str))
        if names := [name for name in now if record["identity"].get(name) != now[name]]:
            held = f"{output.folder} holds a conversion with other {', '.join(names)}"
            raise ConfigError(f"{held}: choose another folder.")
        if len(list(output.folder.glob(f"{split}-*.parquet"))) == record["files"]:
            return True
    for file in row_files(output.folder):
        if not any(re.fullmatch(rf"{name}-\d+\.\w+", file.name) for name in records):
            found = f"{output.folder} has {file.name}, which no finished conversion made"
            raise ConfigError(f"{found}: choose another folder.")
    return False


def statistics_in(folder: Path) -> dict[str, Counts]:
    """Return what each finished split in `folder` consists of; `train` first."""
    records = sorted(_records(folder).items(), key=lambda record: record[0] != "train")
    return {split: {name: Counter(counts) for name, counts in record["counts"].items()} for split, record in records}


def _records(folder: Path) -> dict[str, Any]:
    return {path.name.split(".")[1]: json.loads(path.read_bytes()) for path in folder.glob(".*.converted.json")}


def count_rows(rows: Dataset) -> Counts:
    """Return what converted rows consist of, and why the others are left out."""
    counts: Counts = defaultdict(Counter)
    for row in rows.remove_columns(["images", "videos", "regions", DIGESTS]):
        if row[REASON] is not None:
            counts["reasons"][kind_of(row[REASON])] += 1
        else:
            count_row(counts, row["source"], row["choices"], len(row[SIZES]), row["solution"])
            counts["sizes"].update(power_class(min(size)) for size in row[SIZES])
    return counts
