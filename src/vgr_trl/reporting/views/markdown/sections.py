"""Markdown logs of rollouts, appended section by section."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vgr_trl.reporting.records.record import Completion, Record
from vgr_trl.reporting.views.markdown.elements import fenced, fenced_json, inline, number, preview, table

Segments = dict[str, dict[str, float | None]]  # segment -> quantity -> value
_COLUMNS = {
    "vgr": "VGR", "aei_vision": "AEI image", "aei_instruction": "AEI instruction", "mdi_balance": "MDI balance",
    "attention_vision": "attention image", "attention_instruction": "attention instruction",
}  # fmt: skip


@dataclass
class Summary:
    """A whole rollout batch in numbers, of which a record shows a few completions.

    Attributes:
        completions: of all processes.
        rewards: by name, and `total` for the weighted sum: mean and standard deviation (n - 1); None if undefined.
        success_rate: share of completions with accuracy 1; None without an accuracy reward.
        segments: attention by segment of layers; empty if it was not measured.
        credit: metrics of token weights and filters; empty if none is on.
    """

    completions: int
    rewards: dict[str, tuple[float | None, float | None]]
    success_rate: float | None = None
    segments: Segments = field(default_factory=dict)
    credit: dict[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Lengths:
    """Characters of prompts and completions that are shown; None: all."""

    prompt: int | None = None
    completion: int | None = None


def rollout_section(record: Record, summary: Summary, lengths: Lengths) -> str:
    """Return a section on a rollout batch: its numbers, each recorded completion, and token weights if any."""
    rewards = [[inline(name), number(mean), number(std)] for name, (mean, std) in summary.rewards.items()]
    parts = [
        f"## {_title(record)}\n",
        f"{summary.completions} completions, success rate {number(summary.success_rate)}, "
        f"{len(record.completions)} shown.\n",
        table(["reward", "mean", "standard deviation"], rewards),
    ]
    if summary.segments:
        parts.append(segment_table(summary.segments, ("vgr", "aei_vision", "aei_instruction")))
    parts += [_sample(index, item, lengths) for index, item in enumerate(record.completions, 1)]
    if any(item.weights is not None for item in record.completions):
        parts += ["### Token weights\n", *_token_weights(record, summary, "####")]
    return _joined(parts)


def attention_section(record: Record, summary: Summary) -> str:
    """Return a section on the attention of a rollout batch, then of each recorded completion, by segment."""
    parts = [f"## {_title(record)}\n", segment_table(summary.segments, tuple(_COLUMNS))]
    for index, completion in enumerate(record.completions, 1):
        parts.append(f"### Sample {index}: prompt {completion.group}\n")
        if completion.metrics is None:
            parts.append("No attention was measured.\n")
        else:
            parts.append(segment_table(completion.metrics, tuple(_COLUMNS)))
    return _joined(parts)


def token_weights_section(record: Record, summary: Summary) -> str:
    """Return a section on token weights: statistics of the batch, then token–weight pairs of each completion."""
    return _joined([f"## {_title(record)}\n", *_token_weights(record, summary, "###")])


def _token_weights(record: Record, summary: Summary, heading: str) -> list[str]:
    weights = [weight for item in record.completions for weight in item.weights or [] if weight is not None]
    statistics = {**summary.credit, "shown tokens with weight above 1": _share(weights, lambda weight: weight > 1)}
    statistics["shown tokens with weight below 1"] = _share(weights, lambda weight: weight < 1)
    rows = [[inline(name), number(value)] for name, value in statistics.items()]
    parts = [table(["quantity", "value"], rows)]
    for index, completion in enumerate(record.completions, 1):
        if completion.weights is not None:
            parts.append(f"{heading} Sample {index}: prompt {completion.group}\n")
            parts.append(fenced_json([list(pair) for pair in zip(completion.tokens, completion.weights, strict=True)]))
    return parts


def segment_table(segments: Segments, quantities: Sequence[str]) -> str:
    """Return a table with a row per segment of layers."""
    rows = [[inline(name), *(number(values.get(key)) for key in quantities)] for name, values in segments.items()]
    return table(["segment", *(_COLUMNS[key] for key in quantities)], rows)


def _sample(index: int, completion: Completion, lengths: Lengths) -> str:
    judged = {True: "right", False: "wrong", None: "not judged"}[completion.correct]
    earned: dict[str, Any] = {
        "rewards": completion.rewards,
        "reward": completion.reward,
        "advantage": completion.advantage,
    }
    parts = [
        f"### Sample {index}: prompt {completion.group}, {judged}\n",
        "Prompt\n",
        fenced(preview(completion.prompt, lengths.prompt)),
        "Completion\n",
        fenced(preview(completion.text, lengths.completion)),
    ]
    if completion.solution is not None:
        parts += ["Solution\n", fenced(preview(completion.solution, lengths.completion))]
    parts += ["Rewards\n", fenced_json(earned)]
    if completion.metrics is not None:
        parts += ["Attention\n", fenced_json(completion.metrics)]
    if completion.replaced:
        parts.append("Another group took the place of this one: it was not trained on.\n")
    return "\n".join(parts)


def _title(record: Record) -> str:
    return f"{'Training' if record.mode == 'train' else 'Evaluation'}, step {record.step}"


def _share(values: Sequence[float], condition: Any) -> float | None:
    return sum(map(condition, values)) / len(values) if values else None


def _joined(parts: Sequence[str]) -> str:
    return "\n".join(parts) + "\n"
