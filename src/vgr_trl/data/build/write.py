"""Rows of the schema as files: Parquet with images inside, or JSONL with paths of images.

Each file is written row group by row group under another name and gets its own name when it is whole.
"""

import hashlib
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from vgr_trl.data.build.encode import Encoded
from vgr_trl.data.rows.questions import Question
from vgr_trl.files import publish, sync_files, unfinished

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
