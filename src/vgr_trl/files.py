"""Files that are either whole or not there, whenever the process is killed."""

import os
from collections.abc import Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path

from vgr_trl.disk_full import disk_full_named


def unfinished(path: Path) -> Path:
    """Return the name under which `path` is written until it is whole; readers of folders pass over such names."""
    return path.with_name(f".{path.name}.unfinished")


def publish(path: Path) -> None:
    """Give the file at `unfinished(path)` its name, once its bytes are on the disk."""
    with unfinished(path).open("rb") as file:
        os.fsync(file.fileno())
    unfinished(path).replace(path)
    sync_folder(path.parent)


def write_whole(path: Path, data: bytes, sync: bool = True) -> None:
    """Write `data` to `path`, which is replaced at once or not at all.

    Args:
        path: whose folder is there.
        data: all of it.
        sync: wait until it is on the disk, as nothing written after it can be there before.

    Raises:
        DiskFullError: naming the file.
    """
    try:
        with disk_full_named(path):
            unfinished(path).write_bytes(data)
            if sync:
                publish(path)
            else:
                unfinished(path).replace(path)
    finally:
        unfinished(path).unlink(missing_ok=True)


def append_whole(path: Path, data: bytes, head: bytes = b"") -> None:
    """Append all of `data` to `path`, or nothing if that fails; a missing folder is made.

    Args:
        path: of the file.
        data: all of it.
        head: what stands in front of it in a file that is empty.

    Raises:
        DiskFullError: naming the file.
    """
    with disk_full_named(path), _opened(path) as file:
        end = file.seek(0, os.SEEK_END)
        rest = memoryview(data if end else head + data)
        try:
            while rest:
                rest = rest[file.write(rest) :]
        except OSError:
            with suppress(OSError):
                file.truncate(end)
            raise


def _opened(path: Path) -> FileIO:
    try:
        return path.open("ab", buffering=0)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("ab", buffering=0)


def is_writable(path: Path) -> bool:
    """Return whether a file could be written to `path`, whose folder may be missing yet."""
    if path.is_dir():
        return False
    folder = next(folder for folder in path.absolute().parents if folder.exists())
    return folder.is_dir() and os.access(folder, os.W_OK)


def sync_files(paths: Sequence[Path]) -> None:
    """Wait until files and their names are on the disk; all at once where the system can, which is much faster."""
    if hasattr(os, "sync"):
        if paths:
            os.sync()
        return
    for path in paths:
        with path.open("rb+") as file:
            os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the names in `folder` are on the disk, on systems where a folder can be waited for."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
