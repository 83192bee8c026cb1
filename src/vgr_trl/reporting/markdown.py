"""Format records as text: Markdown logs, console output, and one line per step."""

import json
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from jinja2 import Environment
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from vgr_trl.atomic_files import append_atomic
from vgr_trl.errors import printable
from vgr_trl.reporting.records import Completion, Record, to_json_value

LOG_FOLDER = "training_logs"
FILE_FULL_NOTE = b"\n\nThis file has reached rollout_log_max_megabytes; see `vgr-trl report` for later completions.\n"

_REWARD_MEAN = re.compile(r"rewards?/([^/]+)(?:/mean)?")
_PUNCTUATION = re.compile(r"([!-/:-@\[-`{-~])")  # characters that CommonMark allows to escape
_COLUMNS = {
    "vgr": "VGR", "aei_vision": "AEI image", "aei_instruction": "AEI instruction", "mdi_balance": "MDI balance",
    "attention_vision": "attention image", "attention_instruction": "attention instruction",
}  # fmt: skip
# From low to high attention on the image; light half of viridis, which colour-blind readers can distinguish.
_SHADES = ("#8a8a8a", "#3b8ac4", "#21a5a5", "#5ec962", "#fde725")
_STEP_QUANTITIES = (  # heading, logged name (EasyR1 reward files: reward/…), format
    ("reward", "reward", "{:.3f}"),
    ("accuracy", "rewards/accuracy_reward/mean", "{:.3f}"),
    ("accuracy", "reward/accuracy", "{:.3f}"),
    ("format", "rewards/think_format_reward/mean", "{:.2f}"),
    ("format", "rewards/format_reward/mean", "{:.2f}"),
    ("format", "reward/format", "{:.2f}"),
    ("length", "completions/mean_length", "{:.0f}"),
    ("VGR", "attention/late/vgr", "{:.3f}"),
    ("groups with non-zero variance", "sampling/nonzero_variance_fraction", "{:.0%}"),
    ("loss", "loss", "{:.4f}"),
)

Segments = dict[str, dict[str, float | None]]  # segment -> quantity -> value


@dataclass
class Summary:
    """Summary of a rollout batch, of which a record shows a few completions.

    Attributes:
        completions: number over all processes.
        rewards: name (`total`: weighted sum) -> mean and standard deviation (n - 1), NaN if undefined.
        success_rate: share of completions with accuracy 1; None without an accuracy reward.
        segments: attention by segment of layers; empty if not measured.
        credit: metrics of token weights and filters; empty if all are off.
    """

    completions: int
    rewards: dict[str, tuple[float, float]]
    success_rate: float | None = None
    segments: Segments = field(default_factory=dict)
    credit: dict[str, float | None] = field(default_factory=dict)


class MarkdownLogs:
    """Append a section per recorded rollout batch to the Markdown files of a run.

    Args:
        options: `ReportOptions` with an `output_dir`.
        started: start time of the run, for default file names.
        attention: whether attention is measured.
    """

    def __init__(self, options: Any, started: str, attention: bool) -> None:
        self.options = options

        def default(name: str) -> Path | None:
            return Path(options.output_dir, LOG_FOLDER, f"{name}_{started}.md") if options.markdown_logs else None

        weights = options.token_weights_log_path
        if weights is None and options.token_weights and options.rollout_log_path:
            weights = Path(options.rollout_log_path).with_name("token_weights.md")
        self.paths = {
            "Rollouts": options.rollout_log_path or default("rollout_results"),
            "Evaluations": options.eval_log_path or default("eval_results"),
            "Attention": options.attention_diag_log_path or (default("attention_diagnostics") if attention else None),
            "Token weights": weights,
        }

    def add(self, record: Record, summary: Summary) -> None:
        """Append a section to each enabled file."""
        lengths = self.options.prompt_preview_length, self.options.completion_preview_length
        title = "Rollouts" if record.mode == "train" else "Evaluations"
        self._append(title, load_sections().rollouts(record, summary, *lengths))
        self._append("Attention", load_sections().attention(record, summary))
        if record.mode == "train":
            self._append("Token weights", load_sections().token_weights(record, summary))

    def _append(self, title: str, section: str) -> None:
        if (path := self.paths[title]) is None:
            return
        file, data = Path(path), printable(section).encode("utf-8", "replace")
        size, most = file.stat().st_size if file.exists() else 0, self.options.rollout_log_max_megabytes * 1e6
        if size < most:
            data += FILE_FULL_NOTE if size + len(data) >= most else b""
            append_atomic(file, data, head=f"# {title}\n\n".encode())


def code_block(text: str, language: str = "text") -> str:
    """Return `text` as a fenced code block whose fence is longer than any in the text."""
    fence = "`" * (1 + max((len(run) for run in re.findall("`{3,}", text)), default=2))
    return f"{fence}{language}\n{text}\n{fence}\n"


def json_block(value: Any) -> str:
    """Return a list or dictionary as a fenced block of JSON, one item per line, with numbers as in records."""
    value = to_json_value(value)
    if isinstance(value, dict):
        lines = [f"{json.dumps(name)}: {json.dumps(item, ensure_ascii=False)}" for name, item in value.items()]
    else:
        lines = [json.dumps(item, ensure_ascii=False) for item in value]
    start, end = "{}" if isinstance(value, dict) else "[]"
    return code_block("\n".join([start, ",\n".join(lines), end]), "json")


def escape_inline(text: str) -> str:
    """Return `text` on one line with punctuation escaped, for a heading or a table cell."""
    return _PUNCTUATION.sub(r"\\\1", " ".join(text.split()))


def preview(text: str, length: int | None) -> str:
    """Return the first `length` characters and the number of omitted ones; None: all."""
    if length is None or len(text) <= length:
        return text
    return f"{text[:length]}\n[… {len(text) - length} more characters]"


def format_number(value: float | None) -> str:
    """Format a number with four significant digits; a dash for None and NaN."""
    return "–" if value is None or value != value else f"{value:.4g}"


def weight_share(record: Record, sign: int) -> float | None:
    """Return the share of recorded token weights above 1 (`sign` 1) or below 1 (`sign` -1); None without weights."""
    weights = [weight for item in record.completions for weight in item.weights or [] if weight is not None]
    return sum(sign * (weight - 1) > 0 for weight in weights) / len(weights) if weights else None


@cache
def load_sections() -> Any:
    """Return the macros of `sections.md`: `rollouts`, `attention`, `token_weights`, `training_signal`."""
    environment = Environment(trim_blocks=True, lstrip_blocks=True)
    for function in (code_block, json_block, escape_inline, preview, format_number, weight_share):
        environment.filters[function.__name__] = function
    source = Path(__file__).with_name("sections.md").read_text(encoding="utf-8")
    return environment.from_string(source, {"columns": _COLUMNS, "zip": zip}).module


def print_record(record: Record, console: Console | None = None, prompt_length: int | None = None) -> None:
    """Print prompts, completions and rewards; tokens with more weight or more attention on the image are brighter.

    Args:
        console: None: standard output.
        prompt_length: characters of a prompt to print; None: all.
    """
    marks = {True: ("right", "bold cyan"), False: ("wrong", "bold magenta"), None: ("", "")}
    for item in record.completions:
        tokens = zip(map(printable, item.tokens), token_shades(item), strict=True)
        rewards = ", ".join(f"{printable(name)} {format_number(value)}" for name, value in item.rewards.items())
        body = Text.assemble(
            (f"{printable(preview(item.prompt.strip(), prompt_length))}\n", "dim"),
            *tokens,
            "\n",
            marks[item.correct],
            f" {rewards}, advantage {format_number(item.advantage)}",
        )
        panel = Panel(body, title=f"step {record.step}, prompt {item.group}", title_align="left")
        (console or Console()).print(panel)


def token_shades(completion: Completion) -> list[str]:
    """Return a style per token: by its weight, else by low VGR, in fifths of the completion."""
    scores = completion.weights
    if scores is None:
        scores = [None if value is None else -value for value in completion.vgr or [None] * len(completion.tokens)]
    known, count = sorted(score for score in scores if score is not None), len(_SHADES)
    return ["" if score is None else _SHADES[bisect_left(known, score) * count // len(known)] for score in scores]


def step_line(step: int, total: int, logs: Mapping[str, float], seconds_per_step: float | None) -> str:
    """Return one line: step, every reward, length, VGR, groups with non-zero variance, seconds per step, time left.

    Args:
        total: steps of the run.
        logs: of this step; missing quantities are omitted.
        seconds_per_step: mean over recent steps; None: not known yet.
    """
    if "frac_reward_zero_std" in logs:
        logs = {"sampling/nonzero_variance_fraction": 1 - logs["frac_reward_zero_std"], **logs}
    parts = [f"step {step:>{len(str(total))}}/{total}"]
    shown = {name for _, name, _ in _STEP_QUANTITIES}
    own = [(each[1].removesuffix("_reward"), each[0]) for each in map(_REWARD_MEAN.fullmatch, logs) if each]
    others = [(heading, name, "{:.3f}") for heading, name in own if name not in shown]
    for heading, name, form in (*_STEP_QUANTITIES[:6], *others, *_STEP_QUANTITIES[6:]):
        if (value := logs.get(name)) is not None:
            parts.append(f"{heading} {form.format(value)}")
    if seconds_per_step is not None:
        left = (total - step) * seconds_per_step
        parts += [f"{seconds_per_step:.1f} s/step"] + [f"{format_duration(left)} left"] * (step < total)
    return "  ".join(parts)


def evaluation_line(step: int, logs: Mapping[str, float]) -> str:
    """Return one line about an evaluation: step, reward, accuracy."""
    names = [(heading, f"eval_{name}") for heading, name, _ in _STEP_QUANTITIES[:3]]
    shown = [f"{heading} {logs[name]:.3f}" for heading, name in names if name in logs]
    return f"evaluation at step {step}  {'  '.join(shown)}"


def progress_lines(history: Sequence[Mapping[str, Any]], evaluated: str) -> list[str]:
    """Return lines with reward and accuracy at the start and the end of training and of the evaluations.

    Args:
        history: `log_history` of a trainer's state.
        evaluated: description of the evaluation data, such as `64 rows`.
    """
    lines = []
    for title, prefix in (("training", ""), ("evaluation", "eval_")):
        logs = [entry for entry in history if f"{prefix}reward" in entry]
        few = 1 if prefix else -(-len(logs) // 10)  # a tenth, as in the report
        parts = []
        for heading, name, _ in _STEP_QUANTITIES[:3]:
            if values := [entry[prefix + name] for entry in logs if prefix + name in entry]:
                ends = [fmean(values[:few]), fmean(values[-few:])][len(values) == 1 :]
                parts.append(f"{heading} {' → '.join(f'{end:.3f}' for end in ends)}")
        if parts:
            which = f"on {evaluated}" if prefix else f"(means of the first and last tenth of {len(logs)} logs)"
            lines.append(f"{title:<12}{', '.join(parts)} {which}")
    accuracy = [entry[name] for entry in history for _, name, _ in _STEP_QUANTITIES[1:3] if name in entry]
    if accuracy and max(accuracy) < 0.01:
        cure = "look at completions in the report; try another model or --system_prompt_file"
        lines.append(f"Accuracy stayed near 0, so the accuracy reward gave no learning signal: {cure}.")
    return lines


def format_duration(seconds: float) -> str:
    """Format a duration: 45 s, 12 min, 3 h 05."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d}"
