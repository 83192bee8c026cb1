"""Write files at once or not at all, and name the file when the disk is full."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from vgr_trl.errors import DiskFullError, VGRError

# The words of the system, of PyTorch's writer of archives (which hides those) and of safetensors.
_DISK_FULL = "No space left", "Disk quota exceeded", "StreamWriter failed writing", "unexpected pos", "os error 28"


def is_disk_full(error: BaseException | None) -> bool:
    """Whether an error, or one that led to it, comes from a disk or a quota that is full."""
    while error is not None and not any(text in str(error) for text in _DISK_FULL):
        error = error.__cause__ or error.__context__
    return error is not None


@contextmanager
def naming_full_disk(target: str | Path, cure: str = "free space there") -> Iterator[None]:
    """Turn what is raised when the disk is full into a `DiskFullError` that names the file, or else `target`.

    Args:
        target: the file that is written, or the folder of the files.
        cure: what to do, the end of the sentence.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, VGRError) or not is_disk_full(error):
            raise
        path = getattr(error, "filename", None) or target
        raise DiskFullError(f"Disk full while writing {path}: {cure}.") from error


def unfinished(path: Path) -> Path:
    """Return the name under which `path` is written until it is whole; readers of folders pass over such names."""
    return path.with_name(f".{path.name}.unfinished")


def publish(path: Path) -> None:
    """Give the file at `unfinished(path)` its name, once its bytes are on the disk."""
    _sync(unfinished(path))
    unfinished(path).replace(path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    """Wait until the bytes of a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(path: Path, data: bytes, sync: bool = True) -> None:
    """Write `data` to `path`, which is replaced at once or not at all.

    Args:
        path: whose folder is there.
        data: all of it.
        sync: wait until it is on the disk, as nothing written after it can be there before.

    Raises:
        DiskFullError: naming the file.
    """
    try:
        with naming_full_disk(path):
            unfinished(path).write_bytes(data)
            publish(path) if sync else unfinished(path).replace(path)
    finally:
        unfinished(path).unlink(missing_ok=True)


def append_atomic(path: Path, data: bytes, head: bytes = b"") -> None:
    """Append all of `data` to `path`, or nothing if that fails; a missing folder is made.

    Args:
        path: of the file.
        data: all of it.
        head: what stands in front of it in a file that is empty.

    Raises:
        DiskFullError: naming the file.
    """
    with naming_full_disk(path), ExitStack() as opened:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = opened.enter_context(path.open("ab", buffering=0))
        end = file.seek(0, os.SEEK_END)
        rest = memoryview(data if end else head + data)
        try:
            while rest:
                rest = rest[file.write(rest) :]
        except OSError:
            with suppress(OSError):
                file.truncate(end)
            raise


def is_writable(path: Path) -> bool:
    """Return whether a file could be written to `path`, whose folder may be missing yet."""
    if path.is_dir():
        return False
    folder = next(folder for folder in path.absolute().parents if folder.exists())
    return folder.is_dir() and os.access(folder, os.W_OK)
