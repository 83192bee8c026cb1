"""What a trainer logs, a line per log, in a file of bounded size."""

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from vgr_trl.disk_full import disk_full_named
from vgr_trl.files import append_whole, unfinished
from vgr_trl.reporting.records.json_lines import encode_log
from vgr_trl.reporting.records.record import LogEntry

_EVALUATION = b'"mode":"eval"'  # in the head of a line, which `encode_log` writes first
_HEAD = 100  # bytes


class LogFile:
    """Log entries, appended one by one, each by one call, so that a kill costs at most the last.

    Where the file gets larger than its bound, every second entry of training goes, all evaluations stay; where these
    alone are too many, every second entry of any kind. So the oldest entries become the sparsest, and the first and the
    newest are there.

    Args:
        path: of the file; what a kill has cut of its last line is ended.
        max_bytes: its bound.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        self.path, self.max_bytes = path, max_bytes
        _end_last_line(path)
        self._size = path.stat().st_size if path.is_file() else 0

    def add(self, entry: LogEntry) -> None:
        """Append an entry."""
        line = encode_log(entry).encode("utf-8") + b"\n"
        for droppable in (_is_of_training, _is_any):
            if self._size + len(line) > self.max_bytes and self._size:
                self._thin(droppable)
        append_whole(self.path, line)
        self._size += len(line)

    def _thin(self, droppable: Callable[[bytes], bool]) -> None:
        new = unfinished(self.path)
        try:
            with disk_full_named(self.path), self.path.open("rb") as old, new.open("wb") as file:
                file.writelines(_without_every_second(old, droppable))
            new.replace(self.path)
        finally:
            new.unlink(missing_ok=True)
        self._size = self.path.stat().st_size


def _without_every_second(lines: Iterable[bytes], droppable: Callable[[bytes], bool]) -> Iterator[bytes]:
    keep = False
    for line in lines:
        if droppable(line):
            keep = not keep
        if keep or not droppable(line):
            yield line


def _is_of_training(line: bytes) -> bool:
    return _EVALUATION not in line[:_HEAD]


def _is_any(line: bytes) -> bool:
    return True


def _end_last_line(path: Path) -> None:
    """A line that a kill has cut must not swallow the next one."""
    if path.is_file() and path.stat().st_size:
        with path.open("rb+") as file:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
