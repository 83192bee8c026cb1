"""Runs as one page of HTML: their curves, records and thumbnails, within a bound of bytes."""

import base64
import json
import math
import zlib
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from sys import intern
from typing import Any, BinaryIO, TypeVar

from vgr_trl.reporting.records import (
    FOLDER,
    LOGS_FILE,
    LogEntry,
    Record,
    Run,
    decoded_logs,
    encode_record,
    first_signs,
    read_run,
)
from vgr_trl.utils import ConfigError, DataError, write_whole

# ---------------------------------------------------------------------------------------------------------------------
# How much of the attention on an image falls into boxes that are drawn on it.


Box = Sequence[float]  # left, top, width, height in pixels


def covered_shares(grid: tuple[int, int], size: tuple[int, int], boxes: Iterable[Box]) -> list[float]:
    """Return the share of each cell that lies in at least one box, row by row from the top left, each in [0, 1].

    The cells divide the image evenly. Image processors stretch an image to a multiple of the cell, so the cells may be
    fractions of a pixel of the original image, and need not be square there.

    Args:
        grid: rows and columns of vision tokens, each at least 1.
        size: width and height of the image on which the boxes are drawn, in pixels, each above 0.
        boxes: left, top, width and height in pixels; what lies outside of the image does not count.

    Raises:
        DataError: grid, size or a box is none.
    """
    (rows, columns), (width, height) = _checked_grid(grid), _checked_size(size)
    cut = [_as_edges(box) for box in boxes]
    across = [column * width / columns for column in range(columns)] + [width]
    down = [row * height / rows for row in range(rows)] + [height]
    return [
        _union_area([_clipped(box, (across[column], down[row], across[column + 1], down[row + 1])) for box in cut])
        / ((across[column + 1] - across[column]) * (down[row + 1] - down[row]))
        for row in range(rows)
        for column in range(columns)
    ]


def attention_share(attention: Sequence[float], covered: Sequence[float]) -> float | None:
    """Return the share of the attention that falls into the boxes, in [0, 1]; None if there is no attention.

    The attention of a vision token counts as spread evenly over its cell.

    Args:
        attention: of each vision token, row by row from the top left, in any unit, each at least 0.
        covered: share of each cell in the boxes, as `covered_shares` returns it.

    Raises:
        DataError: there are not as many cells as tokens, or a value of `attention` is negative or not finite.
    """
    if len(attention) != len(covered):
        raise DataError(f"attention has {len(attention)} tokens and the grid {len(covered)} cells: give one per cell.")
    for value in attention:
        if not (math.isfinite(value) and value >= 0):
            raise DataError(f"attention has the value {value}: give finite numbers of at least 0.")
    total = math.fsum(attention)
    if total == 0:
        return None
    return math.fsum(value * share for value, share in zip(attention, covered, strict=True)) / total


def area_share(covered: Sequence[float]) -> float:
    """Return the share of the image's area that the boxes cover, in [0, 1]: `attention_share` of even attention."""
    return math.fsum(covered) / len(covered)


def _checked_grid(grid: tuple[int, int]) -> tuple[int, int]:
    if len(grid) != 2 or any(not isinstance(side, int) or side < 1 for side in grid):
        raise DataError(f"grid is {grid}: give rows and columns, two integers of at least 1.")
    return grid


def _checked_size(size: tuple[int, int]) -> tuple[int, int]:
    if len(size) != 2 or any(not (math.isfinite(side) and side > 0) for side in size):
        raise DataError(f"size is {size}: give the image's width and height in pixels, each above 0.")
    return size


def _as_edges(box: Box) -> tuple[float, float, float, float]:
    if len(box) != 4 or not all(map(math.isfinite, box)) or box[2] < 0 or box[3] < 0:
        raise DataError(f"box is {list(box)}: give left, top, width and height in pixels, the last two at least 0.")
    left, top, width, height = box
    return left, top, left + width, top + height


def _clipped(
    box: tuple[float, float, float, float], cell: tuple[float, float, float, float]
) -> tuple[float, float, float, float]:
    return max(box[0], cell[0]), max(box[1], cell[1]), min(box[2], cell[2]), min(box[3], cell[3])


def _union_area(boxes: Sequence[tuple[float, float, float, float]]) -> float:
    """Area of the union: between two neighbouring edges in x, the boxes that are there are intervals in y."""
    boxes = [box for box in boxes if box[0] < box[2] and box[1] < box[3]]
    edges = sorted({edge for box in boxes for edge in (box[0], box[2])})
    area = 0.0
    for left, right in pairwise(edges):
        reached, length = -math.inf, 0.0
        for top, bottom in sorted((box[1], box[3]) for box in boxes if box[0] <= left and box[2] >= right):
            length += max(0.0, bottom - max(top, reached))
            reached = max(reached, bottom)
        area += (right - left) * length
    return area


# ---------------------------------------------------------------------------------------------------------------------
# Which records of a run a page shows when it cannot show all: the ends first, then ever finer between them.


Key = TypeVar("Key", bound=Hashable)


def ends_first(keys: Sequence[Key]) -> list[Key]:
    """Return `keys` in an order whose every beginning is spread evenly: first, last, middle, middles of the halves, …

    Worked case: [0, 1, 2, 3, 4] → [0, 4, 2, 1, 3].
    """
    if len(keys) <= 2:
        return list(keys)
    order = {0: None, len(keys) - 1: None}  # a set that keeps its order
    spans = [(0, len(keys) - 1)]
    while spans:
        finer = []
        for low, high in spans:
            if high - low > 1:
                middle = (low + high) // 2
                order[middle] = None
                finer += [(low, middle), (middle, high)]
        spans = finer
    return [keys[index] for index in order]


def interleaved(first: Sequence[Key], second: Sequence[Key]) -> list[Key]:
    """Return the members of both, taken in turns; what is left of the longer one follows."""
    shorter = min(len(first), len(second))
    pairs = [key for pair in zip(first, second, strict=False) for key in pair]
    return [*pairs, *first[shorter:], *second[shorter:]]


# ---------------------------------------------------------------------------------------------------------------------
# Curves of what a trainer logged: read with bounded memory and time, thinned to what a page can show.


STATE_FILE = "trainer_state.json"
LARGEST_STATE = 64 * 2**20  # bytes; a JSON document has to be read whole
LARGEST_LOG = 32 * 2**20  # bytes; of a larger file, lines at even distances are read
SAMPLED_LINES = 900
LONGEST_LINE = 2**20
LEFT_OUT = {"epoch", "step", "total_flos", "train_loss"} | {
    f"{mode}_{name}"
    for mode in ("train", "eval")
    for name in ("runtime", "samples_per_second", "steps_per_second")
}  # fmt: skip


@dataclass
class Curve:
    """A value over the steps of a run.

    Attributes:
        name: as the trainer logs it in training; `eval_` is left out in evaluation.
        mode: `train` or `eval`.
        steps: rising.
        values: one per step, None where it is not finite.
    """

    name: str
    mode: str
    steps: list[int]
    values: list[float | None]


@dataclass
class Curves:
    """The curves of a run, and what a reader has to know about them.

    Attributes:
        curves: one per value and mode.
        notes: for the reader.
        seconds: from the first log to the last.
        signs: of collapse, with the step at which each is first seen.
    """

    curves: list[Curve]
    notes: list[str]
    seconds: float | None = None
    signs: list[tuple[int, str]] = field(default_factory=list)

    def thinned(self, points: int) -> "Curves":
        """Return curves of at most `points` points, at even distances, first and last among them; a note says so."""
        longest = max((len(curve.steps) for curve in self.curves), default=0)
        if longest <= points:
            return self
        note = f"Curves show {points} of {longest} logged steps, at even distances."
        thinned = [_thinned(curve, points) for curve in self.curves]
        return Curves(thinned, [*self.notes, note], self.seconds, self.signs)


def read_curves(output_dir: Path, records: Path) -> Curves:
    """Return the curves of a run: from the log beside its records, else from the `trainer_state.json` of the trainer.

    Args:
        output_dir: of the run; `trainer_state.json` may be there or in a checkpoint.

    Raises:
        DataError: the log was written by a later release.
    """
    log, notes = records / LOGS_FILE, list[str]()
    if log.is_file():
        entries, notes = _read_log(log)
        if curves := _curves(entries):
            return Curves(curves, notes, _seconds(entries), _signs(entries))
    state = find_state(output_dir)
    if state is None:
        return Curves([], [*notes, "Nothing was logged yet: there are no curves."])
    found = read_state(state)
    return replace(found, notes=[*notes, *found.notes])


def _signs(entries: list[LogEntry]) -> list[tuple[int, str]]:
    """Of a step that was run twice, the last log counts."""
    trained = sorted((entry for entry in entries if entry.mode == "train"), key=attrgetter("step"))
    return first_signs({entry.step: entry for entry in trained}.values())


def _seconds(entries: list[LogEntry]) -> float | None:
    times = [entry.time for entry in entries if entry.mode == "train" and entry.time > 0]
    return max(times) - min(times) if len(times) > 1 and max(times) > min(times) else None


def find_state(output_dir: Path) -> Path | None:
    """Return the `trainer_state.json` of a run, that of its last checkpoint if it has not ended; None without any."""
    if (state := output_dir / STATE_FILE).is_file():
        return state
    states = [path for path in output_dir.glob(f"checkpoint-*/{STATE_FILE}") if _step_of(path) >= 0]
    return max(states, key=_step_of, default=None)


def read_state(path: Path) -> Curves:
    """Return the curves in a `trainer_state.json`; a damaged or very large one gives none, and a note."""
    try:
        if (size := path.stat().st_size) > LARGEST_STATE:
            return Curves([], [f"{STATE_FILE} is {size / 2**20:.0f} MB large and is not read: there are no curves."])
        history = json.loads(path.read_text(encoding="utf-8"))["log_history"]
        found = (_entry_of_state(item) for item in history if isinstance(item, dict))
        entries = [entry for entry in found if entry is not None]
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        return Curves([], [f"{STATE_FILE} is damaged ({type(error).__name__}): there are no curves."])
    where = f"{path.parent.name}/{STATE_FILE}" if path.parent.name.startswith("checkpoint-") else STATE_FILE
    return Curves(_curves(entries), [f"Curves are those of {where}."], signs=_signs(entries))


def _read_log(path: Path) -> tuple[list[LogEntry], list[str]]:
    size, damaged, entries = path.stat().st_size, 0, []
    with path.open("rb") as file:
        lines = _all_lines(file) if size <= LARGEST_LOG else _sampled_lines(file, size)
        for entry in decoded_logs(lines, path):
            if entry is None:
                damaged += 1
            else:
                entries.append(_interned(entry))
    notes = [f"{damaged} damaged log {'entry is' if damaged == 1 else 'entries are'} left out."] if damaged else []
    if size > LARGEST_LOG:
        notes.append(f"The log is {size / 2**20:.0f} MB large: curves show {len(entries)} entries at even distances.")
    return entries, notes


def _all_lines(file: BinaryIO) -> Iterator[bytes]:
    for line in file:
        if line.strip():
            yield line


def _sampled_lines(file: BinaryIO, size: int) -> Iterator[bytes]:
    """First, last and whole lines at even distances between, of a file however large."""
    yield file.readline(LONGEST_LINE)
    reached = 0
    for number in range(1, SAMPLED_LINES):
        if (target := size * number // SAMPLED_LINES) < reached:
            continue
        file.seek(target)
        file.readline(LONGEST_LINE)  # the rest of a line
        line = file.readline(LONGEST_LINE)
        if line.endswith(b"\n"):
            yield line
        reached = file.tell()
    file.seek(max(reached, size - LONGEST_LINE))
    whole = [line for line in file.read(LONGEST_LINE).splitlines(keepends=True) if line.endswith(b"\n")]
    yield from whole[-1:]


def _interned(entry: LogEntry) -> LogEntry:
    entry.values = {intern(name): value for name, value in entry.values.items()}
    return entry


def _entry_of_state(item: dict[str, Any]) -> LogEntry | None:
    """`log_history` holds training and evaluation side by side; evaluation has its prefix."""
    values: dict[str, float | None] = {
        str(name): float(value) for name, value in item.items() if isinstance(value, (int, float))
    }
    step = item.get("step")
    if not isinstance(step, int) or not values:
        return None
    return LogEntry(step, "eval" if any(name.startswith("eval_") for name in values) else "train", 0.0, values)


def _curves(entries: Iterable[LogEntry]) -> list[Curve]:
    """One curve per value and mode, in the order of first appearance; of a step that was logged twice, the last."""
    points: dict[tuple[str, str], dict[int, float | None]] = {}
    for entry in entries:
        for name, value in entry.values.items():
            if name in LEFT_OUT:
                continue
            finite = value if value is not None and math.isfinite(value) else None
            key = (name.removeprefix("eval_") if entry.mode == "eval" else name, entry.mode)
            points.setdefault(key, {})[entry.step] = finite
    curves = []
    for (name, mode), by_step in points.items():
        steps = sorted(by_step)
        if any(value is not None for value in by_step.values()):
            curves.append(Curve(name, mode, steps, [by_step[step] for step in steps]))
    return curves


def _thinned(curve: Curve, points: int) -> Curve:
    if (count := len(curve.steps)) <= points:
        return curve
    kept = [index * (count - 1) // (points - 1) for index in range(points)]
    return Curve(curve.name, curve.mode, [curve.steps[i] for i in kept], [curve.values[i] for i in kept])


def _step_of(path: Path) -> int:
    number = path.parent.name.removeprefix("checkpoint-")
    return int(number) if number.isdecimal() else -1


# ---------------------------------------------------------------------------------------------------------------------
# The folders of runs that a page is made of, and what can be taken from them.


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


# ---------------------------------------------------------------------------------------------------------------------
# What the page of a report holds: curves, records and thumbnails of runs, within a bound of bytes.


MOST_POINTS, FEWEST_POINTS = 1000, 50  # of a curve
CURVES_SHARE = 0.3  # of the bytes
ATTENTION_SHARE = 0.5
_LEVEL = 6  # of zlib: 9 takes 3.5 times as long for a page 2 % smaller
MOST_RECORDS = 200  # of a run that are read
_ROUNDED = bytes(17 * round(value / 17) for value in range(256))  # to 16 steps: most of a map is then 0, and packs well


@dataclass
class PageRun:
    """A run as the page shows it.

    Attributes:
        name: unique among the runs of the page.
        description: content of its `run.json`.
        curves: with notes.
        records: as JSON objects, in the order of their steps.
        notes: what the reader has to know, besides those on curves.
        maps, maps_left_out: attention maps of the records, shown and left out.
        missing: names of thumbnails that are not there, or are none.
    """

    name: str
    description: dict[str, Any]
    curves: Curves
    records: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    maps: int = 0
    maps_left_out: int = 0
    missing: set[str] = field(default_factory=set)

    def as_json(self) -> dict[str, Any]:
        """Return what the page reads."""
        rewards = self.description.get("rewards")
        return {
            "name": self.name,
            "model": str(self.description.get("model") or ""),
            "created": str(self.description.get("created") or ""),
            "rewards": [str(name) for name in rewards] if isinstance(rewards, list) else [],
            "notes": [*self.curves.notes, *self.notes],
            "seconds": self.curves.seconds,
            "signs": [{"step": step, "seen": seen} for step, seen in self.curves.signs],
            "curves": [vars(curve) for curve in self.curves.curves],
            "records": self.records,
        }


class PageData:
    """Everything a page shows, gathered until the bytes are spent.

    Args:
        folders: `output_dir` of the runs.
        max_bytes: of the packed data.
        names: of the runs, in order; by default as they call themselves.

    Raises:
        DataError: a folder is missing, has neither records nor a `trainer_state.json`, or was written by a later
            release.
    """

    def __init__(self, folders: Sequence[Path], max_bytes: int, names: Sequence[str] | None = None) -> None:
        self.images: dict[str, str] = {}
        self._left = max_bytes
        sources = [open_run(folder) for folder in folders]
        own = [
            run.name if run is not None else folder.resolve().name for folder, run in zip(folders, sources, strict=True)
        ]
        self.runs = [
            PageRun(
                name, run.description if run is not None else {}, read_curves(output_dir_of(folder), records_of(folder))
            )
            for name, folder, run in zip(unique_names(names or own, folders), folders, sources, strict=True)
        ]
        self._fit_curves(max_bytes)
        self._attention_left = int(ATTENTION_SHARE * max_bytes)
        self._rounded = sum(size_of_records(run) for run in sources if run is not None) > self._left
        readers = [
            self._add_records(page, run) for page, run in zip(self.runs, sources, strict=True) if run is not None
        ]
        while readers:  # in turns, so that all runs get the same part of the page
            readers = [reader for reader in readers if next(reader, None) is not None]
        for page, run in zip(self.runs, sources, strict=True):
            page.records.sort(key=lambda record: (record["step"], record["mode"]))
            page.notes += _notes(page, run, self._rounded)

    def packed(self) -> bytes:
        """Return the data as JSON, compressed as zlib does."""
        content = {"version": 1, "runs": [run.as_json() for run in self.runs], "images": self.images}
        return zlib.compress(_as_bytes(content), _LEVEL)

    def _fit_curves(self, max_bytes: int) -> None:
        points = MOST_POINTS
        while True:
            thinned = [run.curves.thinned(points) for run in self.runs]
            size = sum(_size([vars(curve) for curve in curves.curves]) for curves in thinned)
            if size <= CURVES_SHARE * max_bytes or points <= FEWEST_POINTS:
                break
            points //= 2
        for run, curves in zip(self.runs, thinned, strict=True):
            run.curves = curves
        self._left -= size

    def _add_records(self, page: PageRun, run: Run) -> Iterator[int]:
        """Add records one by one, the ends of evaluation and training first, until one more would be too many."""
        order = interleaved(ends_first(run.steps("eval")), ends_first(run.steps("train")))
        for step, mode in order[:MOST_RECORDS]:
            record = run.record(step, mode)
            if record is not None and not self._add(page, record, run.folder):
                return
            yield step

    def _add(self, page: PageRun, record: Record, folder: Path) -> bool:
        thumbnails = self._thumbnails(page, record, folder)
        content, maps = _record_as_json(record), self._maps(record)
        base = _size(content) + sum(len(thumbnail) for thumbnail in thumbnails.values())
        if base > self._left:
            return False
        self._left -= base
        for completion, attention in zip(content["completions"], maps, strict=True):
            if attention is None:
                continue
            if (size := _size(attention)) <= min(self._left, self._attention_left):
                completion["attention"] = attention
                self._left, self._attention_left = self._left - size, self._attention_left - size
                page.maps += 1
            else:
                page.maps_left_out += 1
        self.images |= {name: base64.b64encode(content).decode() for name, content in thumbnails.items()}
        page.records.append(content)
        return True

    def _maps(self, record: Record) -> list[dict[str, Any] | None]:
        """The attention maps of the completions as JSON, rounded where the runs are larger than the page."""
        maps: list[dict[str, Any] | None] = []
        for attention in (completion.attention for completion in record.completions):
            if attention is None:
                maps.append(None)
                continue
            values = attention.values.translate(_ROUNDED) if self._rounded else attention.values
            maps.append({"scale": attention.scale, "values": base64.b64encode(values).decode("ascii")})
        return maps

    def _thumbnails(self, page: PageRun, record: Record, folder: Path) -> dict[str, bytes]:
        """Content of the record's thumbnails that the page does not have yet."""
        found: dict[str, bytes] = {}
        images = [image for completion in record.completions for image in completion.images]
        for file in (file for image in images for file in (image.file, image.perturbed)):
            if file is None or file in self.images or file in found:
                continue
            content = read_thumbnail(folder, file)
            if content is None:
                page.missing.add(file)
            else:
                found[file] = content
        return found


def _record_as_json(record: Record) -> dict[str, Any]:
    """Without attention maps."""
    bare = [replace(completion, attention=None) for completion in record.completions]
    content: dict[str, Any] = json.loads(encode_record(replace(record, completions=bare)))
    return content


def _notes(page: PageRun, run: Run | None, rounded: bool) -> list[str]:
    if run is None:
        return ["The run has no records of completions: it has curves only."]
    notes, recorded, shown = [], len(run.steps()), len(page.records)
    if not recorded:
        notes.append("The run has no records of completions yet.")
    elif shown < recorded - run.damaged:
        notes.append(f"{shown} of {recorded} recorded steps are shown, at even distances, to keep the page small.")
    if page.maps_left_out:
        maps = page.maps + page.maps_left_out
        notes.append(
            f"Attention over the image is shown for {page.maps} of {maps} completions, to keep the page small."
        )
    if page.maps and rounded:
        notes.append("Attention over the image is rounded to 16 steps, to keep the page small.")
    if page.missing:
        count = len(page.missing)
        notes.append(f"{count} thumbnail{'s are' if count > 1 else ' is'} missing: grey is shown instead.")
    if run.damaged:
        notes.append(f"{run.damaged} damaged record{'s are' if run.damaged > 1 else ' is'} left out.")
    return notes


def _as_bytes(content: Any) -> bytes:
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.encode("utf-8", "replace")


def _size(content: Any) -> int:
    """Bytes it takes in the page: close to, and rather above, what it takes among everything else."""
    return len(zlib.compress(_as_bytes(content), _LEVEL))


# ---------------------------------------------------------------------------------------------------------------------
# A run as one page of HTML that opens from disk: the built page with the data put in.


PAGE = "page.html"  # built from report_page/ by `make report-page`
PLACE = "VGR_TRL_DATA_GOES_HERE"
MEGABYTE = 10**6
SMALLEST, LARGEST = 1.0, 100.0  # megabytes


@dataclass(frozen=True)
class Report:
    """What was written: file, bytes, number of recorded steps in it, and per run what the reader has to know."""

    path: Path
    size: int
    records: int
    notes: dict[str, list[str]]


def write_report(
    runs: Sequence[str | Path], path: str | Path, *, max_megabytes: float = 9.5, names: Sequence[str] | None = None
) -> Report:
    """Write a page with the curves and completions of one or several runs; what does not fit is thinned.

    The data go in as compressed bytes in base64, whose letters mean nothing to HTML, so text of a model cannot become
    part of the page.

    Args:
        runs: their `output_dir`.
        path: of the page; replaced, at once or not at all, if it exists.
        max_megabytes: bound of its size, 10⁶ bytes each, in [1, 100].
        names: of the runs, in order; by default as they call themselves.

    Raises:
        ConfigError: no run is given, the bound is out of range, or the file cannot be written.
        DataError: a run cannot be read.
    """
    if not runs:
        raise ConfigError("No run is given: give the output_dir of at least one.")
    if not SMALLEST <= max_megabytes <= LARGEST:
        raise ConfigError(f"max_megabytes is {max_megabytes}: give a number in [{SMALLEST:g}, {LARGEST:g}].")
    output = Path(path)
    if output.is_dir():
        raise ConfigError(f"The page cannot be written to {output}, which is a folder: give another --output.")
    page = page_template()
    room = int((max_megabytes * MEGABYTE - len(page.encode())) * 3 / 4) - 1024  # base64: 4 letters for 3 bytes
    try:
        data = PageData([Path(run) for run in runs], room, names)
    except OSError as error:  # rights, or a run that goes on and has just removed its oldest records
        raise DataError(f"A run cannot be read ({error}): check its folder and its rights, and try again.") from error
    packed = data.packed()
    html = page.replace(PLACE, base64.b64encode(packed).decode("ascii"))
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_whole(output, html.encode())
    except (OSError, ValueError) as error:
        reason = str(error).rstrip(".")
        raise ConfigError(f"The page cannot be written to {output} ({reason}): give another --output.") from error
    notes = {run.name: run.as_json()["notes"] for run in data.runs}
    return Report(output, len(html.encode()), sum(len(run.records) for run in data.runs), notes)


def page_template() -> str:
    """Return the built page, without data."""
    return files("vgr_trl.reporting").joinpath(PAGE).read_text(encoding="utf-8")
