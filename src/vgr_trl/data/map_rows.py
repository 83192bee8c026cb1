"""Examine every row of a large data set in several processes, and cache the result."""

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import PIL
import pyarrow
from accelerate import PartialState
from datasets import Dataset, Features, config
from datasets.fingerprint import Hasher
from datasets.table import InMemoryTable
from datasets.utils import tqdm
from pyarrow import compute
from transformers.utils import logging
from xxhash import xxh3_128_digest

from vgr_trl.atomic_files import write_atomic
from vgr_trl.data.images import FOLDER, MEDIA, folder_of, images_of, videos_of
from vgr_trl.errors import error_text
from vgr_trl.processes import belong_to_parent

logger = logging.get_logger(__name__)

PARALLEL_FROM = 1000  # number of rows that are checked in several processes, with a cached result
READERS = (  # the files of this package that a cached result depends on
    "boxes.py", "data/*.py", "validate/data.py", "rewards/*.toml", "rewards/*.txt",
    *(f"rewards/{name}.py" for name in ("answers", "equality", "language", "phrases", "quantities")),
)  # fmt: skip
CHECKSUM = 16  # bytes at the end of a cached result
PART_ROWS = 100  # rows that a process examines at a time
MAX_PROCESSES = 16
_part_of_worker: list[Callable[[int], pyarrow.Table]] = []


def map_rows(
    dataset: Dataset,
    examine: Callable[[Mapping[str, Any]], dict[str, Any]],
    features: Features,
    key: Any,
    description: str,
    *,
    root: Path = Path(),
    in_parallel: bool = True,
) -> Dataset:
    """Return a data set with the result of `examine` for every row.

    From 1,000 rows on, the first process of each machine starts workers for it, and caches the result on disk. The
    workers end with this process even if it is killed, and leave no files, unlike those of `Dataset.map`.

    Args:
        dataset: the rows.
        examine: returns one value for each of `features`; JSON as a text.
        features: of the result.
        key: everything besides the rows and their files that the result depends on.
        description: for the progress bar.
        root: folder that relative paths of images and videos start from.
        in_parallel: whether `examine` may run in other processes.
    """

    def part(start: int) -> pyarrow.Table:
        rows = dataset.select(range(start, min(start + PART_ROWS, len(dataset))))
        return Dataset.from_list(list(map(examine, rows)), features=features).data.table

    if len(dataset) < PARALLEL_FROM:
        return Dataset.from_list(list(map(examine, dataset)), features=features)
    name = Hasher.hash([dataset._fingerprint, key, _code_hash(), _file_states(dataset, root)])
    path = Path(config.HF_DATASETS_CACHE) / "vgr_trl" / f"{name}.arrow"
    with PartialState().local_main_process_first():
        table = _cached(path)
        if table is None:
            starts = range(0, len(dataset), PART_ROWS)
            workers = min(MAX_PROCESSES, os.cpu_count() or 1)
            with ProcessPoolExecutor(workers, get_context("fork"), _start_worker, (part,)) as pool:  # starts on demand
                parts = pool.map(_run_part, starts) if in_parallel else map(part, starts)
                table = pyarrow.concat_tables(tqdm(parts, description, len(starts)))
            _keep(table, path)
        return Dataset(InMemoryTable(table), fingerprint=name)


def _start_worker(part: Callable[[int], pyarrow.Table]) -> None:
    belong_to_parent()
    _part_of_worker.append(part)


def _run_part(start: int) -> pyarrow.Table:
    return _part_of_worker[-1](start)


def _cached(path: Path) -> pyarrow.Table | None:
    """Return a cached result, or None if it is missing or its checksum is wrong."""
    with suppress(OSError), pyarrow.memory_map(str(path)) as file:
        content = file.read_buffer()
        if xxh3_128_digest(content[:-CHECKSUM]) == bytes(content[-CHECKSUM:]):
            return pyarrow.ipc.open_stream(content[:-CHECKSUM]).read_all()
    return None


def _keep(table: pyarrow.Table, path: Path) -> None:
    """Write a result and its checksum to the cache, or warn if the cache cannot be written."""
    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    content = sink.getvalue().to_pybytes()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, content + xxh3_128_digest(content))
    except OSError as error:
        hint = "the next start checks the rows again. Free space there, or set HF_DATASETS_CACHE to another folder"
        logger.warning(f"{path.parent} cannot be written ({error_text(error)}): {hint}.")


def _file_states(dataset: Dataset, root: Path) -> list[Any]:
    """Return the size and time of each file that the rows name, or None for a missing file."""
    names = [name for name in MEDIA if name in dataset.column_names and _names_files(dataset.data.column(name))]
    rows = dataset.select_columns([*names, *({FOLDER} & {*dataset.column_names})]).to_list()
    return [_file_state(value, folder_of(row, root)) for row in rows for value in (*images_of(row), *videos_of(row))]


def _names_files(column: Any) -> bool:
    """Return whether a column has paths without the bytes of the file."""
    if pyarrow.types.is_list(column.type):
        return _names_files(compute.list_flatten(column))
    if not pyarrow.types.is_struct(column.type):
        return not pyarrow.types.is_binary(column.type)
    if not {"bytes", "path"} <= {field.name for field in column.type}:
        return False
    data, path = (compute.struct_field(column, [name]) for name in ("bytes", "path"))
    return bool(compute.any(compute.and_(data.is_null(), path.is_valid())).as_py())


def _file_state(value: Any, folder: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(os.path.join(folder, value["path"] if isinstance(value, Mapping) else value))
        return found.st_size, found.st_ctime_ns  # changes with the permissions too
    except (OSError, ValueError, TypeError):  # not the path of a file
        return None


@cache
def _code_hash() -> str:
    """Hash the code that reads rows, answers and images, so that a new release does not load old results."""
    files = sorted(file for pattern in READERS for file in Path(__file__).parents[1].glob(pattern))
    return str(Hasher.hash([PIL.__version__, *(file.read_bytes() for file in files)]))
