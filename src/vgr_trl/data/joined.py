"""Public sets that lie in several tables: ArxivQA as VisRAG publishes it, joined row by row as conversion joins it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from datasets import Dataset, Features, Image, IterableDataset, List, Value

from vgr_trl.data.build.sets import arxivqa
from vgr_trl.data.read.sources import Source, has_config
from vgr_trl.data.rows.columns import UNREADABLE
from vgr_trl.errors import MissingSplitError

TABLES = ("corpus", "queries", "qrels")
FEATURES = Features(
    {
        **dict.fromkeys(("id", "source", "problem", "solution", UNREADABLE), Value("string")),
        "choices": List(Value("string")),
        "image": Image(decode=False),
    }
)


def joined_source(dataset_name: str | None, dataset_path: str | None, data_files: str | None) -> Source | None:
    """Return the source of ArxivQA that is named, None if another set is: by its hub name, or by its three tables."""
    if dataset_name == arxivqa.HUB_NAME:
        return Source(dataset_name=dataset_name)
    if dataset_path and Path(dataset_path).is_dir() and all(has_config(Path(dataset_path), name) for name in TABLES):
        return Source(dataset_path=dataset_path)
    parts = [part.strip() for part in (data_files or "").split(",")]
    if sorted(part.split("=")[0] for part in parts) == sorted(TABLES):
        return Source(data_files=parts)
    return None


def joined_rows(source: Source, split: str, streaming: bool) -> Dataset | IterableDataset:
    """Return the questions of ArxivQA with their figures; what is none has its reason in the column `UNREADABLE`.

    Raises:
        MissingSplitError: another split than `train` is asked for.
    """
    if split != "train":
        raise MissingSplitError(f"{source} has the splits ['train'], but not {split!r}: name one of them.")
    # The identity is given so that rows of older files are not found.
    made: Any = (IterableDataset if streaming else Dataset).from_generator(
        _rows, features=FEATURES, gen_kwargs={"source": source, "identity": tuple(map(str, source.identity().items()))}
    )
    return made


def _rows(source: Source, identity: Any) -> Iterator[dict[str, Any]]:
    blank = dict.fromkeys(FEATURES)
    for _, found in arxivqa.read(source):
        if isinstance(found, str):
            yield {**blank, UNREADABLE: found}
        else:
            kept = {name: getattr(found, name) for name in ("id", "source", "problem", "solution", "choices")}
            yield {**blank, **kept, "image": found.images[0]}
