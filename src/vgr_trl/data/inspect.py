"""Inspect a data set before training: rows that cannot be used, what the others consist of and cost, and samples."""

import base64
import io
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any

import xxhash
from datasets import Dataset, Features, IterableDataset, List, Value
from jinja2 import Environment, StrictUndefined
from PIL import Image
from tqdm.auto import tqdm

from vgr_trl.data.counts import TITLES, Counts, count_row, kind_of, power_class, tables, to_one_line
from vgr_trl.data.counts import report as report_counts
from vgr_trl.data.images import folder_of, image_bytes, images_of, to_rgb
from vgr_trl.data.lengths import SIZES, PromptLengths
from vgr_trl.data.prompts import LETTERS, placed, to_parts
from vgr_trl.data.read_row import KEYS, Keys, renamed_row, require_columns, undecoded
from vgr_trl.data.rows import REASON, RowOptions, SkippedRow, examine_row, map_rows, ready_row
from vgr_trl.rewards.answers import Solution, resolve_solution
from vgr_trl.utils import DataError, printable

LONGEST_SIDE = 640  # pixels of an image on the page; twelve questions stay far below 10 MB
MOST_IMAGES = 8  # of one question
EXAMPLES = 3  # rows listed per reason
LIMITS = (1024, 2048, 4096)  # of `max_prompt_length`, where none is given
TEMPLATE = Path(__file__).with_name("page.html")
SUMMARY = Features(
    {name: Value("string") for name in ("id", "source", "right", REASON)}
    | {"options": Value("int32"), "length": Value("int32"), "tokens": List(Value("int32"))}
    | {SIZES: List(List(Value("int32"))), "digests": List(Value("string"))}
)


@dataclass
class Findings:
    """Findings of a pass over the rows of a split.

    Attributes:
        split: its name.
        rows: how many rows were looked at.
        usable: how many of them can be trained on.
        counts: what the usable rows consist of, and the reasons of the others.
        examples: kind of reason → the first rows that were left out for it.
        unreadable: rows whose answer cannot be read.
        lengths: prompt length → usable rows that have it, in tokens; empty if it was not measured.
        digests: hash of an image's file → usable rows that show it, where hashes were asked for.
        shared: what other splits have in common with this one, in sentences.
        sample: usable rows drawn at random, in their order.
    """

    split: str
    rows: int = 0
    usable: int = 0
    counts: Counts = field(default_factory=lambda: defaultdict(Counter))
    examples: dict[str, list[SkippedRow]] = field(default_factory=lambda: defaultdict(list))
    unreadable: int = 0
    lengths: Counter[int] = field(default_factory=Counter)
    digests: Counter[str] = field(default_factory=Counter)
    shared: list[str] = field(default_factory=list)
    sample: list[dict[str, Any]] = field(default_factory=list)

    @property
    def headline(self) -> str:
        """How many rows can be used, in one sentence."""
        bad = self.rows - self.usable
        found = f"{self.rows:,} rows, {f'{bad:,} of them cannot be used' if bad else 'all usable'}"
        gold = f"; {self.unreadable:,} for an answer that cannot be read" if self.unreadable else ""
        return f"{self.split}: {found}{gold}."


@dataclass(frozen=True)
class InspectOptions:
    """Options for inspecting rows.

    Attributes:
        options: what a row must satisfy, as in training.
        keys: names of the columns.
        lengths: counts the tokens of prompts; None: they are not measured.
        digests: whether files of images are hashed, for comparison with another split.
    """

    options: RowOptions
    keys: Keys = KEYS
    lengths: PromptLengths | None = None
    digests: bool = False


def summarise(row: Mapping[str, Any], looks: InspectOptions) -> dict[str, Any]:
    """Return what is counted of a row, under the names of `SUMMARY`."""
    row = renamed_row(row, looks.keys)
    found = examine_row(row, looks.options)
    number, source = row.get("id"), row.get("source")
    about = dict.fromkeys(SUMMARY) | {"id": None if number is None else str(number)}
    if found[REASON] is None and looks.lengths is not None:
        try:
            about["length"] = looks.lengths({**found, "prompt": placed(found["prompt"])})
            about["tokens"] = [looks.lengths.image_tokens([size]) + 1 for size in found[SIZES]]
        except DataError as error:
            found[REASON] = str(error).rstrip(".")
    if found[REASON] is not None:
        return about | {REASON: found[REASON]}
    if found["right"] is not None:
        about["right"] = format_answer(found["right"], found["solution"])
    if looks.digests:
        root = folder_of(row, looks.options.root)
        about["digests"] = [_digest(image_bytes(value, root)) for value in images_of(row)]
    options = len(found["choices"] or ())
    return about | {"source": str(source or "not stated"), "options": options, SIZES: found[SIZES]}


def _digest(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)


def format_answer(right: Solution, stated: Any) -> str:
    """Return the letter of the right option, or an open answer as it is stated."""
    return LETTERS[right.index] if right.choices and right.index is not None else str(stated)


def inspect_rows(
    dataset: Dataset | IterableDataset, looks: InspectOptions, *, split: str = "train", samples: int = 12, seed: int = 0
) -> tuple[Findings, list[SkippedRow]]:
    """Look at every row, decode the images of a few, and return what was found and the rows that cannot be used.

    Args:
        dataset: as `vgr_trl.data.load` gives it.
        samples: usable rows to draw.

    Raises:
        ConfigError: there are videos, and PyAV is not installed.
        DataError: the data have no rows, or lack the needed columns.
    """
    rows, findings = undecoded(dataset), Findings(split)
    require_columns(rows, split, looks.options.needs_solution, looks.keys)
    examine = partial(summarise, looks=looks)
    if isinstance(rows, Dataset):
        tokens = None if looks.lengths is None else looks.lengths.key
        key = [looks.options, looks.keys, looks.digests, tokens]
        in_parallel = looks.lengths is None or not looks.lengths.needs_pixels
        found: Iterable[Any] = map_rows(rows, examine, SUMMARY, key, f"Reading rows ({split})", in_parallel=in_parallel)
    else:
        found = map(examine, tqdm(rows, desc=f"Reading rows ({split})", unit=" rows", delay=1))
    usable, skipped = [], []
    for place, about in enumerate(found):
        findings.rows += 1
        if about[REASON] is None:
            usable.append(place)
            _count(findings, about)
        else:
            skipped.append(_left_out(findings, SkippedRow(split, place, about["id"], about[REASON])))
    drawn = sorted(Random(seed).sample(usable, min(samples, len(usable))))
    findings.sample = list(_samples(rows, drawn, looks))
    return findings, skipped


def _count(findings: Findings, about: Mapping[str, Any]) -> None:
    counts, options = findings.counts, range(about["options"])
    findings.usable += 1
    count_row(counts, about["source"], options, len(about[SIZES]), about["right"])
    counts["sizes"].update(power_class(min(size)) for size in about[SIZES])
    counts["tokens"].update(map(power_class, about["tokens"] or ()))
    findings.digests.update(set(about["digests"] or ()))
    if about["length"] is not None:
        findings.lengths[about["length"]] += 1
        counts["lengths"][power_class(about["length"])] += 1


def _left_out(findings: Findings, row: SkippedRow) -> SkippedRow:
    kind = kind_of(row.reason)
    findings.counts["reasons"][kind] += 1
    findings.examples[kind] = [*findings.examples[kind], row][:EXAMPLES]
    findings.unreadable += row.reason.startswith("solution is")
    return row


def _samples(rows: Any, drawn: list[int], looks: InspectOptions) -> Iterable[dict[str, Any]]:
    """Yield what the page shows of the rows with these numbers."""
    chosen = set(drawn)
    numbered = zip(drawn, rows.select(drawn), strict=True) if isinstance(rows, Dataset) else enumerate(rows)
    for place, row in numbered:
        if place in chosen:
            try:
                ready = ready_row(renamed_row(row, looks.keys), looks.options)
            except DataError:  # damage that only decoding shows
                continue
            yield sampled(ready, place, looks)


def sampled(row: Mapping[str, Any], place: int, looks: InspectOptions) -> dict[str, Any]:
    """Return what the page shows of a ready row, which is the `place`-th of its split."""
    length = None if looks.lengths is None else looks.lengths(row)
    answer = row.get("solution")
    if looks.options.needs_solution:
        right = resolve_solution(answer, row.get("choices"))
        answer = format_answer(right, answer) + (f". {right.text}" if right.choices else "")
    about = {"row": place, "answer": answer, "length": length, "id": row.get("id"), "source": row.get("source")}
    about |= {"more_images": max(0, len(images_of(row)) - MOST_IMAGES)}
    about["messages"] = [
        (turn["role"], "\n".join(part.get("text") or f"[{part['type']}]" for part in to_parts(turn["content"])))
        for turn in row["prompt"]
    ]
    about["pictures"] = list(map(picture, images_of(row)[:MOST_IMAGES]))
    return about


def picture(image: Image.Image) -> dict[str, Any]:
    """Return a small JPEG of `image`, what is transparent white, as a data URL, and its size in pixels."""
    small, buffer = to_rgb(image).copy(), io.BytesIO()
    small.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
    small.save(buffer, "JPEG", quality=85)
    url = "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()
    return {"url": url, "width": image.width, "height": image.height}


def compare_splits(findings: Findings, others: Iterable[Findings]) -> None:
    """Note the rows whose images are in other splits too, on which a test would measure what was trained on."""
    for other in others:
        if rows := sum(findings.digests[image] for image in findings.digests.keys() & other.digests.keys()):
            findings.shared.append(f"{rows:,} rows of {findings.split} show an image that {other.split} has too.")


def too_long(lengths: Mapping[int, int], limit: int | None) -> list[str]:
    """Return what `max_prompt_length` leaves out at three limits, in one sentence each; none without lengths."""
    total = sum(lengths.values())
    limits = (limit // 2, limit, 2 * limit) if limit else LIMITS
    longer = {most: sum(rows for length, rows in lengths.items() if length > most) for most in limits if total}
    return [
        f"max_prompt_length={most} leaves {rows:,} rows out ({rows / total:.1%}), with longer prompts."
        for most, rows in longer.items()
    ]


def report(findings: Findings, limit: int | None) -> str:
    """Return the findings as a text for the terminal."""
    lines = [findings.headline, report_counts(findings.counts)]
    for row in chain(*findings.examples.values()):
        lines.append(f"  row {row.row} (id {str(row.id)[:60]!a}): {to_one_line(row.reason)[:200]}")
    lines += ["", *findings.shared, *too_long(findings.lengths, limit)]
    return "\n".join(lines) + "\n"


def page(findings: Findings, limit: int | None, source: str, seed: int = 0) -> bytes:
    """Return the page, in UTF-8: text of the data is shown as text, images are inside.

    Args:
        limit: `max_prompt_length`.
        source: the title, the path of the data.
    """

    def finalize(value: Any) -> Any:
        return printable(value) if isinstance(value, str) else value

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, finalize=finalize)
    notes = [*findings.shared, *too_long(findings.lengths, limit)]
    shown = {"tables": tables(findings.counts), "titles": TITLES, "notes": notes}
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    text = template.render(findings=findings, source=source, seed=seed, **shown)
    return text.encode("utf-8", "replace")
