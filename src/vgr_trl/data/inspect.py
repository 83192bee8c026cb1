"""Inspect a data set before training: count kinds of rows, list unusable rows, and show a sample."""

import base64
import io
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from random import Random
from typing import Any

import xxhash
from datasets import Dataset, Features, IterableDataset, List, Value, concatenate_datasets
from jinja2 import Environment, StrictUndefined

from vgr_trl.data.checked_rows import REASON, RowOptions, SkippedRow, examine_row, map_rows, ready_row
from vgr_trl.data.images import folder_of, image_bytes, images_of
from vgr_trl.data.prompts import SIZES, PromptLengths, to_parts
from vgr_trl.data.read_row import KEYS, Keys, known_names, reason_of, renamed_row, require_columns, undecoded
from vgr_trl.errors import DataError, printable
from vgr_trl.rewards.answers import LETTERS
from vgr_trl.rewards.equality import is_value, read_date, read_gold
from vgr_trl.rewards.phrases import POLARITY, split_list, strip_article

LIMITS = (1024, 2048, 4096)  # values of `max_prompt_length` to report if none is given
STREAMED = 10_000  # rows of a stream that are summarised at a time
SUMMARY = Features(
    {name: Value("string") for name in ("id", "source", "solution", REASON)}
    | {"choices": List(Value("string")), "length": Value("int32"), "tokens": List(Value("int32"))}
    | {SIZES: List(List(Value("int32"))), "digests": List(Value("string"))}
)
LITERAL = "open answers that match nothing but the same text"
# Tables that are sorted by the number of rows.
BY_COUNT = ("rows by source", "most frequent answers to open questions", LITERAL, "skipped")


def report(rows: Iterable[Mapping[str, Any]]) -> str:
    """Count rows with the columns of `SUMMARY` by source, answer, size and reason, as tables with bars."""
    counts, left_out = defaultdict[str, Counter[str]](Counter), Counter[str]()  # title → line → rows or images
    total = 0
    for row in rows:
        total += 1
        if row[REASON] is not None:
            left_out[kind_of(row[REASON])] += 1
            continue
        choices, length = row["choices"], row.get("length")
        right = [] if row["solution"] is None else [to_one_line(row["solution"])[:80]]
        counts["rows by source"][to_one_line(row["source"])] += 1
        counts["rows by number of choices"][str(len(choices)) if choices else "open"] += 1
        counts["multiple-choice rows by right letter"].update(right if choices else [])
        counts["most frequent answers to open questions"].update([] if choices else right)
        counts[LITERAL].update([] if choices else filter(is_literal, right))
        counts["rows by number of images"][str(len(row[SIZES]))] += 1
        counts["images by pixels of the shorter side"].update(power_class(min(size)) for size in row[SIZES])
        counts["images by tokens"].update(map(power_class, row.get("tokens") or ()))
        counts["prompt length in tokens, images included"].update([] if length is None else [power_class(length)])
    text = []
    for title, table in {**counts, "skipped": left_out}.items():
        lines = sorted(table.items(), key=lambda line: (len(line[0]), line[0]))
        text += ["", title] * bool(lines)
        for name, count in table.most_common(12) if title in BY_COUNT else lines:
            share = count / (total if table is left_out else table.total())
            text.append(f"  {count:>9,}  {share:>6.1%}  {'█' * round(20 * share):20}  {name}")
    return "\n".join(text)


def is_literal(gold: str) -> bool:
    """Return whether only the same text equals an open reference: a formula that cannot be read, or a sentence."""
    said = read_gold(gold)
    is_read = said in POLARITY or read_date(strip_article(said)) or all(map(is_value, split_list(said)))
    return not is_read and (len(gold.split()) > 8 or bool(re.search(r"\d|[\\√π^=]", gold)))


def power_class(number: int) -> str:
    """Return the class of a number above 0 between powers of two, for example `256 to 511`."""
    low = 1 << (number.bit_length() - 1)
    return f"{low} to {2 * low - 1}"


def kind_of(reason: str) -> str:
    """Return a reason with an ellipsis for quotations, names of files and numbers, which differ from row to row."""
    reason = re.sub(r"(?<!\w)'[^']*'|\"[^\"]*\"|\([^()]*\)", "…", reason)
    reason = re.sub(r"\b(file) .+ (does not exist|is outside .*: )", r"\1 … \2", reason)
    return to_one_line(re.sub(r"(?<!UTF-)\d[\d,.x]*(?<![,.])", "…", reason)[:160])


def to_one_line(text: str) -> str:
    """Return a text of the data on one line for a terminal, with invisible characters as their numbers."""
    return printable(" ".join(text.split()))


@dataclass
class Findings:
    """Findings in a split: the text, the unusable rows, and a sample of usable rows for the page."""

    rows: int
    usable: int
    skipped: list[SkippedRow]
    digests: Counter[str]  # hash of an image file → usable rows that show it
    sample: list[dict[str, Any]]
    text: str


def summarise(
    row: Mapping[str, Any], options: RowOptions, lengths: PromptLengths | None, hashes: bool
) -> dict[str, Any]:
    """Return the columns of `SUMMARY` for a row.

    Args:
        row: row of the data.
        options: requirements.
        lengths: measures the prompt; None: it is not measured.
        hashes: whether to hash the image files.
    """
    examined = examine_row(row, options)
    about: dict[str, Any] = dict.fromkeys(SUMMARY) | {REASON: examined[REASON], SIZES: examined[SIZES]}
    about |= {"id": None if row.get("id") is None else str(row["id"]), "source": str(row.get("source") or "not stated")}
    try:
        if examined[REASON] is None and lengths is not None:
            about["length"] = lengths(examined)
            about["tokens"] = [lengths.image_tokens([size]) + 1 for size in examined[SIZES]]
    except DataError as error:
        about[REASON] = reason_of(error)
    if (right := examined["right"]) is not None:
        about["choices"] = list(right.choices) or None
        about["solution"] = LETTERS[right.index] if right.choices else str(examined["solution"])
    if hashes and about[REASON] is None:
        files = [image_bytes(value, folder_of(row, options.root)) for value in images_of(row)]
        about["digests"] = [*{xxhash.xxh3_128_hexdigest(data) for data in files}]
    return about


def inspect_rows(
    dataset: Dataset | IterableDataset,
    options: RowOptions,
    split: str = "train",
    *,
    keys: Keys = KEYS,
    lengths: PromptLengths | None = None,
    hashes: bool = False,
    samples: int = 12,
    seed: int = 0,
    limit: int | None = None,
) -> Findings:
    """Check every row as training does, and decode the images of a sample of rows.

    Args:
        dataset: the rows.
        options: requirements.
        split: its name in messages.
        keys: accepted names of columns.
        lengths: measures prompts; None: they are not measured.
        hashes: whether to hash images, to compare splits.
        samples: number of rows in the sample.
        seed: seed of the sample.
        limit: `max_prompt_length`, to count longer prompts.

    Raises:
        DataError: the data have no rows, or lack the needed columns.
    """
    rows = undecoded(dataset)
    require_columns(rows, split, options.needs_solution, keys)

    def examine(row: Mapping[str, Any]) -> dict[str, Any]:
        return summarise(renamed_row(row, keys), options, lengths, hashes)

    if isinstance(rows, Dataset):
        names, title = known_names(rows.column_names, keys), f"Reading rows ({split})"
        rows, keys = rows.select_columns(list(names)).rename_columns(names), KEYS
        key, in_parallel = [options, hashes, lengths and lengths.key], not (lengths and lengths.needs_pixels)
        summaries = map_rows(rows, examine, SUMMARY, key, title, root=options.root, in_parallel=in_parallel)
    else:
        stream = map(examine, rows)
        parts = iter(lambda: list(islice(stream, STREAMED)), [])
        summaries = concatenate_datasets([Dataset.from_list(part, features=SUMMARY) for part in parts])
    usable = [place for place, reason in enumerate(summaries[REASON][:]) if reason is None]
    reasons = enumerate(zip(summaries["id"][:], summaries[REASON][:], strict=True))
    skipped = [SkippedRow(split, place, name, reason) for place, (name, reason) in reasons if reason is not None]
    drawn = sorted(Random(seed).sample(usable, min(samples, len(usable))))
    picked = rows.select(drawn) if isinstance(rows, Dataset) else (row for n, row in enumerate(rows) if n in drawn)
    pairs = zip(drawn, picked, strict=False)
    shown = [show_row(renamed_row(row, keys), options, {**summaries[place], "row": place}) for place, row in pairs]
    digests = Counter(digest for of_row in summaries["digests"][:] for digest in of_row or ())
    text = _describe(split, summaries, skipped, (limit // 2, limit, 2 * limit) if limit else LIMITS)
    return Findings(len(summaries), len(usable), skipped, digests, list(filter(None, shown)), text)


def _describe(split: str, summaries: Dataset, skipped: Sequence[SkippedRow], limits: Sequence[int]) -> str:
    """Return the report on a split: tables, the first three skipped rows of each kind, rows above the limits.

    Args:
        split: name of the split.
        summaries: columns of `SUMMARY`.
        skipped: unusable rows.
        limits: values of `max_prompt_length`, in tokens.
    """
    examples = defaultdict[str, list[str]](list)  # kind of reason → lines about the first three rows
    for row in skipped:
        if len(lines := examples[kind_of(row.reason)]) < 3:
            reason = to_one_line(row.reason)[:200]
            lines.append(f"  row {row.row}, counted from 0 (id {str(row.id)[:60]!a}): {reason}")
    unreadable = sum(row.reason.startswith("solution is") for row in skipped)
    bad = f"{len(skipped):,} unusable" if skipped else "all usable"
    bad += f"; {unreadable:,} because of an unreadable answer" if unreadable else ""
    summary = report(summaries.remove_columns("digests"))
    text = [f"{split}: {len(summaries):,} rows, {bad}.", summary, *chain(*examples.values()), ""]
    measured = [length for length in summaries["length"][:] if length is not None]
    for limit in limits if measured else ():
        longer = sum(length > limit for length in measured)
        text.append(f"max_prompt_length={limit} skips {longer:,} rows ({longer / len(measured):.1%}).")
    return "\n".join(text)


def show_row(row: Mapping[str, Any], options: RowOptions, about: dict[str, Any]) -> dict[str, Any] | None:
    """Return the summary of a row with its answer, messages and pictures for the page, or None for a damaged row.

    Args:
        row: row of the data.
        options: requirements.
        about: the row's summary.
    """
    try:
        ready = ready_row(row, options)
    except DataError:
        return None
    pictures = []
    for image in images_of(ready)[:8]:
        small, buffer = image.copy(), io.BytesIO()
        small.thumbnail((640, 640))  # twelve questions stay far below 10 MB
        small.save(buffer, "JPEG", quality=85)
        url = "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()
        pictures.append({"url": url, "width": image.width, "height": image.height})
    answer: Any = about["solution"] or ready.get("solution")
    if about["choices"]:
        answer += f". {about['choices'][LETTERS.index(answer)]}"
    messages = [
        (turn["role"], "\n".join(part.get("text") or f"[{part['type']}]" for part in to_parts(turn["content"])))
        for turn in ready["prompt"]
    ]
    return about | {"answer": answer, "messages": messages, "pictures": pictures}


def page(findings: Findings, source: str, seed: int) -> bytes:
    """Return the page in UTF-8, with escaped texts of the data and embedded images.

    Args:
        findings: findings in the rows.
        source: title of the page.
        seed: seed of the sample, which the page names.
    """

    def finalize(value: Any) -> Any:
        return printable(value) if isinstance(value, str) else value

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, finalize=finalize)
    template = environment.from_string(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
    return template.render(findings=findings, source=source, seed=seed).encode("utf-8", "replace")
