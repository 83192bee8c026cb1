"""The Markdown files of a run."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vgr_trl.files import append_whole
from vgr_trl.reporting.records.record import Record
from vgr_trl.reporting.views.markdown.sections import (
    Lengths,
    Summary,
    attention_section,
    rollout_section,
    token_weights_section,
)

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
