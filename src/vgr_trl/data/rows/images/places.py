"""Where files may lie that data name."""

from functools import cache
from pathlib import Path

from vgr_trl.errors import DataError


def path_within(root: Path, name: str | Path) -> Path:
    """Return the path that a row names.

    Args:
        root: folder that relative paths start from, and that no path leads out of, be it absolute, by `..` or by a
            symbolic link; what was downloaded from the hub lies in its caches. `Path()`: paths of the caller's own,
            which lead anywhere.
        name: as the row has it.

    Raises:
        DataError: the file lies elsewhere.
    """
    path = root / name
    try:
        real = path.resolve()
    except (OSError, ValueError, RuntimeError):  # nothing can be opened there
        return path
    if root != Path() and not _is_within(real, root):
        raise DataError(
            f"file {str(path)[:200]} lies outside of {root}, where these data may have files: give --image_dir, the "
            "folder that paths start from and stay in"
        )
    return path


def downloaded() -> Path:
    """Return the folder of data sets from the hub."""
    from datasets import config  # here, so that a decoding process starts without it

    return Path(config.HF_DATASETS_CACHE)


def _is_within(path: Path, root: Path) -> bool:
    return path.is_relative_to(_real(root)) or any(path.is_relative_to(cache) for cache in _caches())


@cache
def _real(folder: Path) -> Path:
    return folder.resolve()


@cache
def _caches() -> tuple[Path, ...]:
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE).resolve(), downloaded().resolve()
