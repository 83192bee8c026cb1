"""Files that are either whole or not there, whenever the process is killed."""

import os
from collections.abc import Sequence
from pathlib import Path


def unfinished(path: Path) -> Path:
    """Return the name under which `path` is written until it is whole; readers of folders pass over such names."""
    return path.with_name(f".{path.name}.unfinished")


def publish(path: Path) -> None:
    """Give the file at `unfinished(path)` its name, once its bytes are on the disk."""
    with unfinished(path).open("rb") as file:
        os.fsync(file.fileno())
    unfinished(path).replace(path)
    sync_folder(path.parent)


def write_whole(path: Path, data: bytes) -> None:
    """Write `data` to `path`, which is replaced at once or not at all."""
    try:
        unfinished(path).write_bytes(data)
        publish(path)
    finally:
        unfinished(path).unlink(missing_ok=True)


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
