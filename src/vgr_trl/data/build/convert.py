"""Questions become files: images encoded, rows written part by part, rows that cannot be used listed."""

from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from vgr_trl.data.build.encode import Encoded
from vgr_trl.data.build.pool import Encoding, encoder
from vgr_trl.data.build.progress import SKIPPED, Progress, SkippedLog, alone_in
from vgr_trl.data.build.statistics import Statistics
from vgr_trl.data.build.write import PARTS, Part
from vgr_trl.data.rows.questions import Candidate, Origin, Question, with_images
from vgr_trl.errors import ConfigError, DataError

ROWS_PER_FILE = 2000


@dataclass(frozen=True)
class Output:
    """Where and how rows are written.

    Attributes:
        folder: gets `SPLIT-00000.parquet`, … and `skipped.jsonl`.
        split: start of the file names, by which `datasets` knows the split.
        kind: `parquet` or `jsonl`.
        several_images: whether rows have `images` instead of `image`.
        videos: whether rows have `videos` too, as paths.
        regions: whether rows have `regions` too.
        rows_per_file: rows after which a file is finished; what is finished need not be made again after a kill.
        limit: rows after which to stop; None: all.
        workers: processes that decode images; 0: none beside this one.
        encoding: how images are encoded.
    """

    folder: Path
    split: str = "train"
    kind: str = "parquet"
    several_images: bool = False
    videos: bool = False
    regions: bool = False
    rows_per_file: int = ROWS_PER_FILE
    limit: int | None = None
    workers: int = 2
    encoding: Encoding = field(default_factory=Encoding)

    def __post_init__(self) -> None:
        if self.kind not in PARTS:
            raise ConfigError(f"The output format is {self.kind!r}: give one of {', '.join(PARTS)}.")
        if not self.split.isidentifier():
            raise ConfigError(f"The output split is {self.split!r}: give a word such as train.")
        for name, least in (("rows_per_file", 1), ("limit", 1), ("workers", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name} is {value}: give an integer of at least {least}.")


def convert(candidates: Iterable[Candidate], output: Output, identity: Any, total: int | None = None) -> Progress:
    """Write the questions among `candidates` to files, continuing what an earlier call has begun.

    Args:
        candidates: questions and reasons, the same and in the same order each time.
        identity: what the candidates depend on, as JSON; a folder begun with another is refused.
        total: source rows, for the progress bar; None: not known.

    Raises:
        ConfigError: the folder holds something else, lacks what was finished, or another process is writing to it.
        DataError: the source cannot be read, or no row is left.
    """
    with alone_in(output.folder):
        progress = Progress.begin(output.folder, output.split, identity)
        _require_parts(output, progress)
        if not progress.done:
            progress.save(output.folder, output.split)
            progress = _write(candidates, output, progress, total)
    if progress.rows == 0:
        raise DataError(_nothing_left(progress, output.folder / SKIPPED))
    return progress


def _part_path(output: Output, number: int) -> Path:
    return output.folder / f"{output.split}-{number:05d}.{output.kind}"


def _require_parts(output: Output, progress: Progress) -> None:
    for path in (_part_path(output, number) for number in range(progress.parts)):
        if not path.is_file():
            raise ConfigError(f"{path} was finished and is missing: put it back, or delete {output.folder}.")


def _nothing_left(progress: Progress, log: Path) -> str:
    skipped = Statistics.of(progress.counts).reasons
    if not skipped:
        return "There are no rows to write: the source has none that are asked for."
    kind, count = skipped.most_common(1)[0]
    return f"None of the {skipped.total()} rows can be used; {count} because: {kind}. {log} lists them all."


def _write(candidates: Iterable[Candidate], output: Output, progress: Progress, total: int | None) -> Progress:
    bar = tqdm(total=total, desc=f"convert ({output.split})", unit=" rows", delay=1)
    with bar, encoder(output.encoding, output.workers) as encode, closing(_Run(output, progress)) as run:
        waiting = islice(_shown(candidates, bar), run.taken, None)
        for (origin, candidate), found in encode(with_images(waiting)):
            run.take(origin, candidate, found)
            if run.is_full():
                break
        return run.commit(done=True)


class _Run:
    """The file in the making, and how far everything before it has come."""

    def __init__(self, output: Output, progress: Progress) -> None:
        self.output = output
        self.progress = progress
        self.log = SkippedLog(output.folder, progress.log_end)
        self.part: Part | None = None
        self.rows = 0  # in this part
        self.statistics = Statistics.of(progress.counts)
        self.taken = progress.taken

    def take(self, origin: Origin, candidate: Question | str, images: list[Encoded] | str) -> None:
        """Add a row, or list why there is none; finish the file when it has its rows."""
        self.taken += 1
        if isinstance(candidate, str):
            self._skip(origin, candidate)
        elif isinstance(images, str):
            self._skip(origin, images)
        elif not self.output.several_images and len(images) != 1:
            self._skip(origin, f"it has {len(images)} images, where one is expected")
        elif candidate.videos and not self.output.videos:
            self._skip(origin, "it has a video, but the set's first row has no column of videos")
        else:
            if self.part is None:
                path = _part_path(self.output, self.progress.parts)
                self.part = PARTS[self.output.kind](
                    path, self.output.several_images, self.output.videos, self.output.regions
                )
            self.part.add(candidate, images)
            self.statistics.add(candidate, images)
            self.rows += 1
            if self.rows == self.output.rows_per_file:
                self.commit()

    def is_full(self) -> bool:
        """Return whether as many rows are written as are wanted."""
        return self.output.limit is not None and self.progress.rows + self.rows >= self.output.limit

    def commit(self, done: bool = False) -> Progress:
        """Finish the file and write down how far the conversion has come."""
        if self.part is not None:
            self.part.finish()
        self.progress = replace(
            self.progress,
            parts=self.progress.parts + (self.part is not None),
            rows=self.progress.rows + self.rows,
            counts=self.statistics.as_dict(),
            taken=self.taken,
            log_end=self.log.end(),
            done=done,
        )
        self.progress.save(self.output.folder, self.output.split)
        self.part, self.rows = None, 0
        return self.progress

    def close(self) -> None:
        """Give up what is not finished."""
        if self.part is not None:
            self.part.drop()
        self.log.close()

    def _skip(self, origin: Origin, reason: str) -> None:
        self.log.add(origin, reason)
        self.statistics.skip(reason)


def _shown(candidates: Iterable[Candidate], bar: Any) -> Iterator[Candidate]:
    """The candidates, each source row of theirs shown in the progress bar."""
    last = None
    for candidate in candidates:
        if candidate[0] != last:
            last = candidate[0]
            bar.update()
        yield candidate
