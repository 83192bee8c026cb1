"""Records as text: Markdown, the terminal, and the line of a step."""

import json
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from vgr_trl.reporting.records import Completion, Record, writable
from vgr_trl.utils import append_whole, printable

# ---------------------------------------------------------------------------------------------------------------------
# Text of a model or of data put into Markdown, where it must not become Markdown.


_FENCE = re.compile(r"`{3,}")
_PUNCTUATION = re.compile(r"([!-/:-@\[-`{-~])")  # what CommonMark lets a backslash precede


def fenced(text: str, language: str = "text") -> str:
    """Return a fenced block of code with `text` in it, whose fence is longer than any in the text."""
    shown = printable(text)
    longest = max((len(run) for run in _FENCE.findall(shown)), default=2)
    fence = "`" * (longest + 1)
    return f"{fence}{language}\n{shown}\n{fence}\n"


def fenced_json(value: Any) -> str:
    """Return a fenced block of JSON with a line for each item of a list or dictionary, numbers as in records."""
    value = writable(value)
    if isinstance(value, dict):
        lines = [f"{json.dumps(str(name))}: {json.dumps(item, ensure_ascii=False)}" for name, item in value.items()]
        start, end = "{", "}"
    else:
        lines = [json.dumps(item, ensure_ascii=False) for item in value]
        start, end = "[", "]"
    return fenced("\n".join([start, ",\n".join(lines), end]), "json")


def inline(text: str) -> str:
    """Return `text` for a heading or the cell of a table: on one line, with all punctuation escaped."""
    return _PUNCTUATION.sub(r"\\\1", " ".join(printable(text).split()))


def preview(text: str, length: int | None) -> str:
    """Return the first `length` characters, and how many are left out; None: all."""
    if length is None or len(text) <= length:
        return text
    return f"{text[:length]}\n[… {len(text) - length} more characters]"


def number(value: float | None) -> str:
    """Return a number with four significant digits, a dash for None and NaN."""
    return "–" if value is None or value != value else f"{value:.4g}"


def table(header: list[str], rows: list[list[str]]) -> str:
    """Return a table of cells that are already escaped; its first column is of text, the others of numbers."""
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


# ---------------------------------------------------------------------------------------------------------------------
# Recorded completions on a terminal, with coloured tokens.


# From little to much of the image, told apart by readers who do not see red and green alike (viridis, light half).
_SHADES = ("#8a8a8a", "#3b8ac4", "#21a5a5", "#5ec962", "#fde725")


def print_record(record: Record, console: Console | None = None, prompt_length: int | None = None) -> None:
    """Print the completions of a record; on what is no terminal the colours are left out.

    Args:
        console: where; None: standard output.
        prompt_length: characters of a prompt that are shown; None: all.
    """
    console = Console() if console is None else console
    for completion in record.completions:
        console.print(completion_panel(completion, record, prompt_length))


def completion_panel(completion: Completion, record: Record, prompt_length: int | None = None) -> Panel:
    """Return a panel with prompt, completion and rewards; tokens that weigh more, or look more, are brighter."""
    mark = {True: ("right", "bold cyan"), False: ("wrong", "bold magenta"), None: ("", "")}[completion.correct]
    body = Text()
    body.append(f"{printable(preview(completion.prompt.strip(), prompt_length))}\n", style="dim")
    for token, shade in zip(completion.tokens, token_shades(completion), strict=True):
        body.append(printable(token), style=shade)
    earned = ", ".join(f"{printable(name)} {number(value)}" for name, value in completion.rewards.items())
    body.append(f"\n{mark[0]} ", style=mark[1])
    body.append(f"{earned}, advantage {number(completion.advantage)}")
    return Panel(body, title=f"step {record.step}, prompt {completion.group}", title_align="left")


def token_shades(completion: Completion) -> list[str]:
    """Return a style for each token: by its weight, else by how little its VGR is, in fifths of the completion."""
    scores: Sequence[Any] | None = completion.weights
    if scores is None and completion.vgr is not None:
        scores = [None if value is None else -value for value in completion.vgr]
    if scores is None:
        return [""] * len(completion.tokens)
    known = sorted(score for score in scores if score is not None)
    return [_shade(score, known) for score in scores]


def _shade(score: float | None, known: Sequence[float]) -> str:
    if score is None:
        return ""
    return _SHADES[bisect_left(known, score) * len(_SHADES) // len(known)]


# ---------------------------------------------------------------------------------------------------------------------
# Markdown logs of rollouts, appended section by section.


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


# ---------------------------------------------------------------------------------------------------------------------
# The Markdown files of a run.


FOLDER = "training_logs"
FULL = "\n\nThis file has reached rollout_log_max_megabytes: `vgr-trl report` shows the completions that came later.\n"


@dataclass(frozen=True)
class MarkdownLogs:
    """Appends a section per recorded rollout batch to each file; None: no such file.

    Attributes:
        rollouts, evaluations: completions of training, and of evaluations.
        attention: attention by segment of layers, of both.
        token_weights: of training.
        lengths: of what is shown.
        max_bytes: about as long as a file becomes; None: any length.
    """

    rollouts: str | None = None
    evaluations: str | None = None
    attention: str | None = None
    token_weights: str | None = None
    lengths: Lengths = field(default_factory=Lengths)
    max_bytes: int | None = None

    @property
    def wanted(self) -> bool:
        """Whether there is any file."""
        return any((self.rollouts, self.evaluations, self.attention, self.token_weights))

    def add(self, record: Record, summary: Summary) -> None:
        """Append what the files say of a record."""
        in_training = record.mode == "train"
        path = self.rollouts if in_training else self.evaluations
        if path is not None:
            self._append(
                path, "Rollouts" if in_training else "Evaluations", rollout_section(record, summary, self.lengths)
            )
        if self.attention is not None:
            self._append(self.attention, "Attention", attention_section(record, summary))
        if self.token_weights is not None and in_training:
            self._append(self.token_weights, "Token weights", token_weights_section(record, summary))

    def _append(self, path: str, title: str, section: str) -> None:
        file = Path(path)
        size = file.stat().st_size if file.exists() else 0
        if self.max_bytes is not None and size >= self.max_bytes:
            return
        data = section.encode("utf-8")
        if self.max_bytes is not None and size + len(data) >= self.max_bytes:
            data += FULL.encode("utf-8")
        append_whole(file, data, head=f"# {title}\n\n".encode())


def markdown_logs(options: Any, started: str, attention: bool) -> MarkdownLogs:
    """Return the files that the options ask for.

    Args:
        options: `ReportOptions` with an `output_dir`.
        started: when the run did, for the names of files that the options do not name.
        attention: whether it is measured.
    """

    def path(given: str | None, name: str, wanted: bool = True) -> str | None:
        if given is not None or not (wanted and options.markdown_logs):
            return given
        return str(Path(options.output_dir, FOLDER, f"{name}_{started}.md"))

    return MarkdownLogs(
        path(options.rollout_log_path, "rollout_results"),
        path(options.eval_log_path, "eval_results"),
        path(options.attention_diag_log_path, "attention_diagnostics", attention),
        options.token_weights_log_path,
        Lengths(options.prompt_preview_length, options.completion_preview_length),
        int(options.rollout_log_max_megabytes * 1e6),
    )


# ---------------------------------------------------------------------------------------------------------------------
# A training step as one line on a terminal.


_QUANTITIES = (  # heading, names under which trainers log it, format
    ("reward", ("reward",), "{:.3f}"),
    ("accuracy", ("rewards/accuracy_reward/mean",), "{:.3f}"),
    ("format", ("rewards/think_format_reward/mean",), "{:.2f}"),
    ("length", ("completions/mean_length",), "{:.0f}"),
    ("VGR", ("attention/late/vgr", "attention/all/vgr"), "{:.3f}"),
    ("live", ("sampling/live_fraction",), "{:.0%}"),
    ("loss", ("loss",), "{:.4f}"),
)


def step_line(step: int, total: int, logs: Mapping[str, float], seconds_per_step: float | None) -> str:
    """Return step, reward, accuracy, length, VGR, live groups, seconds per step and the time that is left.

    Args:
        total: steps of the run.
        logs: what the trainer logged at this step; quantities that are not in it are left out.
        seconds_per_step: mean of the last steps; None: not known yet.
    """
    parts = [f"step {step:>{len(str(total))}}/{total}"]
    for heading, names, form in _QUANTITIES:
        value = next((logs[name] for name in names if logs.get(name) is not None), None)
        if heading == "live" and value is None and "frac_reward_zero_std" in logs:
            value = 1 - logs["frac_reward_zero_std"]
        if value is not None:
            parts.append(f"{heading} {form.format(value)}")
    if seconds_per_step is not None:
        parts += [f"{seconds_per_step:.1f} s/step", f"{duration((total - step) * seconds_per_step)} left"]
    return "  ".join(parts)


def duration(seconds: float) -> str:
    """Return a time as people say it: 45 s, 12 min, 3 h 05."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d}"
