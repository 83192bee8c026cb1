"""The folders of runs that a page is made of, and what can be taken from them."""

from collections.abc import Sequence
from pathlib import Path

from vgr_trl.errors import DataError
from vgr_trl.reporting.records.recorded_run import FOLDER, LOGS_FILE, Run, read_run
from vgr_trl.reporting.views.page.curves import find_state

LARGEST_THUMBNAIL = 2**20


def open_run(folder: Path) -> Run | None:
    """Return the records of a run; None if it has none but a `trainer_state.json`.

    Raises:
        DataError: the folder is missing, has neither, or its records are of a later version.
    """
    if folder.is_dir() and not _has_records(records_of(folder)) and find_state(output_dir_of(folder)) is not None:
        return None
    return read_run(folder)


def records_of(folder: Path) -> Path:
    """Return the folder of a run's records, given the run's folder or that of the records."""
    return folder if folder.name == FOLDER else folder / FOLDER


def output_dir_of(folder: Path) -> Path:
    """Return the run's folder, given it or that of the records."""
    return folder.parent if folder.name == FOLDER else folder


def size_of_records(run: Run) -> int:
    """Return the bytes of a run's records, without thumbnails."""
    return sum(path.stat().st_size for path in run.folder.glob("records-*.jsonl"))


def unique_names(names: Sequence[str], folders: Sequence[Path]) -> list[str]:
    """Return names that tell the runs apart: alike ones get their folder, and a number if that is alike, too."""
    if len(names) != len(folders):
        raise DataError(f"There are {len(names)} names for {len(folders)} runs: give one name per run, in order.")
    full = [
        f"{name} ({output_dir_of(folder)})" if list(names).count(name) > 1 else name
        for name, folder in zip(names, folders, strict=True)
    ]
    return [name if full.index(name) == index else f"{name} #{index + 1}" for index, name in enumerate(full)]


def read_thumbnail(folder: Path, name: str) -> bytes | None:
    """Return a WebP file in the folder of thumbnails; None if it is missing, too large, something else or elsewhere."""
    try:
        path = (folder / name).resolve()
        if path.parent != (folder / "images").resolve() or path.stat().st_size > LARGEST_THUMBNAIL:
            return None
        content = path.read_bytes()
    except (OSError, ValueError):
        return None
    return content if content[:4] == b"RIFF" and content[8:12] == b"WEBP" else None


def _has_records(records: Path) -> bool:
    return records.is_dir() and ((records / LOGS_FILE).is_file() or any(records.glob("records-*.jsonl")))
