"""Images and files of rows, as the published sets have them."""

import io
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow
import pyarrow.parquet
from datasets import Dataset, Features, List, Value
from datasets import Image as ImageFeature
from PIL import Image

from vgr_trl.cli.arguments import DataArguments, load_rows
from vgr_trl.data.convert import CONVERTERS, SCHEMA, SKIPPED, Rules, convert_rows, prepare_folder, write_rows
from vgr_trl.data.images import images_of
from vgr_trl.data.load import load_split
from vgr_trl.data.read_row import undecoded
from vgr_trl.demo.tiny_model import build_processor

IMAGE = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])


def picture(colour: Any = (200, 30, 40), size: tuple[int, int] = (12, 8)) -> dict[str, Any]:
    return {"bytes": encoded(Image.new("RGB", size, colour)), "path": None}


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def parquet(path: Path, rows: list[dict[str, Any]], types: dict[str, Any] | None = None) -> Path:
    """Write rows whose columns have the given Arrow types, images and texts being known."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    known = {name: IMAGE for name in names if name.startswith("image") and name not in ("image_id", "images")}
    columns = {name: [row.get(name) for row in rows] for name in names}
    arrays = {
        name: pyarrow.array(values, type=(types or {}).get(name, known.get(name))) for name, values in columns.items()
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table(arrays), path)
    return path


def jsonl(path: Path, rows: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def converted(name: str, rows: Any, **rules: Any) -> tuple[list[dict[str, Any]], list[tuple[int, str]]]:
    """The rows that a converter makes of published ones, and why it leaves others out, by place."""
    rows = rows if isinstance(rows, Dataset) else load_split("train", data_files={"train": [rows]})
    columns = [column for column in SCHEMA if column != "image"]
    with TemporaryDirectory() as working:
        made = convert_rows(rows, Rules(CONVERTERS[name], "train.parquet", **rules), columns, Path(working), workers=0)
        made = list(undecoded(made))
    usable = [row for row in made if row["__reason__"] is None]
    return usable, [(row["__row__"], row["__reason__"]) for row in made if row["__reason__"] is not None]


def written(rows: list[dict[str, Any]], folder: Path, columns: tuple[str, ...] = ("image",)) -> str:
    features = features_of(rows)
    table = Dataset.from_list([{name: row.get(name) for name in features} for row in rows], features=features)
    names = [name for name in SCHEMA if name in columns or name in ("id", "source", "problem", "solution", "choices")]
    with prepare_folder(folder, []) as working:
        made = convert_rows(table, Rules(CONVERTERS["jsonl"], "made"), names, working, workers=0)
        usable = [place for place, reason in enumerate(made["__reason__"]) if reason is None]
        return write_rows(made, {"train": usable}, names, Path(working), folder)


def features_of(rows: list[dict[str, Any]]) -> Features:
    image = ImageFeature(decode=False)
    names = list(dict.fromkeys(name for row in rows for name in row))
    known = {"images": List(image), "choices": List(Value("string")), "regions": List(List(Value("float32")))}
    return Features({name: known.get(name, Value("string")) for name in names})


def rows_in(folder: Path, split: str = "train") -> list[dict[str, Any]]:
    files = sorted(folder.glob(f"{split}-*.parquet"))
    return [row for file in files for row in pyarrow.parquet.read_table(file).to_pylist()]


def loaded(split: str = "train", **flags: Any) -> tuple[list[dict[str, Any]], dict[int, str]]:
    """The rows that training can use of the data that flags name, and by place why it leaves the others out."""
    heard: list[Any] = []
    more = {"on_skipped": heard.append, "processor": lambda: build_processor([])}
    rows, skipped = load_rows(DataArguments(**flags), split, needs_solution=True, limit=None, **more)
    rows = list(rows)  # a stream hears of the others meanwhile
    return rows, {row.row: row.reason for row in [*skipped, *heard]}


def corners(row: dict[str, Any]) -> list[Any]:
    return [image.getpixel((0, 0)) for image in images_of(row)]


def skipped_in(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / SKIPPED).read_text(encoding="utf-8").splitlines()]
