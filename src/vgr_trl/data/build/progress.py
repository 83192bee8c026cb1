"""How far a conversion has come: what is finished stays, and what is not is made again."""

import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vgr_trl.data.build.statistics import Statistics
from vgr_trl.data.read.readers import READERS
from vgr_trl.data.rows.questions import Origin
from vgr_trl.errors import ConfigError
from vgr_trl.files import write_whole

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

SKIPPED = "skipped.jsonl"
ROWS = (*READERS, ".arrow")  # files that `datasets` would read beside those written here


@dataclass(frozen=True)
class Progress:
    """Of one split in an output folder.

    Attributes:
        identity: the source and the options; a conversion is continued only by one of the same.
        taken: questions and reasons read from the source.
        parts: finished files.
        rows: rows in them.
        counts: of the rows written and left out, see `Statistics`.
        log_end: length of `skipped.jsonl`, in bytes, when the last file was finished.
        done: whether the source has no more.
    """

    identity: Any
    taken: int = 0
    parts: int = 0
    rows: int = 0
    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    log_end: int = 0
    done: bool = False

    @classmethod
    def begin(cls, folder: Path, split: str, identity: Any) -> "Progress":
        """Return where the conversion in `folder` stands; make the folder if there is none.

        One of which nothing was written, because it failed, is begun anew, or another in its place.

        Raises:
            ConfigError: the folder holds another conversion, one of another split that is not finished, or files with
                rows of other origin.
        """
        identity = json.loads(json.dumps(identity, default=str))
        folder.mkdir(parents=True, exist_ok=True)
        path = _path(folder, split)
        others = [name for name in _splits_in(folder) if name != split]
        if not path.exists():
            _refuse_foreign(folder, others)
            if begun := [name for name in others if not _read(folder, name).done]:
                raise ConfigError(
                    f"{folder} holds a conversion of {begun[0]} that is not finished: finish it first, or choose "
                    "another folder."
                )
            log = folder / SKIPPED
            return cls(identity, log_end=log.stat().st_size if log.exists() else 0)
        progress = _read(folder, split)
        if not progress.parts and not others:
            if progress.identity != identity:  # a kill may have left a file that this one would not replace
                _refuse_foreign(folder, others)
            return cls(identity)
        if progress.identity != identity:
            before = progress.identity if isinstance(progress.identity, dict) else {}
            differing = [name for name, value in identity.items() if before.get(name) != value]
            raise ConfigError(
                f"{folder} holds a conversion with other {', '.join(differing) or 'options'}: choose another folder, "
                "or delete it to begin anew."
            )
        return progress

    def save(self, folder: Path, split: str) -> None:
        """Write it down, at once or not at all."""
        write_whole(_path(folder, split), json.dumps(asdict(self)).encode())


class SkippedLog:
    """`skipped.jsonl`: one JSON object with `file`, `row` and `reason` for each row that was left out."""

    def __init__(self, folder: Path, end: int) -> None:
        """Continue the file after `end` bytes; what follows was written after the last file was finished."""
        self._file = (folder / SKIPPED).open("ab")
        self._file.truncate(min(end, self._file.tell()))

    def add(self, origin: Origin, reason: str) -> None:
        """Write down a row and why it was left out."""
        line = json.dumps({"file": origin.file, "row": origin.row, "reason": reason})
        self._file.write(line.encode() + b"\n")

    def end(self) -> int:
        """Return the length of the file once it is on the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return os.fstat(self._file.fileno()).st_size

    def close(self) -> None:
        """Close the file."""
        self._file.close()


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Keep other processes from writing to `folder` meanwhile, on systems that can.

    Raises:
        ConfigError: another process is writing to it, or it cannot be written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w")
    except OSError as error:
        raise ConfigError(f"{folder} is no folder to write to ({error.strerror}): choose another.") from error
    with lock as file:
        if fcntl is None:
            yield
            return
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(f"Another process is writing to {folder}: choose another folder, or wait.") from error
        yield


def statistics_in(folder: Path) -> dict[str, Statistics]:
    """Return what each split in `folder` consists of, as far as it is written; `train` first."""
    splits = sorted(_splits_in(folder), key=lambda name: (name != "train", name))
    return {split: Statistics.of(_read(folder, split).counts) for split in splits}


def _splits_in(folder: Path) -> list[str]:
    return sorted(path.name.split(".")[1] for path in folder.glob(".*.progress.json"))


def _refuse_foreign(folder: Path, splits: Sequence[str]) -> None:
    """Refuse files that readers of the folder would take for rows of it, those of converted splits apart."""
    for file in sorted(folder.iterdir()):
        if file.suffix.lower() not in ROWS or file.name.startswith(".") or file.name == SKIPPED:
            continue
        if not any(re.fullmatch(rf"{re.escape(split)}-\d+\.\w+", file.name) for split in splits):
            raise ConfigError(
                f"{folder} has {file.name}, which no conversion here made, and which would be read as rows of the "
                "set: choose another folder."
            )


def _read(folder: Path, split: str) -> Progress:
    path = _path(folder, split)
    try:
        return Progress(**json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError, OSError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read ({error}): delete {folder} or choose another folder.") from error


def _path(folder: Path, split: str) -> Path:
    return folder / f".{split}.progress.json"
