"""Where records go: the folder of the run, Markdown files, the terminal; written in a thread."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakMethod

from PIL import Image

from vgr_trl.reporting.records.background import Background
from vgr_trl.reporting.records.format import LogEntry, Record
from vgr_trl.reporting.records.thumbnails import thumbnail_file
from vgr_trl.reporting.records.writing import RecordFiles
from vgr_trl.reporting.views.console import print_record
from vgr_trl.reporting.views.markdown.logs import MarkdownLogs
from vgr_trl.reporting.views.markdown.sections import Summary

Thumbnails = Sequence[Sequence[Image.Image | None]]  # per completion, per image; then as perturbed, if they were


class RecordSink:
    """Takes records from the training thread and writes them in another.

    Args:
        output_dir: of the run.
        description: of the run, for `run.json`.
        max_bytes: bound of records and thumbnails.
        logs: Markdown files.
        at_once: whether Markdown files and terminal get a record when it comes, not at the next log.
        print_length: characters of prompts on the terminal, None: all.
        prints: whether records are printed.
    """

    def __init__(
        self,
        output_dir: Path,
        description: Mapping[str, Any],
        max_bytes: int,
        *,
        logs: MarkdownLogs,
        at_once: bool = False,
        prints: bool = False,
        print_length: int | None = None,
    ) -> None:
        self.output_dir, self.description, self.max_bytes = output_dir, description, max_bytes
        self.logs, self.at_once, self.prints, self.print_length = logs, at_once, prints, print_length
        self._unshown: list[tuple[Record, Summary]] = []
        self._files: RecordFiles | None = None
        self._background = Background("Rollouts", at_exit=WeakMethod(self.close))

    def add(self, record: Record, thumbnails: Thumbnails, summary: Summary) -> None:
        """Take a record; the files of its images get their names on the way."""
        self._background.put(partial(self._write, record, thumbnails))
        self._unshown.append((record, summary))
        if self.at_once:
            self._show()

    def log(self, entry: LogEntry) -> None:
        """Take what the trainer has logged."""
        self._show()
        self._background.put(partial(self._write_log, entry))

    def flush(self) -> None:
        """Wait until everything so far is on disk."""
        self._show()
        self._background.flush()

    def close(self) -> None:
        """As `flush`, and end the thread; a later record starts another."""
        self._show()
        self._background.close()

    def _show(self) -> None:
        for record, summary in self._unshown:
            if self.logs.wanted:
                self._background.put(partial(self.logs.add, record, summary))
            if self.prints:
                print_record(record, prompt_length=self.print_length)
        self._unshown.clear()

    # In the thread

    def _write(self, record: Record, thumbnails: Thumbnails) -> None:
        files: dict[str, bytes] = {}
        for completion, shown in zip(record.completions, thumbnails, strict=True):
            places = [(image, name) for name in ("file", "perturbed") for image in completion.images]
            for (image, name), thumbnail in zip(places, shown, strict=False):
                if thumbnail is not None:
                    file, content = thumbnail_file(thumbnail)
                    files[file] = content
                    setattr(image, name, file)
        self._opened(record.step).add(record, files)

    def _write_log(self, entry: LogEntry) -> None:
        self._opened(entry.step).log(entry)

    def _opened(self, step: int) -> RecordFiles:
        """The files, opened at the first record: a run that begins behind step 0 is one that goes on."""
        if self._files is None:
            self._files = RecordFiles(self.output_dir, self.description, self.max_bytes, resumed=step > 0)
        return self._files
