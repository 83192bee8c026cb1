"""Records as text: Markdown logs, the terminal, and the line of a step."""

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

from vgr_trl.reporting.records import Completion, Record, as_json
from vgr_trl.utils import append_atomic, printable

FOLDER = "training_logs"
FULL = b"\n\nThis file has reached rollout_log_max_megabytes: `vgr-trl report` shows the completions that came later.\n"

_PUNCTUATION = re.compile(r"([!-/:-@\[-`{-~])")  # what CommonMark lets a backslash precede
_COLUMNS = {
    "vgr": "VGR", "aei_vision": "AEI image", "aei_instruction": "AEI instruction", "mdi_balance": "MDI balance",
    "attention_vision": "attention image", "attention_instruction": "attention instruction",
}  # fmt: skip
_CORRECT = {True: "right", False: "wrong", None: "without an accuracy reward"}
# From little to much of the image, told apart by readers who do not see red and green alike (viridis, light half).
_SHADES = ("#8a8a8a", "#3b8ac4", "#21a5a5", "#5ec962", "#fde725")
_STEP_LINE = (  # heading, names under which trainers log it, format
    ("reward", ("reward",), "{:.3f}"),
    ("accuracy", ("rewards/accuracy_reward/mean",), "{:.3f}"),
    ("format", ("rewards/think_format_reward/mean",), "{:.2f}"),
    ("length", ("completions/mean_length",), "{:.0f}"),
    ("VGR", ("attention/late/vgr", "attention/all/vgr"), "{:.3f}"),
    ("non-zero variance", ("sampling/nonzero_variance_fraction",), "{:.0%}"),
    ("loss", ("loss",), "{:.4f}"),
)

Segments = dict[str, dict[str, float | None]]  # segment -> quantity -> value


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


class MarkdownLogs:
    """Markdown files of a run, each of which gets a section per recorded rollout batch.

    Args:
        options: `ReportOptions` with an `output_dir`.
        started: when the run did, for the names of files that the options do not name.
        attention: whether it is measured.
    """

    def __init__(self, options: Any, started: str, attention: bool) -> None:
        self.options = options
        folder = Path(options.output_dir, FOLDER)
        self.paths = {
            "Rollouts": options.rollout_log_path,
            "Evaluations": options.eval_log_path,
            "Attention": options.attention_diag_log_path,
            "Token weights": options.token_weights_log_path,
        }
        if options.markdown_logs:
            self.paths["Rollouts"] = self.paths["Rollouts"] or folder / f"rollout_results_{started}.md"
            self.paths["Evaluations"] = self.paths["Evaluations"] or folder / f"eval_results_{started}.md"
            if attention:
                self.paths["Attention"] = self.paths["Attention"] or folder / f"attention_diagnostics_{started}.md"

    def add(self, record: Record, summary: Summary) -> None:
        """Append a section to each file that is wanted."""
        lengths = self.options.prompt_preview_length, self.options.completion_preview_length
        title = "Rollouts" if record.mode == "train" else "Evaluations"
        self._append(title, rollout_section(record, summary, *lengths))
        self._append("Attention", attention_section(record, summary))
        if record.mode == "train":
            self._append("Token weights", token_weights_section(record, summary))

    def _append(self, title: str, section: str) -> None:
        if self.paths[title] is None:
            return
        file, data = Path(self.paths[title]), section.encode("utf-8", "replace")
        size, most = file.stat().st_size if file.exists() else 0, self.options.rollout_log_max_megabytes * 1e6
        if size < most:
            append_atomic(file, data + FULL if size + len(data) >= most else data, head=f"# {title}\n\n".encode())


def rollout_section(
    record: Record, summary: Summary, prompt_length: int | None = None, completion_length: int | None = None
) -> str:
    """Return a section on a rollout batch: its numbers, each recorded completion, and token weights if any."""
    rewards = [[inline(name), number(mean), number(std)] for name, (mean, std) in summary.rewards.items()]
    parts = [
        f"## {_title(record)}\n",
        f"{summary.completions} completions, success rate {number(summary.success_rate)}, "
        f"{len(record.completions)} shown.\n",
        table(["reward", "mean", "standard deviation"], rewards),
    ]
    if summary.segments:
        parts.append(_segment_table(summary.segments, ("vgr", "aei_vision", "aei_instruction")))
    for index, item in enumerate(record.completions, 1):
        texts = {"Prompt": preview(item.prompt, prompt_length), "Completion": preview(item.text, completion_length)}
        if item.solution is not None:
            texts["Solution"] = preview(item.solution, completion_length)
        parts.append(f"### Sample {index}: prompt {item.group}, {_CORRECT[item.correct]}\n")
        parts += [f"{heading}\n\n{fenced(text)}" for heading, text in texts.items()]
        rewarded = {"rewards": item.rewards, "reward": item.reward, "advantage": item.advantage}
        parts.append(f"Rewards\n\n{fenced_json(rewarded)}")
        if item.metrics is not None:
            parts.append(f"Attention\n\n{fenced_json(item.metrics)}")
        if item.replaced:
            parts.append("Another group took the place of this one: it was not trained on.\n")
    if any(item.weights is not None for item in record.completions):
        parts += ["### Token weights\n", *_token_weights(record, summary, "####")]
    return "\n".join([*parts, ""])


def attention_section(record: Record, summary: Summary) -> str:
    """Return a section on the attention of a rollout batch, then of each recorded completion, by segment."""
    parts = [f"## {_title(record)}\n", _segment_table(summary.segments, _COLUMNS)]
    for index, item in enumerate(record.completions, 1):
        parts.append(f"### Sample {index}: prompt {item.group}\n")
        unmeasured = "No attention was measured.\n"
        parts.append(unmeasured if item.metrics is None else _segment_table(item.metrics, _COLUMNS))
    return "\n".join([*parts, ""])


def token_weights_section(record: Record, summary: Summary) -> str:
    """Return a section on token weights: statistics of the batch, then token–weight pairs of each completion."""
    return "\n".join([f"## {_title(record)}\n", *_token_weights(record, summary, "###"), ""])


def _token_weights(record: Record, summary: Summary, heading: str) -> list[str]:
    weights = [weight for item in record.completions for weight in item.weights or [] if weight is not None]
    above, below = sum(weight > 1 for weight in weights), sum(weight < 1 for weight in weights)
    statistics = {
        **summary.credit,
        "shown tokens with weight above 1": above / len(weights) if weights else None,
        "shown tokens with weight below 1": below / len(weights) if weights else None,
    }
    parts = [table(["quantity", "value"], [[inline(name), number(value)] for name, value in statistics.items()])]
    for index, item in enumerate(record.completions, 1):
        if item.weights is not None:
            parts.append(f"{heading} Sample {index}: prompt {item.group}\n")
            parts.append(fenced_json([list(pair) for pair in zip(item.tokens, item.weights, strict=True)]))
    return parts


def _segment_table(segments: Segments, quantities: Sequence[str] | Mapping[str, str]) -> str:
    rows = [[inline(name), *(number(values.get(key)) for key in quantities)] for name, values in segments.items()]
    return table(["segment", *(_COLUMNS[key] for key in quantities)], rows)


def _title(record: Record) -> str:
    return f"{'Training' if record.mode == 'train' else 'Evaluation'}, step {record.step}"


def fenced(text: str, language: str = "text") -> str:
    """Return a fenced block of code with `text` in it, whose fence is longer than any in the text."""
    text = printable(text)
    fence = "`" * (1 + max((len(run) for run in re.findall("`{3,}", text)), default=2))
    return f"{fence}{language}\n{text}\n{fence}\n"


def fenced_json(value: Any) -> str:
    """Return a fenced block of JSON with a line for each item of a list or dictionary, numbers as in records."""
    value = as_json(value)
    if isinstance(value, dict):
        lines = [f"{json.dumps(name)}: {json.dumps(item, ensure_ascii=False)}" for name, item in value.items()]
    else:
        lines = [json.dumps(item, ensure_ascii=False) for item in value]
    start, end = "{}" if isinstance(value, dict) else "[]"
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


def print_record(record: Record, console: Console | None = None, prompt_length: int | None = None) -> None:
    """Print prompt, completion and rewards; tokens that weigh more, or look more, are brighter where there are colours.

    Args:
        console: where; None: standard output.
        prompt_length: characters of a prompt that are shown; None: all.
    """
    console = Console() if console is None else console
    marks = {True: ("right", "bold cyan"), False: ("wrong", "bold magenta"), None: ("", "")}
    for item in record.completions:
        body = Text()
        body.append(f"{printable(preview(item.prompt.strip(), prompt_length))}\n", style="dim")
        for token, shade in zip(item.tokens, token_shades(item), strict=True):
            body.append(printable(token), style=shade)
        rewards = ", ".join(f"{printable(name)} {number(value)}" for name, value in item.rewards.items())
        mark, style = marks[item.correct]
        body.append(f"\n{mark} ", style=style)
        body.append(f"{rewards}, advantage {number(item.advantage)}")
        console.print(Panel(body, title=f"step {record.step}, prompt {item.group}", title_align="left"))


def token_shades(completion: Completion) -> list[str]:
    """Return a style for each token: by its weight, else by how little its VGR is, in fifths of the completion."""
    scores = completion.weights
    if scores is None:
        scores = [None if value is None else -value for value in completion.vgr or [None] * len(completion.tokens)]
    known = sorted(score for score in scores if score is not None)
    return [
        "" if score is None else _SHADES[bisect_left(known, score) * len(_SHADES) // len(known)] for score in scores
    ]


def step_line(step: int, total: int, logs: Mapping[str, float], seconds_per_step: float | None) -> str:
    """Return one line: step, reward, accuracy, length, VGR, groups with non-zero variance, seconds per step, time left.

    Args:
        total: steps of the run.
        logs: what the trainer logged at this step; quantities that are not in it are left out.
        seconds_per_step: mean of the last steps; None: not known yet.
    """
    if "frac_reward_zero_std" in logs:
        logs = {"sampling/nonzero_variance_fraction": 1 - logs["frac_reward_zero_std"], **logs}
    parts = [f"step {step:>{len(str(total))}}/{total}"]
    for heading, names, form in _STEP_LINE:
        value = next((logs[name] for name in names if logs.get(name) is not None), None)
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
