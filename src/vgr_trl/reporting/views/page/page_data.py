"""What the page of a report holds: curves, records and thumbnails of runs, within a bound of bytes."""

import base64
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vgr_trl.reporting.records.json_lines import encode_record
from vgr_trl.reporting.records.record import Record
from vgr_trl.reporting.records.recorded_run import Run
from vgr_trl.reporting.views.page.choosing_records import ends_first, interleaved
from vgr_trl.reporting.views.page.curves import Curves, read_curves
from vgr_trl.reporting.views.page.run_sources import (
    open_run,
    output_dir_of,
    read_thumbnail,
    records_of,
    size_of_records,
    unique_names,
)

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
