"""Where records go: the folder of the run, Markdown files, the terminal; written in a thread."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakMethod

from PIL import Image

from vgr_trl.reporting.records.background import Background
from vgr_trl.reporting.records.record import LogEntry, Record
from vgr_trl.reporting.records.record_files import RecordFiles
from vgr_trl.reporting.records.thumbnails import thumbnail_file
from vgr_trl.reporting.views.console import print_record
from vgr_trl.reporting.views.markdown.logs import MarkdownLogs
from vgr_trl.reporting.views.markdown.sections import Summary


@dataclass(frozen=True)
class Finished:
    """A record as it is written.

    Attributes:
        record: whose images get the names of their files on the way.
        thumbnails: per completion, per image; then as perturbed, if they were.
        summary: the batch in numbers.
    """

    record: Record
    thumbnails: Sequence[Sequence[Image.Image | None]]
    summary: Summary


class _Coming:
    """A record that is finished when it is first asked for, in the thread that writes."""

    def __init__(self, finish: Callable[[], Finished]) -> None:
        self._finish: Callable[[], Finished] | None = finish
        self.finished: Finished | None = None

    def get(self) -> Finished:
        if self.finished is None:
            assert self._finish is not None
            self.finished = self._finish()
            self._finish = None  # with the images that it holds
        return self.finished


class RecordSink:
    """Takes records from the training thread and writes them in another.

    Args:
        description: of the run, for `run.json`.
        max_bytes: bound of records and thumbnails.
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
        self._unshown: list[_Coming] = []
        self._files: RecordFiles | None = None
        self._background = Background("Rollouts", at_exit=WeakMethod(self.close))

    def add(self, finish: Callable[[], Finished]) -> None:
        """Take what returns a record; the thread calls it."""
        coming = _Coming(finish)
        self._background.put(partial(self._write, coming))
        self._unshown.append(coming)
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
        for coming in self._unshown:
            if self.logs.wanted:
                self._background.put(partial(self._write_logs, coming))
            if self.prints:
                self._print(coming)
        self._unshown.clear()

    def _print(self, coming: _Coming) -> None:
        self._background.flush()
        if coming.finished is not None:
            print_record(coming.finished.record, prompt_length=self.print_length)

    # In the thread

    def _write(self, coming: _Coming) -> None:
        finished, files = coming.get(), dict[str, bytes]()
        encoded: dict[int, str] = {}  # completions of a prompt share their images
        for completion, shown in zip(finished.record.completions, finished.thumbnails, strict=True):
            places = [(image, name) for name in ("file", "perturbed") for image in completion.images]
            for (image, name), thumbnail in zip(places, shown, strict=False):
                if thumbnail is None:
                    continue
                if id(thumbnail) not in encoded:
                    encoded[id(thumbnail)], content = thumbnail_file(thumbnail)
                    files[encoded[id(thumbnail)]] = content
                setattr(image, name, encoded[id(thumbnail)])
        self._opened(finished.record.step).add(finished.record, files)

    def _write_logs(self, coming: _Coming) -> None:
        self.logs.add(coming.get().record, coming.get().summary)

    def _write_log(self, entry: LogEntry) -> None:
        self._opened(entry.step).log(entry)

    def _opened(self, step: int) -> RecordFiles:
        """The files, opened at the first record: a run that begins behind step 0 is one that goes on."""
        if self._files is None:
            self._files = RecordFiles(self.output_dir, self.description, self.max_bytes, resumed=step > 0)
        return self._files
