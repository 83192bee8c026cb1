"""Inspect a data set before training: rows that cannot be used, what the others consist of and cost, and samples."""

import base64
import io
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy
from datasets import Dataset, IterableDataset
from jinja2 import Environment, StrictUndefined
from PIL import Image
from tqdm.auto import tqdm
from transformers import ProcessorMixin
from trl.data_utils import prepare_multimodal_messages

from vgr_trl.data.columns import KEYS, UNREADABLE, Keys, images_of, renamed_row, require_columns, undecoded
from vgr_trl.data.convert import MOST_LINES, TITLES, Statistics, kind_of, on_one_line, table_lines, tables
from vgr_trl.data.images import to_rgb
from vgr_trl.data.prompts import LETTERS, as_parts
from vgr_trl.data.rows import RowOptions, SkippedRow, ready_row
from vgr_trl.rewards.answers import resolve_solution
from vgr_trl.utils import ConfigError, DataError, RewardError, error_text

MOST_BINS = 12
LONGEST_SIDE = 640  # pixels of a shown image; twelve questions stay far below 10 MB
MOST_IMAGES = 8  # of one question
EXAMPLES = 3  # bad rows that are shown per reason
BAR = 40  # characters of the longest bar
LONGEST_REASON = 200
HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\u200e\u200f\u061c]")
TEMPLATE = Path(__file__).with_name("page.html")


@dataclass(frozen=True)
class Budget:
    """What a rollout costs.

    Attributes:
        max_prompt_length: in tokens; longer prompts are left out. None: no limit.
        max_completion_length: in tokens.
        num_generations: completions of each prompt.
        prompts_per_step: prompts of one optimizer step, over all processes.

    Raises:
        ConfigError: a number is below 1.
    """

    max_prompt_length: int | None = None
    max_completion_length: int = 512
    num_generations: int = 8
    prompts_per_step: int = 1

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}: give an integer of at least 1.")


def cost(lengths: Mapping[int, int], budget: Budget) -> dict[str, float]:
    """Return what rows with `lengths` (tokens → rows, at least one) cost.

    Returns:
        shortest, median, percentile_95, longest: of the prompts, in tokens; percentiles are the smallest length that
            at least that share of the rows does not exceed.
        too_long: rows above the limit.
        mean: of the prompts within the limit, in tokens; 0 if there are none.
        shared, repeated: most tokens of a step with prompts of mean length and completions of full length, each prompt
            computed once for its completions, or once for each.
    """
    values = numpy.array(sorted(Counter(lengths).elements()))
    kept = values if budget.max_prompt_length is None else values[values <= budget.max_prompt_length]
    mean = float(kept.mean()) if kept.size else 0.0
    completions = budget.num_generations * budget.max_completion_length
    quantiles = numpy.quantile(values, (0, 0.5, 0.95, 1), method="inverted_cdf").tolist()
    return {
        **dict(zip(("shortest", "median", "percentile_95", "longest"), quantiles, strict=True)),
        "too_long": len(values) - len(kept),
        "mean": mean,
        "shared": round(budget.prompts_per_step * (mean + completions)),
        "repeated": round(budget.prompts_per_step * (budget.num_generations * mean + completions)),
    }


def histogram(lengths: Mapping[int, int]) -> list[tuple[int, int, int]]:
    """Return at most twelve bins (first length, last length, rows) of equal, round width, from shortest to longest.

    Args:
        lengths: tokens → rows, at least one.
    """
    low, high = min(lengths), max(lengths)
    width = next(
        step * 10**power
        for power in range(20)
        for step in (1, 2, 5)
        if high // (step * 10**power) - low // (step * 10**power) < MOST_BINS
    )
    bins = dict.fromkeys(range(low // width, high // width + 1), 0)
    for length, rows in lengths.items():
        bins[length // width] += rows
    return [(number * width, number * width + width - 1, rows) for number, rows in bins.items()]


def sampled(row: Mapping[str, Any], index: int, right: str | None, length: int | None) -> dict[str, Any]:
    """Return what the page shows of a row.

    Args:
        row: ready, with `prompt` and decoded images.
        index: its place in the split.
        right: letter of its right option, None for an open question.
        length: tokens of its prompt, None where not measured.
    """
    images = images_of(row)
    stated = row.get("solution") if row.get("solution") is not None else row.get("label_idx")
    return {
        "row": index,
        "id": row.get("id"),
        "source": row.get("source"),
        "messages": [
            (turn["role"], "\n".join(part.get("text") or f"[{part['type']}]" for part in as_parts(turn["content"])))
            for turn in row["prompt"]
        ],
        "choices": [
            (letter, choice, letter == right) for letter, choice in zip(LETTERS, row.get("choices") or (), strict=False)
        ],
        "solution": "" if stated is None else str(stated),
        "pictures": [picture(image) for image in images[:MOST_IMAGES]],
        "more_images": max(0, len(images) - MOST_IMAGES),
        "length": length,
    }


def picture(image: Image.Image) -> dict[str, Any]:
    """Return a small JPEG of `image`, what is transparent white, as a data URL, and its size in pixels."""
    small = to_rgb(image).copy()
    small.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
    buffer = io.BytesIO()
    small.save(buffer, "JPEG", quality=85)
    url = "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()
    return {"url": url, "width": image.width, "height": image.height}


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
    sample: list[dict[str, Any]] = field(default_factory=list)

    @property
    def bad(self) -> int:
        """The number of rows that are left out."""
        return self.rows - self.usable


def inspect_rows(
    dataset: Dataset | IterableDataset,
    options: RowOptions,
    *,
    keys: Keys = KEYS,
    length_of: Callable[[Mapping[str, Any]], int] | None = None,
    split: str = "train",
    samples: int = 12,
    seed: int = 0,
    on_skipped: Callable[[SkippedRow], None] = lambda row: None,
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
    rows, findings, random = undecoded(dataset), Findings(split), Random(seed)
    has_columns = False
    total = len(dataset) if isinstance(dataset, Dataset) else None
    for index, row in enumerate(tqdm(rows, desc=f"inspect ({split})", unit=" rows", total=total, delay=1)):
        if not has_columns and row.get(UNREADABLE) is None:
            require_columns(row, split, options.needs_solution, keys, getattr(rows, "features", None))
            has_columns = True
        findings.rows += 1
        row = renamed_row(row, keys)
        try:
            ready = ready_row(row, options)
            length = _measured(ready, length_of)
        except (DataError, RewardError) as error:
            skipped = SkippedRow(split, index, row.get("id"), str(error).rstrip("."))
            reason = findings.reasons.setdefault(kind_of(skipped.reason), Reason())
            reason.count += 1
            reason.examples += [skipped] if len(reason.examples) < EXAMPLES else []
            on_skipped(skipped)
            continue
        findings.usable += 1
        right, answer = None, None
        if options.needs_solution:
            resolved = resolve_solution(ready.get("solution"), ready.get("choices"), ready.get("label_idx"))
            right = None if resolved.index is None else LETTERS[resolved.index]
            answer = None if ready.get("choices") else ready.get("solution")
        source = str(row.get("source") or "not stated")
        findings.counts.count(source, ready.get("choices"), len(images_of(ready)), right, answer)
        if length is not None:
            findings.lengths[length] += 1
        place = len(findings.sample) if len(findings.sample) < samples else random.randrange(findings.usable)
        if place < samples:
            findings.sample[place : place + 1] = [sampled(ready, index, right, length)]
    if findings.rows == 0:
        raise DataError(f"The {split} data set has no rows: give a data set with at least one.")
    findings.sample.sort(key=lambda one: one["row"])
    return findings


def _measured(row: Mapping[str, Any], length_of: Callable[[Mapping[str, Any]], int] | None) -> int | None:
    try:
        return None if length_of is None else length_of(row)
    except Exception as error:  # processors raise whatever a prompt leads them to
        raise DataError(f"the model's processor refuses its prompt ({error_text(error)})") from error


def report(findings: Findings, budget: Budget) -> str:
    """Return the findings as a text for the terminal."""
    lines = [headline(findings), *_reasons(findings), *table_lines(findings.counts)]
    if findings.lengths:
        largest = max(rows for _, _, rows in histogram(findings.lengths))
        lines += ["", "prompt length in tokens, images included"]
        lines += [
            f"  {f'{first:,} to {last:,}':>19}  {rows:>9,}  {'#' * -(-BAR * rows // largest)}"
            for first, last, rows in histogram(findings.lengths)
        ]
        lines += ["", *sentences(findings.lengths, budget)]
    return "\n".join(lines) + "\n"


def headline(findings: Findings) -> str:
    """Return in one sentence how many rows can be used."""
    bad = f"{findings.bad:,} cannot be used" if findings.bad else "every one can be used"
    return f"{findings.split}: {findings.rows:,} rows, of which {bad}."


def sentences(lengths: Mapping[int, int], budget: Budget) -> list[str]:
    """Return what prompts and steps cost, one sentence each; none if lengths were not measured."""
    if not lengths:
        return []
    found, limit = cost(lengths, budget), budget.max_prompt_length
    over = f"max_prompt_length={limit} leaves {found['too_long']:,} rows out, whose prompts are longer."
    if limit is None:
        over = f"No max_prompt_length is given; with {found['longest']} no row is left out."
    return [
        f"Prompts have {found['shortest']:,} to {found['longest']:,} tokens; half have at most {found['median']:,}, "
        f"95 % at most {found['percentile_95']:,}.",
        over,
        f"A step of prompts_per_step={budget.prompts_per_step} with num_generations={budget.num_generations} and "
        f"max_completion_length={budget.max_completion_length} has at most {found['shared']:,} tokens where a prompt "
        f"is computed once for its completions, {found['repeated']:,} where it is computed for each (prompts of mean "
        "length).",
    ]


def _reasons(findings: Findings) -> list[str]:
    lines = []
    for kind, reason in sorted(findings.reasons.items(), key=lambda pair: -pair[1].count)[:MOST_LINES]:
        lines += ["", f"{reason.count:,} left out: {on_one_line(kind)}"]
        for row in reason.examples:
            named = "" if row.id is None else f" (id {str(row.id)[:60]!a})"
            lines.append(f"  row {row.row}{named}: {on_one_line(row.reason)[:LONGEST_REASON]}")
    if (more := len(findings.reasons) - MOST_LINES) > 0:
        lines += ["", f"and rows left out for {more} other reasons."]
    return lines


def page(findings: Findings, budget: Budget, source: str, seed: int = 0) -> bytes:
    """Return the page, in UTF-8: text of the data is shown as text, images are inside.

    Args:
        source: the title, the path of the data.
    """
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=_shown
    )
    environment.filters["without"] = without_options
    bins = histogram(findings.lengths) if findings.lengths else []
    text = environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        findings=findings,
        source=source,
        headline=headline(findings),
        reasons=sorted(findings.reasons.items(), key=lambda pair: -pair[1].count),
        tables={TITLES[name]: counts.items() for name, counts in tables(findings.counts).items()},
        bins=bins,
        most=max((rows for _, _, rows in bins), default=1),
        sentences=sentences(findings.lengths, budget),
        seed=seed,
    )
    return text.encode("utf-8", "replace")


def _shown(value: Any) -> Any:
    """A text with characters that a reader does not see, or that reorder others, as their numbers."""
    return HIDDEN.sub(lambda found: f"⟨U+{ord(found[0]):04X}⟩", value) if isinstance(value, str) else value


def without_options(text: str, choices: list[tuple[str, str, bool]]) -> str:
    """Return a question without the lines of its options at the end, which the page shows below it."""
    options = "".join(f"\n{letter}. {choice}" for letter, choice, _ in choices)
    return text.removesuffix(options) if options else text


def prompt_tokens(processor: Any, row: Mapping[str, Any]) -> int:
    """Return the tokens of a ready row's prompt as the trainer counts them, image tokens included.

    Args:
        processor: of the model, or its tokenizer for text alone.
        row: with `prompt`, and decoded images if any.

    Raises:
        ConfigError: the row has images, and `processor` is a tokenizer.
    """
    prompt, images = row["prompt"], images_of(row)
    is_processor = isinstance(processor, ProcessorMixin)
    if images and not is_processor:
        raise ConfigError(
            f"The data have images, but {type(processor).__name__} reads text only: name a vision-language model."
        )
    if isinstance(prompt, str):
        return len((processor(text=[prompt]) if is_processor else processor([prompt]))["input_ids"][0])
    messages = prepare_multimodal_messages(prompt, images=images or None) if is_processor else prompt
    tokens = processor.apply_chat_template(
        conversation=[messages], add_generation_prompt=True, tokenize=True, return_dict=True
    )
    return len(tokens["input_ids"][0])
