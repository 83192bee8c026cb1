"""Write files completely or not at all, and name the file when the disk is full."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from traceback import format_exception

from vgr_trl.errors import DiskFullError, VGRError

# Messages of the system, of PyTorch's archive writer (which hides the system's) and of safetensors.
_DISK_FULL = "No space left", "Disk quota exceeded", "StreamWriter failed writing", "unexpected pos", "os error 28"


def is_disk_full(error: BaseException) -> bool:
    """Return whether an error, or an error that caused it, comes from a full disk or quota."""
    messages = "".join(format_exception(error, limit=0))
    return any(text in messages for text in _DISK_FULL)


@contextmanager
def naming_full_disk(target: str | Path, cure: str = "free space there") -> Iterator[None]:
    """Convert the errors of a full disk into a `DiskFullError` that names the file, or else `target`.

    Args:
        target: the file being written, or the folder of the files.
        cure: advice that ends the message.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, VGRError) or not is_disk_full(error):
            raise
        path = (error.filename if isinstance(error, OSError) else None) or target
        raise DiskFullError(f"Disk full while writing {path}: {cure}.") from error


def unfinished(path: Path) -> Path:
    """Return the temporary name of an unfinished file; readers of folders skip such names."""
    return path.with_name(f".{path.name}.unfinished")


def publish(temporary: Path, path: Path) -> None:
    """Rename an unfinished file to `path` once its bytes are on the disk."""
    _sync(temporary)
    temporary.replace(path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    """Wait until the bytes of a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(path: Path, data: bytes, sync: bool = True) -> None:
    """Write a file completely or not at all; create missing folders. The last of several processes wins.

    Args:
        path: path of the file.
        data: content of the file.
        sync: wait until the file is on the disk, so that no later write can reach the disk before it.

    Raises:
        DiskFullError: the disk is full; the error names the file.
    """
    temporary = unfinished(path.with_name(f"{path.name}.{token_hex(4)}"))
    try:
        with naming_full_disk(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(data)
            publish(temporary, path) if sync else temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def append_atomic(path: Path, data: bytes, head: bytes = b"") -> None:
    """Append to a file completely or not at all; create missing folders.

    Args:
        path: path of the file.
        data: appended bytes.
        head: written before `data` if the file is empty.

    Raises:
        DiskFullError: the disk is full; the error names the file.
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
