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
from vgr_trl.data.convert import TITLES, Counts, count_row, kind_of, on_one_line, tables
from vgr_trl.data.convert import report as report_counts
from vgr_trl.data.images import images_of, to_rgb
from vgr_trl.data.prompts import LETTERS, as_parts
from vgr_trl.data.rows import RowOptions, SkippedRow, ready_row
from vgr_trl.options import check_options, option
from vgr_trl.rewards.answers import resolve_solution
from vgr_trl.utils import ConfigError, DataError, RewardError, error_text, printable

MOST_BINS = 12
LONGEST_SIDE = 640  # pixels of an image on the page; twelve questions stay far below 10 MB
MOST_IMAGES = 8  # of one question
EXAMPLES = 3  # rows listed per reason
TEMPLATE = Path(__file__).with_name("page.html")


@dataclass(frozen=True)
class Budget:
    """What a rollout costs."""

    max_prompt_length: int | None = option(None, "As in training: longer prompts are left out.", ge=1)
    max_completion_length: int = option(512, "Tokens of a completion.", ge=1)
    num_generations: int = option(8, "Completions of each prompt.", ge=1)
    prompts_per_step: int = option(1, "Prompts of one optimizer step, over all processes.", ge=1)

    def __post_init__(self) -> None:
        check_options(self)


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
    if findings.lengths:
        findings.counts["lengths"] = histogram(findings.lengths)
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


def histogram(lengths: Mapping[int, int]) -> Counter[str]:
    """Return how many rows are in each of at most twelve bins (`200 to 249`) of equal, round width.

    Args:
        lengths: tokens → rows, at least one.
    """
    low, high = min(lengths), max(lengths)
    widths = (step * 10**power for power in range(20) for step in (1, 2, 5))
    width = next(width for width in widths if high // width - low // width < MOST_BINS)
    bins = Counter({f"{start} to {start + width - 1}": 0 for start in range(low // width * width, high + 1, width)})
    for length, rows in lengths.items():
        bins[f"{length // width * width} to {length // width * width + width - 1}"] += rows
    return bins


def costs(lengths: Mapping[int, int], budget: Budget) -> list[str]:
    """Return what prompts and steps cost, one sentence each; none if lengths were not measured."""
    if not lengths:
        return []
    limit = budget.max_prompt_length or max(lengths)
    kept = Counter({length: rows for length, rows in lengths.items() if length <= limit})
    mean = sum(length * rows for length, rows in kept.items()) / max(1, kept.total())
    completions = budget.num_generations * budget.max_completion_length
    shared = budget.prompts_per_step * (mean + completions)
    repeated = budget.prompts_per_step * (budget.num_generations * mean + completions)
    return [
        f"max_prompt_length={limit} leaves {sum(lengths.values()) - kept.total():,} rows out, with longer prompts.",
        f"A step of prompts_per_step={budget.prompts_per_step} with num_generations={budget.num_generations} and "
        f"max_completion_length={budget.max_completion_length} has at most {shared:,.0f} tokens where a prompt is "
        f"computed once for its completions, {repeated:,.0f} where it is computed for each (prompts of mean length).",
    ]


def report(findings: Findings, budget: Budget) -> str:
    """Return the findings as a text for the terminal."""
    lines = [findings.headline, report_counts(findings.counts)]
    for row in chain(*findings.examples.values()):
        lines.append(f"  row {row.row} (id {str(row.id)[:60]!a}): {on_one_line(row.reason)[:200]}")
    lines += ["", *costs(findings.lengths, budget)]
    return "\n".join(lines) + "\n"


def page(findings: Findings, budget: Budget, source: str, seed: int = 0) -> bytes:
    """Return the page, in UTF-8: text of the data is shown as text, images are inside.

    Args:
        source: the title, the path of the data.
    """

    def finalize(value: Any) -> Any:
        return printable(value) if isinstance(value, str) else value

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, finalize=finalize)
    shown = {"tables": tables(findings.counts), "titles": TITLES, "sentences": costs(findings.lengths, budget)}
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
        raise ConfigError(
            f"The data have images, but {type(processor).__name__} reads text only: name a vision-language model."
        )
    messages = prepare_multimodal_messages(prompt, images=images or None) if is_processor else prompt
    options = {"add_generation_prompt": True, "tokenize": True, "return_dict": True}
    try:
        return len(processor.apply_chat_template(conversation=[messages], **options)["input_ids"][0])
    except Exception as error:  # processors raise whatever a prompt leads them to
        raise DataError(f"the model's processor refuses its prompt ({error_text(error)})") from error
