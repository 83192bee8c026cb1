"""Convert rows to one schema, with encoded images, and write them as Parquet."""

import hashlib
import io
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

from datasets import Dataset, Features, List, Value
from datasets import Image as ImageFeature
from PIL import Image

from vgr_trl.boxes import BOX_COLUMNS, boxes_of, to_shares
from vgr_trl.data.checked_rows import REASON
from vgr_trl.data.images import ImageLimits, image_bytes, image_size, path_within, read_image, to_rgb
from vgr_trl.data.inspect import report
from vgr_trl.data.lengths import SIZES
from vgr_trl.data.load import readable, row_files
from vgr_trl.data.public_sets import Converter
from vgr_trl.data.read_row import KEYS, UNREADABLE, Keys, read_row, reason_of, renamed_row, text_of, undecoded, value_of
from vgr_trl.errors import ConfigError, DataError, RewardError
from vgr_trl.rewards.answers import LETTERS, resolve_solution

KEPT = ("JPEG", "PNG", "WEBP")  # formats whose files are stored as they are
ENCODING: dict[str, dict[str, Any]] = {"JPEG": {"quality": 95, "subsampling": 0}, "PNG": {"compress_level": 3}}
ROWS_PER_FILE = 2000
ROW_GROUP_ROWS = 100  # rows that a stream reads at a time
REPORT, SKIPPED = "report.txt", "skipped.jsonl"
DIGESTS, ROW = "__digests__", "__row__"
SCHEMA = Features(
    {name: Value("string") for name in ("id", "source", "problem", "solution")}
    | {"choices": List(Value("string")), "image": ImageFeature(), "images": List(ImageFeature())}
    | {"videos": List(Value("string")), "regions": List(List(Value("float32")))}
)
ABOUT = {REASON: Value("string"), "file": Value("string"), ROW: Value("int64")}
ABOUT |= {SIZES: List(List(Value("int32"))), DIGESTS: List(Value("string"))}


@dataclass(frozen=True)
class Rules:
    """Rules for reading and converting the rows of a set, which messages and ids call `file`."""

    converter: Converter
    file: str
    keys: Keys = field(default_factory=lambda: KEYS)
    root: Path = Path()  # relative image and video paths start here and may not leave it
    limits: ImageLimits = field(default_factory=ImageLimits)
    ids: frozenset[str] | None = None  # of the rows to convert; None: all
    most: int | None = None  # usable rows to convert; None: all
    hashes: bool = False  # whether to hash pixels and video files


def columns_of(sets: Sequence[tuple[Dataset, Rules]], several_images: bool) -> list[str]:
    """Return the columns of converted rows of all sets, as `datasets` loads only splits with the same columns."""
    names = {name for rows, _ in sets for name in rows.column_names}
    has_videos = not names.isdisjoint(name for _, rules in sets for name in rules.keys["video"])
    has_boxes = not names.isdisjoint(BOX_COLUMNS) or any(rules.converter.regions for _, rules in sets)
    has = {"image": not several_images, "images": several_images, "videos": has_videos, "regions": has_boxes}
    return [name for name in SCHEMA if has.get(name, True)]


def has_one_image(rows: Dataset) -> bool:
    """Return whether the columns show that each row has at most one image."""
    names = {name for name in rows.column_names if name.startswith("image")}
    return names == {"image"} and isinstance(rows.features["image"], ImageFeature | Value)


def convert_rows(rows: Dataset, rules: Rules, columns: Sequence[str], folder: str | Path, workers: int) -> Dataset:
    """Return the rows with columns of the schema, or with the `REASON` why they cannot be used.

    Args:
        rows: of a set.
        rules: of the set.
        columns: of the schema.
        folder: for temporary files.
        workers: processes that decode images; 0: this process.

    Raises:
        DataError: no row has one of the ids, or the source cannot be read.
    """
    features = Features({name: SCHEMA[name] for name in columns} | ABOUT)
    places: Sequence[int] = list(range(len(rows)))
    column = next((name for name in (rules.converter.id_column, "id") if name in rows.column_names), None)
    if rules.ids is not None and column is not None:
        places = [place for place, name in enumerate(rows[column]) if str(name) in rules.ids]
    if not places:
        raise DataError(f"None of the ids is in {rules.file}: check the file of ids.")
    if rules.most is not None:  # the usable rows are counted, so one process gets all; only lists are divided
        workers, places = 0, tuple(places)
    given = {"rows": undecoded(rows), "rules": rules, "columns": tuple(features), "places": places}
    options = {"cache_dir": str(folder), "fingerprint": rows._fingerprint, "num_proc": workers or None}
    with readable(rules.file, "the source"):
        return cast("Dataset", Dataset.from_generator(_convert, features, gen_kwargs=given, **options))


def _convert(places: Sequence[int], rows: Dataset, rules: Rules, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the questions of the rows with these numbers, or the reason why a row has none."""
    usable = 0
    for place in places:
        row = renamed_row(rows[place], rules.keys)
        try:
            parts = [row] if row.get(UNREADABLE) is not None else list(rules.converter.rows(row))
        except (DataError, RewardError) as error:
            parts = [{UNREADABLE: reason_of(error)}]
        for part in parts:
            name = value_of({**row, **part}, rules.converter.id_column, "id")
            name = f"{Path(rules.file).name}-{place}" if name in (None, "") else str(name)
            if rules.ids is not None and name not in rules.ids:
                continue
            try:
                made = to_schema(part, rules)
            except (DataError, RewardError) as error:
                made = {REASON: reason_of(error)}
            made |= {"id": name, "file": rules.file, ROW: place}
            yield {column: made.get(column) for column in columns}
            usable += REASON not in made
            if usable == rules.most:
                return


def to_schema(row: Mapping[str, Any], rules: Rules) -> dict[str, Any]:
    """Convert a row that `read_row` understands to the schema, or raise `DataError` or `RewardError`."""
    question, root = read_row(row), rules.root
    prompt: Any = question.prompt
    if not isinstance(prompt, str) and (len(prompt) != 1 or prompt[0]["role"] != "user"):
        raise DataError("its prompt is a conversation: a converted row has a text, or one message of the user")
    problem = text_of({"content": prompt} if isinstance(prompt, str) else prompt[0], "content")
    count, right = len(question.images), question.right
    if count != 1 and not rules.converter.several_images:
        raise DataError(f"it has {count} images, where one is expected")
    boxes = boxes_of(row, image_size(question.images[0], root), "it") if count == 1 else []
    videos = [_video_path(value, root) for value in question.videos]
    encoded = [encode_image(value, root, rules.limits) for value in question.images]
    files = [{"bytes": data, "path": None} for data, _ in encoded]
    contents = [f"{image.size} ".encode() + image.tobytes() for _, image in encoded if rules.hashes]
    contents += [Path(path).read_bytes() for path in videos if rules.hashes]
    assert right is not None
    solution = right.text if right.index is None else LETTERS[right.index]
    if right.others:
        solution = json.dumps([each.text for each in (right, *right.others)], ensure_ascii=False)
    elif right.index is not None:
        resolve_solution(solution, right.choices or None)  # beside the options, its letter may be ambiguous
    return {
        "source": row["source"] if isinstance(row.get("source"), str) else Path(rules.file).stem,
        "problem": problem.strip(),
        "solution": solution,
        "choices": [choice.strip() for choice in right.choices] or None,
        "image": files[0] if count == 1 else None,
        "images": files,
        "videos": videos,
        "regions": to_shares(boxes),
        SIZES: [image.size for _, image in encoded],
        DIGESTS: [hashlib.sha256(content).hexdigest() for content in contents],
    }


def _video_path(value: Any, root: Path) -> str:
    path = path_within(root, str(value.get("path") if isinstance(value, Mapping) else value)).absolute()
    if not os.path.isfile(path):  # Path.is_file raises for a name that is too long
        raise DataError(f"video file {str(path)[:200]} does not exist")
    return str(path)


def encode_image(value: Any, root: Path, limits: ImageLimits) -> tuple[bytes, Image.Image]:
    """Return an image as a file and as pixels, upright, as RGB and within the limits.

    The file of an image that needs no change keeps its bytes. A changed JPEG is written as JPEG of quality 95 without
    subsampling, any other changed image as PNG.

    Args:
        value: an image, a path, or a dict with `bytes` or `path`.
        root: folder that a relative path starts from.
        limits: of the size.

    Raises:
        DataError: the image cannot be used; the message is the reason.
    """
    data = b"" if isinstance(value, Image.Image) else image_bytes(value, root)
    opened = read_image({"bytes": data} if data else value, root)
    image = limits.fitted(to_rgb(opened))
    if data and image is opened and opened.format in KEPT and getattr(opened, "n_frames", 1) == 1:
        return data, image
    kind, buffer = "JPEG" if opened.format in ("JPEG", "MPO") else "PNG", io.BytesIO()
    # Without the original's colour profile and metadata.
    Image.frombytes("RGB", image.size, image.tobytes()).save(buffer, kind, **ENCODING[kind])
    return buffer.getvalue(), image


def prepare_folder(folder: Path, read: Sequence[str | None]) -> TemporaryDirectory[str]:
    """Return a new temporary folder in the output folder of a command that reads the folders `read`.

    Raises:
        ConfigError: `folder` lies in one of them, or holds rows that neither `convert` nor `merge` has written.
    """
    for source in read:
        if source and Path(source).is_dir() and folder.resolve().is_relative_to(Path(source).resolve()):
            raise ConfigError(f"output_dir {folder} is in {source}, which is read: choose another folder.")
    for file in row_files(folder):
        is_named_so = re.fullmatch(r"\w+-\d{5}\.parquet", str(file.relative_to(folder)))
        if not is_named_so or not (folder / REPORT).exists():
            raise ConfigError(f"{folder} holds {file.name}, which this command did not write: choose another folder.")
    folder.mkdir(parents=True, exist_ok=True)
    return TemporaryDirectory(prefix=".unfinished-", dir=folder)


def write_rows(rows: Dataset, sides: Mapping[str, Sequence[int]], columns: list[str], working: Path) -> str:
    """Write the rows of each split in place of an earlier result, and return the report.

    Args:
        rows: converted rows.
        sides: split → numbers of its rows.
        columns: of the written rows.
        working: folder for unfinished files, which are moved to its parent when all are complete.

    Raises:
        DataError: no row is usable.
    """
    about = rows.select_columns(["source", "solution", "choices", SIZES, REASON, "file", ROW])
    left_out, folder = [row for row in about if row[REASON] is not None], working.parent
    mode = "a" if any(file.name.split("-")[0] not in sides for file in row_files(folder)) else "w"
    with (folder / SKIPPED).open(mode, encoding="utf-8") as log:
        for row in left_out:
            log.write(json.dumps({"file": row["file"], "row": row[ROW], "reason": row[REASON]}) + "\n")
    if not any(sides.values()):
        first = left_out[0][REASON] if left_out else "there are none"
        raise DataError(f"None of the {len(rows)} rows can be used; the first: {first}. {log.name} lists them all.")
    used = {split: side for split, side in sides.items() if side}
    texts = [f"{split}: {len(side):,} rows\n{report(about.select(side))}\n" for split, side in used.items()]
    text = "\n".join([*texts, report(left_out)])
    for split, side in sides.items():
        for number, start in enumerate(range(0, len(side), ROWS_PER_FILE)):
            part = rows.select(side[start : start + ROWS_PER_FILE]).select_columns(columns)
            path = working / f"{split}-{number:05d}.parquet"
            part.to_parquet(path, batch_size=ROW_GROUP_ROWS, write_page_checksum=True)  # verified when it is loaded
    with (folder / REPORT).open(mode, encoding="utf-8") as file:
        file.write(text)
    for path in (path for split in sides for path in folder.glob(f"{split}-*.parquet")):
        path.unlink()
    for path in working.glob("*.parquet"):
        path.replace(folder / path.name)
    return text
