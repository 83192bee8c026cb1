"""A full disk, which libraries report in many words, said in one sentence."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vgr_trl.errors import DiskFullError

# What libraries say that hide the error of the system: PyTorch's writer of archives, safetensors, pyarrow.
WORDS = (
    "PytorchStreamWriter failed writing",
    "unexpected pos",
    "No space left on device",
    "Disk quota exceeded",
    "os error 28",
)


def is_disk_full(error: BaseException | None) -> bool:
    """Whether an error, or one that led to it, comes from a disk or a quota that is full."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if any(words in str(error) for words in WORDS):
            return True
        error = error.__cause__ or error.__context__
    return False


@contextmanager
def disk_full_named(target: str | Path, cure: str = "free space there") -> Iterator[None]:
    """Turn what is raised when the disk is full into a `DiskFullError` that names the file.

    Args:
        target: the file that is written, or a folder in which files are: then the last one that was begun is named.
        cure: what to do, the end of the sentence.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, DiskFullError) or not is_disk_full(error):
            raise
        raise DiskFullError(f"Disk full while writing {_file(target, error)}: {cure}.") from error


def _file(target: str | Path, error: BaseException) -> Path:
    target = Path(target)
    if not target.is_dir():
        return target
    if isinstance(error, OSError) and isinstance(error.filename, (str, Path)) and Path(error.filename).is_file():
        return Path(error.filename)
    begun = [(path.stat().st_mtime_ns, path) for path in target.rglob("*") if not path.is_dir()]
    return max(begun, default=(0, target))[1]
