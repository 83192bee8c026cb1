"""Write records as Markdown."""

import json
import re
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

from jinja2 import Environment

from vgr_trl.atomic_files import append_atomic
from vgr_trl.errors import printable
from vgr_trl.reporting.console import VERDICTS, format_number, preview
from vgr_trl.reporting.records import Record, to_json_value

LOG_FOLDER = "training_logs"
FILE_FULL_NOTE = b"\n\nThis file has reached rollout_log_max_megabytes; see `vgr-trl report` for later completions.\n"

_PUNCTUATION = re.compile(r"([!-/:-@\[-`{-~])")  # characters that CommonMark allows to escape

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
    """Return a list or dictionary as a fenced block of JSON with an item per line and numbers as in records."""
    dump = partial(json.dumps, ensure_ascii=False)
    if isinstance(value, dict):
        lines = [f"{dump(name)}: {dump(to_json_value(item))}" for name, item in value.items()]
        return code_block("{\n" + ",\n".join(lines) + "\n}", "json")
    return code_block("[\n" + ",\n".join(dump(to_json_value(item)) for item in value) + "\n]", "json")


def escape_inline(text: str) -> str:
    """Escape the punctuation of `text` and join its lines, for a heading or a table cell."""
    return _PUNCTUATION.sub(r"\\\1", " ".join(text.split()))


def weight_share(record: Record, sign: int) -> float | None:
    """Return the share of recorded token weights above 1 (`sign` 1) or below 1 (`sign` -1); None without weights."""
    weights = [weight for item in record.completions for weight in item.weights or [] if weight is not None]
    return sum(sign * (weight - 1) > 0 for weight in weights) / len(weights) if weights else None


@cache
def load_sections() -> Any:
    """Return the macros of `sections.md`: `rollouts`, `attention`, `token_weights`, `training_signal`."""
    environment = Environment(trim_blocks=True, lstrip_blocks=True)
    filters = (code_block, json_block, escape_inline, preview, format_number, weight_share)
    environment.filters |= {each.__name__: each for each in filters}
    source = Path(__file__).with_name("sections.md").read_text(encoding="utf-8")
    return environment.from_string(source, {"verdicts": VERDICTS, "zip": zip}).module
