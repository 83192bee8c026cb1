"""Records written into the folder of a run, in a form that survives a kill, of bounded size."""

import json
import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from vgr_trl.errors import ConfigError
from vgr_trl.files import append_whole, write_whole
from vgr_trl.reporting.records.json_lines import VERSION, encode_record
from vgr_trl.reporting.records.log_file import LogFile
from vgr_trl.reporting.records.record import LogEntry, Record
from vgr_trl.reporting.records.recorded_run import FOLDER, LOGS_FILE, RECORDS, RUN_FILE

_IMAGE = re.compile(rb'"images/([0-9a-f]{40}\.webp)"')
_FILES = 16  # into which the records are cut: one at a time is removed where they get too large


class RecordFiles:
    """The records of a run in its folder.

    A record is a line, appended by one call, so a kill costs at most the last one. Records of an earlier process stay
    and a new file is begun. Beyond the bound the oldest file is removed with the thumbnails that only it shows, except
    the first file, which shows how the run began. What the trainer logs has the same bound, by itself (`LogFile`).

    Args:
        description: content of `run.json` besides version and time.
        max_bytes: bound of records and thumbnails together, and of the log.
        resumed: whether the run goes on; else records that are already there are moved aside.
    """

    def __init__(self, output_dir: Path, description: Mapping[str, Any], max_bytes: int, resumed: bool) -> None:
        self.folder = output_dir / FOLDER
        self.max_bytes, self.file_bytes = max_bytes, max_bytes // _FILES
        if self.folder.exists() and not resumed:
            self.folder.rename(_free_name(self.folder))
        (self.folder / "images").mkdir(parents=True, exist_ok=True)
        paths = sorted(self.folder.glob("records-*.jsonl"))
        self._images: dict[Path, set[str]] = {path: _image_names(path) for path in paths}  # that a file shows
        self._sizes = {path: path.stat().st_size for path in [*paths, *(self.folder / "images").iterdir()]}
        self._current: Path | None = None
        self._log = LogFile(self.folder / LOGS_FILE, max_bytes)
        self._describe(description)

    def add(self, record: Record, thumbnails: Mapping[str, bytes]) -> None:
        """Append a record, with the files `images/….webp` that it names and that are not there yet."""
        for name, content in thumbnails.items():
            if self.folder / name not in self._sizes:
                write_whole(self.folder / name, content, sync=False)
                self._sizes[self.folder / name] = len(content)
        line = encode_record(record).encode("utf-8") + b"\n"
        path = self._file_for(len(line))
        self._current = None  # what a failure leaves of a line is the last of its file
        append_whole(path, line)
        self._current = path
        self._sizes[path] = self._sizes.get(path, 0) + len(line)
        self._images.setdefault(path, set()).update(name.removeprefix("images/") for name in thumbnails)
        self._remove_oldest()

    def log(self, entry: LogEntry) -> None:
        """Append what the trainer has logged."""
        self._log.add(entry)

    def _file_for(self, size: int) -> Path:
        current = self._current
        if current is not None and self._sizes[current] + size <= self.file_bytes:
            return current
        numbers = [int(path.stem.removeprefix("records-")) for path in self.folder.glob("records-*.jsonl")]
        return self.folder / RECORDS.format(max(numbers, default=0) + 1)

    def _remove_oldest(self) -> None:
        while sum(self._sizes.values()) > self.max_bytes and len(paths := sorted(self._images)) > 2:
            oldest = paths[1]
            others = set().union(*(names for path, names in self._images.items() if path != oldest))
            gone = [oldest, *(self.folder / "images" / name for name in self._images.pop(oldest) - others)]
            for path in gone:
                path.unlink(missing_ok=True)
                self._sizes.pop(path, None)

    def _describe(self, description: Mapping[str, Any]) -> None:
        path = self.folder / RUN_FILE
        created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        if path.is_file():
            with suppress(ValueError, KeyError, TypeError, RecursionError):
                created = json.loads(path.read_text(encoding="utf-8"))["created"]
        content = {"version": VERSION, "created": created, **description}
        write_whole(path, json.dumps(content, indent=2, default=str).encode("utf-8"), sync=False)


def refuse_unwritable(path: Path, option: str, is_folder: bool = False) -> None:
    """Raise `ConfigError` if a file (or folder) at `path`, which `option` names, could not be written."""
    for existing in (path, *path.absolute().parents):
        if existing.exists():
            wants_folder = is_folder or existing != path
            if existing.is_dir() != wants_folder or not os.access(existing, os.W_OK):
                raise ConfigError(f"{option} is {path}, but {existing} cannot be written to: choose another place.")
            return


def _image_names(path: Path) -> set[str]:
    names: set[str] = set()
    with path.open("rb") as file:
        for line in file:
            names.update(name.decode() for name in _IMAGE.findall(line))
    return names


def _free_name(folder: Path) -> Path:
    number = 1
    while (free := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    return free
