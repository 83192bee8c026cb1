"""Images encoded by a few processes, in the order they were asked for, a bounded number of them at a time."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from vgr_trl.data.build.encode import Encoded, encode_image
from vgr_trl.data.rows.images.sizes import ImageLimits
from vgr_trl.errors import DataError
from vgr_trl.worker_processes import kill_workers, pool

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
