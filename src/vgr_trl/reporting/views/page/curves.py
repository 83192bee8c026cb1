"""Curves of what a trainer logged: read with bounded memory and time, thinned to what a page can show."""

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from sys import intern
from typing import Any, BinaryIO

from vgr_trl.reporting.records.record import LogEntry
from vgr_trl.reporting.records.recorded_run import LOGS_FILE, decoded_logs
from vgr_trl.reporting.signs import first_signs

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
