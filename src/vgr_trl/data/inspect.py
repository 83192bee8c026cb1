"""Inspect a data set before training: rows that cannot be used, what the others consist of and cost, and samples."""

import base64
import io
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any

from datasets import Dataset, IterableDataset
from jinja2 import Environment, StrictUndefined
from PIL import Image
from tqdm.auto import tqdm
from transformers import ProcessorMixin
from trl.data_utils import prepare_multimodal_messages

from vgr_trl.data.columns import KEYS, UNREADABLE, Keys, renamed_row, require_columns, undecoded
from vgr_trl.data.convert import TITLES, Counts, count_row, kind_of, on_one_line, power_class, tables
from vgr_trl.data.convert import report as report_counts
from vgr_trl.data.images import images_of, to_rgb
from vgr_trl.data.prompts import LETTERS, as_parts
from vgr_trl.data.rows import RowOptions, SkippedRow, ready_row
from vgr_trl.rewards.answers import resolve_solution
from vgr_trl.utils import ConfigError, DataError, RewardError, error_text, printable

LONGEST_SIDE = 640  # pixels of an image on the page; twelve questions stay far below 10 MB
MOST_IMAGES = 8  # of one question
EXAMPLES = 3  # rows listed per reason
TEMPLATE = Path(__file__).with_name("page.html")


@dataclass
class Findings:
    """What a pass over the rows of a split has found.

    Attributes:
        split: its name.
        rows: how many rows were looked at.
        usable: how many of them can be trained on.
        counts: what the usable rows consist of, and the reasons of the others.
        examples: kind of reason → the first rows that were left out for it.
        lengths: prompt length → usable rows that have it, in tokens; empty if it was not measured.
        sample: usable rows drawn at random, in their order.
    """

    split: str
    rows: int = 0
    usable: int = 0
    counts: Counts = field(default_factory=lambda: defaultdict(Counter))
    examples: dict[str, list[SkippedRow]] = field(default_factory=lambda: defaultdict(list))
    lengths: Counter[int] = field(default_factory=Counter)
    sample: list[dict[str, Any]] = field(default_factory=list)

    @property
    def headline(self) -> str:
        """How many rows can be used, in one sentence."""
        bad = self.rows - self.usable
        return f"{self.split}: {self.rows:,} rows, of which {f'{bad:,} cannot' if bad else 'every one can'} be used."


def inspect_rows(
    dataset: Dataset | IterableDataset,
    options: RowOptions,
    *,
    keys: Keys = KEYS,
    length_of: Callable[[Mapping[str, Any]], int] | None = None,
    split: str = "train",
    samples: int = 12,
    seed: int = 0,
    on_skipped: Callable[[SkippedRow], Any] = lambda row: None,
) -> Findings:
    """Look at every row once, in memory that does not grow with their number.

    Args:
        dataset: as `vgr_trl.data.load` gives it.
        options: what a row must satisfy, as in training.
        keys: names of the columns.
        length_of: tokens of the prompt of a ready row; None: lengths are not measured.
        samples: usable rows to draw, each with the same chance (reservoir sampling).
        on_skipped: called for each row that cannot be used.

    Raises:
        ConfigError: there are videos, and PyAV is not installed.
        DataError: the data have no rows, or lack the needed columns.
    """
    rows, findings, random, has_columns = undecoded(dataset), Findings(split), Random(seed), False
    total = len(dataset) if isinstance(dataset, Dataset) else None
    for index, row in enumerate(tqdm(rows, desc=f"inspect ({split})", unit=" rows", total=total, delay=1)):
        findings.rows += 1
        if not has_columns and row.get(UNREADABLE) is None:
            require_columns(row, split, options.needs_solution, keys, rows.features)
            has_columns = True
        row = renamed_row(row, keys)
        try:
            ready = ready_row(row, options)
            length = None if length_of is None else length_of(ready)
        except (DataError, RewardError) as error:
            skipped = SkippedRow(split, index, row.get("id"), str(error).rstrip("."))
            on_skipped(skipped)
            kind = kind_of(skipped.reason)
            findings.counts["reasons"][kind] += 1
            findings.examples[kind] = [*findings.examples[kind], skipped][:EXAMPLES]
            continue
        findings.usable += 1
        if length is not None:
            findings.lengths[length] += 1
            findings.counts["lengths"][power_class(length)] += 1
        choices, right, answer = ready.get("choices"), None, ready.get("solution")
        if options.needs_solution:
            resolved = resolve_solution(answer, choices, ready.get("label_idx"))
            right = answer if not choices or resolved.index is None else LETTERS[resolved.index]
            answer = f"{right}. {resolved.text}" if choices else answer
        count_row(findings.counts, str(row.get("source") or "not stated"), choices, len(images_of(ready)), right)
        place = len(findings.sample) if len(findings.sample) < samples else random.randrange(findings.usable)
        if place < samples:
            findings.sample[place : place + 1] = [sampled(ready, index, answer, length)]
    if findings.rows == 0:
        raise DataError(f"The {split} data set has no rows: give a data set with at least one.")
    findings.sample.sort(key=lambda one: one["row"])
    return findings


def sampled(row: Mapping[str, Any], index: int, answer: Any, length: int | None) -> dict[str, Any]:
    """Return what the page shows of a ready row, which is the `index`-th of its split."""
    about = {"row": index, "answer": answer, "length": length, "id": row.get("id"), "source": row.get("source")}
    about["messages"] = [
        (turn["role"], "\n".join(part.get("text") or f"[{part['type']}]" for part in as_parts(turn["content"])))
        for turn in row["prompt"]
    ]
    about["pictures"] = list(map(picture, images_of(row)[:MOST_IMAGES]))
    return about | {"more_images": len(images_of(row)) - len(about["pictures"])}


def picture(image: Image.Image) -> dict[str, Any]:
    """Return a small JPEG of `image`, what is transparent white, as a data URL, and its size in pixels."""
    small, buffer = to_rgb(image).copy(), io.BytesIO()
    small.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
    small.save(buffer, "JPEG", quality=85)
    url = "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()
    return {"url": url, "width": image.width, "height": image.height}


def too_long(lengths: Mapping[int, int], limit: int | None) -> str:
    """Return how many rows `max_prompt_length` leaves out, in one sentence; none if there is no limit or length."""
    if limit is None or not lengths:
        return ""
    rows = sum(rows for length, rows in lengths.items() if length > limit)
    return f"max_prompt_length={limit} leaves {rows:,} rows out, with longer prompts."


def report(findings: Findings, limit: int | None) -> str:
    """Return the findings as a text for the terminal."""
    lines = [findings.headline, report_counts(findings.counts)]
    for row in chain(*findings.examples.values()):
        lines.append(f"  row {row.row} (id {str(row.id)[:60]!a}): {on_one_line(row.reason)[:200]}")
    lines += ["", too_long(findings.lengths, limit)]
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
    shown = {"tables": tables(findings.counts), "titles": TITLES, "too_long": too_long(findings.lengths, limit)}
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    text = template.render(findings=findings, source=source, seed=seed, **shown)
    return text.encode("utf-8", "replace")


def prompt_tokens(processor: Any, row: Mapping[str, Any]) -> int:
    """Return the tokens of a ready row's prompt as the trainer counts them, image tokens included.

    Args:
        processor: of the model, or its tokenizer for text alone.
        row: with `prompt`, and decoded images if any.

    Raises:
        ConfigError: the row has images, and `processor` is a tokenizer.
        DataError: the processor refuses the prompt.
    """
    prompt, images = row["prompt"], images_of(row)
    is_processor = isinstance(processor, ProcessorMixin)
    if images and not is_processor:
        raise ConfigError(f"The data have images, but {type(processor).__name__} reads text only.")
    messages = prepare_multimodal_messages(prompt, images=images or None) if is_processor else prompt
    options = {"add_generation_prompt": True, "tokenize": True, "return_dict": True}
    try:
        return len(processor.apply_chat_template(conversation=[messages], **options)["input_ids"][0])
    except Exception as error:  # processors raise whatever a prompt leads them to
        raise DataError(f"the model's processor refuses its prompt ({error_text(error)})") from error
