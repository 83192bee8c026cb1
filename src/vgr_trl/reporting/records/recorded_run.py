"""The records of a run, read from its folder with bounded memory."""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from vgr_trl.errors import DataError
from vgr_trl.reporting.records.json_lines import check_version, decode_log, decode_record
from vgr_trl.reporting.records.record import MODES, LogEntry, Record

FOLDER, RUN_FILE, LOGS_FILE = "rollouts", "run.json", "logs.jsonl"
RECORDS = "records-{:06d}.jsonl"
LONGEST_LINE = 256 * 2**20  # of a record that is read, in bytes; a damaged file may be one line of many gigabytes

_HEAD = re.compile(rb'\{"version":(\d{1,9}),"step":(\d{1,18}),"mode":"(train|eval)"')


@dataclass
class Run:
    """The records of a run; nothing but what identifies a record is kept in memory.

    Attributes:
        folder: of the records.
        description: content of `run.json`: name, created, rewards, model, options; empty if it is missing.
        damaged: records and log entries that could not be read, so far: torn, too long or no records.
    """

    folder: Path
    description: dict[str, Any]
    damaged: int = 0
    _found: dict[tuple[int, str], tuple[Path, int]] = field(default_factory=dict, repr=False)

    @property
    def name(self) -> str:
        """Of the run, by default that of its folder."""
        return str(self.description.get("name") or self.folder.resolve().parent.name)

    @property
    def rewards(self) -> list[str]:
        """Names of the rewards, in order."""
        names = self.description.get("rewards")
        return [str(name) for name in names] if isinstance(names, list) else []

    def steps(self, mode: str | None = None) -> list[tuple[int, str]]:
        """Return step and mode of the records, in order; of one mode if given."""
        return sorted(key for key in self._found if mode in (None, key[1]))

    def records(self, mode: str | None = None) -> Iterator[Record]:
        """Read the records one by one, in the order of their steps; of a step that was run twice, the last.

        Raises:
            DataError: a record is of a later version.
        """
        for key in self.steps(mode):
            if (record := self.record(*key)) is not None:
                yield record

    def record(self, step: int, mode: str) -> Record | None:
        """Return the record of a step; None if there is none, or it is damaged."""
        if (step, mode) not in self._found:
            return None
        path, offset = self._found[step, mode]
        try:
            with path.open("rb") as file:
                file.seek(offset)
                line = file.readline(LONGEST_LINE)
            return decode_record(line.decode("utf-8"))
        except (OSError, UnicodeDecodeError, DataError):
            self.damaged += 1
            return None

    def logs(self) -> list[LogEntry]:
        """Return what the trainer logged, in the order of steps; of a value logged twice at a step, the last.

        Raises:
            DataError: an entry is of a later version.
        """
        merged: dict[tuple[int, str], LogEntry] = {}
        path = self.folder / LOGS_FILE
        if not path.is_file():
            return []
        with path.open("rb") as file:
            for entry in decoded_logs((line for line, _ in self._lines(file)), path):
                if entry is None:
                    self.damaged += 1
                    continue
                before = merged.get((entry.step, entry.mode))
                if before is not None:
                    entry.values = before.values | entry.values
                merged[entry.step, entry.mode] = entry
        return [merged[key] for key in sorted(merged)]

    def index(self) -> None:
        """Find the records in the files, without keeping any."""
        self._found.clear()
        for path in sorted(self.folder.glob(RECORDS.format(0).replace("000000", "*"))):
            with path.open("rb") as file:
                for line, offset in self._lines(file):
                    key = _check_head(line, path)
                    if key is None:
                        self.damaged += 1
                    else:
                        self._found[key] = path, offset

    def _lines(self, file: BinaryIO) -> Iterator[tuple[bytes, int]]:
        """The whole lines of a file with their offsets; a line that was not written to its end is passed over."""
        offset = 0
        while line := file.readline(LONGEST_LINE):
            start, offset = offset, offset + len(line)
            if not line.endswith(b"\n"):
                self.damaged += 1
                while line and not line.endswith(b"\n"):  # the rest of a line that is too long
                    line = file.readline(LONGEST_LINE)
                    offset += len(line)
            elif line.strip():
                yield line, start


def read_run(path: str | Path) -> Run:
    """Return the records of a run, given its folder (`output_dir`) or the folder `rollouts` in it.

    Raises:
        DataError: there is no such folder, it has no records, or they are of a later version.
    """
    given = Path(path)
    if not given.is_dir():
        raise DataError(f"{given} is no folder: give the output_dir of a run.")
    folder = given if given.name == FOLDER else given / FOLDER
    if not folder.is_dir():
        raise DataError(f"{given} has no folder {FOLDER}: give the output_dir of a run with rollout_log_steps above 0.")
    try:
        run = Run(folder, _description(folder / RUN_FILE))
        run.index()
    except OSError as error:
        raise DataError(
            f"The records in {folder} cannot be read ({error}): check the folder and its rights."
        ) from error
    if not run.steps() and not (folder / LOGS_FILE).is_file():
        raise DataError(f"{folder} has no records yet: wait for the first step that is recorded, or give another run.")
    return run


def decoded_logs(lines: Iterable[bytes], path: Path) -> Iterator[LogEntry | None]:
    """Yield the log entry in each line of a file, None for one that is damaged.

    Raises:
        DataError: an entry is of a later version.
    """
    for line in lines:
        _check_head(line, path)
        try:
            yield decode_log(line.decode("utf-8"))
        except (UnicodeDecodeError, DataError):
            yield None


def _description(path: Path) -> dict[str, Any]:
    """A run killed at its very start has none, or half of one; its records say the rest."""
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(loaded, dict):
        return {}
    check_version(loaded.get("version"), str(path))
    return loaded


def _check_head(line: bytes, path: Path) -> tuple[int, str] | None:
    """Step and mode of a line, None if it is damaged.

    Raises:
        DataError: it is of a later version.
    """
    if (found := _HEAD.match(line)) is not None:
        check_version(int(found[1]), str(path))
        return int(found[2]), found[3].decode()
    try:
        loaded = json.loads(line)
        version, step, mode = loaded["version"], loaded["step"], loaded["mode"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    if not isinstance(version, int) or not isinstance(step, int) or mode not in MODES:
        return None
    check_version(version, str(path))
    return step, mode
