"""One pass over a data set before training: which rows cannot be used and why, what the others consist of."""

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from datasets import Dataset, IterableDataset
from tqdm.auto import tqdm

from vgr_trl.data.build.statistics import Statistics, kind_of
from vgr_trl.data.inspect.sample import Sampled, sampled
from vgr_trl.data.rows.columns import UNREADABLE, images_of, undecoded
from vgr_trl.data.rows.images.sizes import ANY_SIZE, ImageRule
from vgr_trl.data.rows.images.video import DEFAULT_VIDEO_OPTIONS, VideoOptions
from vgr_trl.data.rows.naming import renamed_row, require_columns
from vgr_trl.data.rows.reading import KEYS, Keys
from vgr_trl.data.rows.schema import ready_row, row_problem
from vgr_trl.data.rows.skipped import SkippedRow
from vgr_trl.data.rows.text.prompts import LETTERS, SYSTEM_PROMPT, SystemTemplate
from vgr_trl.errors import DataError, words_of
from vgr_trl.rewards import resolve_solution

EXAMPLES = 3  # bad rows that are shown per reason


@dataclass(frozen=True)
class Checks:
    """What a row must satisfy, as in training.

    Attributes:
        root: folder that relative paths of images and videos start from.
        needs_solution: whether a row must say what is right.
        system_prompt: put before each `problem`.
        videos: rate and limit of the frames of videos.
        length_of: tokens of the prompt of a ready row; None: lengths are not measured.
        special: finds the special tokens of the model's tokenizer; None: they are not known.
        keys: names of the columns.
        images: the sizes that images may have, and are brought to.
    """

    root: Path = Path()
    needs_solution: bool = True
    system_prompt: str | SystemTemplate | None = SYSTEM_PROMPT
    videos: VideoOptions = DEFAULT_VIDEO_OPTIONS
    length_of: Callable[[Mapping[str, Any]], int] | None = None
    special: re.Pattern[str] | None = None
    keys: Keys = KEYS
    images: ImageRule = ANY_SIZE


@dataclass
class Reason:
    """Why rows are left out: how many, and the first of them."""

    count: int = 0
    examples: list[SkippedRow] = field(default_factory=list)


@dataclass
class Findings:
    """What a pass over the rows of a split has found.

    Attributes:
        split: its name.
        rows: how many rows were looked at.
        usable: how many of them can be trained on.
        reasons: kind of reason → the rows left out for it.
        counts: what the usable rows consist of.
        lengths: prompt length → usable rows that have it, in tokens; empty if it was not measured.
        sample: usable rows drawn at random, in their order.
    """

    split: str
    rows: int = 0
    usable: int = 0
    reasons: dict[str, Reason] = field(default_factory=dict)
    counts: Statistics = field(default_factory=Statistics)
    lengths: Counter[int] = field(default_factory=Counter)
    sample: list[Sampled] = field(default_factory=list)

    @property
    def bad(self) -> int:
        """The number of rows that are left out."""
        return self.rows - self.usable


def inspect_rows(
    dataset: Dataset | IterableDataset,
    checks: Checks,
    *,
    split: str = "train",
    samples: int = 12,
    seed: int = 0,
    on_skipped: Callable[[SkippedRow], None] = lambda row: None,
) -> Findings:
    """Look at every row once, in memory that does not grow with their number.

    Args:
        dataset: as `vgr_trl.data.load` gives it.
        samples: usable rows to draw, each with the same chance.
        on_skipped: called for each row that cannot be used.

    Raises:
        ConfigError: there are videos, and PyAV is not installed.
        DataError: the data have no rows, or lack the needed columns.
    """
    rows = undecoded(dataset)
    findings, draw = Findings(split), _Draw(samples, Random(seed))
    has_columns = False
    total = len(dataset) if isinstance(dataset, Dataset) else None
    for index, row in enumerate(tqdm(rows, desc=f"inspect ({split})", unit=" rows", total=total, delay=1)):
        if not has_columns and row.get(UNREADABLE) is None:
            features = getattr(rows, "features", None)
            require_columns(row, split, checks.needs_solution, checks.keys, features)
            has_columns = True
        findings.rows += 1
        row = renamed_row(row, checks.keys)
        reason = _count(row, index, checks, findings, draw)
        if reason is not None:
            skipped = SkippedRow(split, index, row.get("id"), reason)
            found = findings.reasons.setdefault(kind_of(reason), Reason())
            found.count += 1
            if len(found.examples) < EXAMPLES:
                found.examples.append(skipped)
            on_skipped(skipped)
    if findings.rows == 0:
        raise DataError(f"The {split} data set has no rows: give a data set with at least one.")
    findings.sample = sorted(draw.drawn, key=lambda one: one.row)
    return findings


def _count(row: Mapping[str, Any], index: int, checks: Checks, findings: Findings, draw: "_Draw") -> str | None:
    """Add a usable row to `findings`, or return why it is none."""
    options: dict[str, Any] = {name: getattr(checks, name) for name in ("root", "system_prompt", "videos", "images")}
    reason = row_problem(row, needs_solution=checks.needs_solution, special=checks.special, **options)
    if reason is not None:
        return reason
    ready = ready_row(row, **options)
    length = None
    if checks.length_of is not None:
        try:
            length = checks.length_of(ready)
        except Exception as error:  # processors raise whatever a prompt leads them to
            return f"the model's processor refuses its prompt ({words_of(error)})"
        findings.lengths[length] += 1
    findings.usable += 1
    choices = ready.get("choices")
    right = _right_letter(ready) if checks.needs_solution else None
    answer = ready.get("solution") if checks.needs_solution and not choices else None
    findings.counts.count(str(row.get("source") or "not stated"), choices, len(images_of(ready)), right, answer)
    if (place := draw.place()) is not None:
        draw.put(place, sampled(ready, index, right, length))
    return None


def _right_letter(row: Mapping[str, Any]) -> str | None:
    index = resolve_solution(row.get("solution"), row.get("choices"), row.get("label_idx")).index
    return None if index is None else LETTERS[index]


class _Draw:
    """A sample of a stream in which every row has the same chance (reservoir sampling)."""

    def __init__(self, size: int, random: Random) -> None:
        self.size = size
        self.random = random
        self.seen = 0
        self.drawn: list[Sampled] = []

    def place(self) -> int | None:
        """Return the place that the next row takes in the sample, None if it takes none."""
        self.seen += 1
        if len(self.drawn) < self.size:
            return len(self.drawn)
        place = self.random.randrange(self.seen)
        return place if place < self.size else None

    def put(self, place: int, row: Sampled) -> None:
        """Put a row there, for the one that was there before if any."""
        self.drawn[place : place + 1] = [row]
