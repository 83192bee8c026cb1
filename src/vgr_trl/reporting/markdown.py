"""Write Markdown: recorded rollouts, and in TRL's model card origin, rewards, options in effect and papers to cite."""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment
from trl import GRPOConfig

from vgr_trl.atomic_files import append_atomic
from vgr_trl.config import EfficiencyOptions, EvaluateOptions, ReportOptions
from vgr_trl.dapo_config import DAPOConfig
from vgr_trl.errors import printable
from vgr_trl.loss.kl import PENALTY
from vgr_trl.options import options_in_effect
from vgr_trl.reporting.console import VERDICTS, format_number, preview
from vgr_trl.reporting.records import Record, to_json_value

LOG_FOLDER = "training_logs"
FILE_FULL_NOTE = b"\n\nThis file has reached rollout_log_max_megabytes; see `vgr-trl report` for later completions.\n"

_PUNCTUATION = re.compile(r"([!-/:-@\[-`{-~])")  # characters that CommonMark allows to escape


@dataclass
class Summary:
    """Numbers about a whole rollout batch; its record shows a few completions.

    Attributes:
        completions: number over all processes.
        rewards: name (`total`: weighted sum) -> mean and standard deviation (n - 1), NaN if undefined.
        success_rate: share of completions with accuracy 1; None without an accuracy reward.
        segments: segment of layers -> quantity of attention -> value; empty if not measured.
        credit: metrics of token weights and filters; empty if all are off.
    """

    completions: int
    rewards: dict[str, tuple[float, float]]
    success_rate: float | None = None
    segments: dict[str, dict[str, float | None]] = field(default_factory=dict)
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
    environment.filters |= {function.__name__: function for function in filters}
    source = Path(__file__).with_name("sections.md").read_text(encoding="utf-8")
    return environment.from_string(source, {"verdicts": VERDICTS, "zip": zip}).module


# The model card


class Paper(NamedTuple):
    """A paper on arXiv, and its BibTeX entry."""

    title: str
    arxiv: str
    bibtex: str

    @property
    def link(self) -> str:
        """The paper as a Markdown link."""
        return f"[{self.title}](https://huggingface.co/papers/{self.arxiv})"


# Groups: options, advantage estimators and rewards of the method; the entry; its key, title and number on arXiv.
_ENTRY = r"% (.*)\n(@misc\{(\w+),\n +title += \{\{(.*)\}\},\n(?: +.*\n)*? +eprint += \{(.*)\},\n(?: +.*\n)*\})"
_ENTRIES = re.findall(_ENTRY, Path(__file__).with_name("papers.bib").read_text(encoding="utf-8"))
PAPERS = {key: Paper(title, arxiv, bibtex) for _, bibtex, key, title, arxiv in _ENTRIES}
DAPO, MDI, VPPO, PAPO = "yu2025dapo", "wu2025language", "huang2025spotlight", "wang2025perception"
METHOD_PAPERS = {name: key for methods, _, key, *_ in _ENTRIES for name in methods.split(", ")}
PAPER_TAGS = {MDI: "vision-gain-ratio", VPPO: "vppo", PAPO: "papo"}
TAGS = ("dapo", "vgr_trl")
TRL_PAPER = dict(zip(("title", "id", "citation"), PAPERS[DAPO], strict=True))  # in the form that TRL expects
# Groups of options that do not change the method.
_OTHER_GROUPS = (ReportOptions, EvaluateOptions, EfficiencyOptions, GRPOConfig)
METHOD_OPTIONS = {field.name for group in DAPOConfig.__bases__ if group not in _OTHER_GROUPS for field in fields(group)}
METHOD_OPTIONS |= {"early_reward_weights", "vgr_hard_negative", "attention_reward_scale"}


def user_rewards(names: Iterable[str]) -> list[str]:
    """Return the names of the user's rewards among all."""
    return [name for name in names if name != PENALTY]


def method_tags(options: DAPOConfig, rewards: Sequence[str]) -> list[str]:
    """Return the tags of a model trained with these options and rewards."""
    return [*TAGS, *(PAPER_TAGS[key] for key in find_papers(options, rewards) if key in PAPER_TAGS)]


def extend_card(args: DAPOConfig, origin: str, rewards: Sequence[str], name: str | None, data: str | None) -> None:
    """Add origin, rewards, options in effect and papers to cite to TRL's card, and remove its example without an image.

    Args:
        args: options of the run, whose `output_dir` has the card.
        origin: name of the model that was trained; empty: unknown.
        rewards: names of the user's rewards.
        name: name of the trained model; None: name of its folder.
        data: name of the training data; None: unknown.
    """
    file = Path(str(args.output_dir), "README.md")
    named = ("from", origin), ("on", data)
    sources = [f" {word} {inline_code(source)}" for word, source in named if source]
    card = file.read_text(encoding="utf-8")
    for pattern, text in (
        (r"^# Model Card for .*$", f"# Model Card for {name or file.resolve().parent.name}"),
        (r"^This model is a fine-tuned version of .*$", f"This model was trained{''.join(sources)}."),
        (r"^## Quick start$(?s:.*?)(?=^## )", ""),
    ):
        card = re.sub(pattern, text.replace("\\", r"\\"), card, count=1, flags=re.MULTILINE)
    file.write_text(add_method_section(card, args, rewards), encoding="utf-8")


def add_method_section(card: str, options: DAPOConfig, rewards: Sequence[str]) -> str:
    """Insert rewards, weights and options of the method before the framework versions, and append citations.

    Args:
        card: card of TRL.
        options: options of the run.
        rewards: names of the reward functions, in the order of their weights.
    """
    weights = zip(rewards, options.reward_weights or [1.0] * len(rewards), strict=True)
    loss = ", ".join(_format_option(options, name) for name in ("loss_type", "epsilon", "epsilon_high", "beta"))
    methods = []
    for name, effect in options_in_effect(options, METHOD_OPTIONS).items():
        key = METHOD_PAPERS.get(_method(options, name))
        methods.append((_format_option(options, name), _escape_cell(effect), PAPERS[key].link if key else ""))
    named = [(_escape_cell(inline_code(name)), f"{weight:g}") for name, weight in weights]
    section = load_sections().training_signal(loss, options.num_generations, named, methods)
    start, heading, rest = card.partition("### Framework versions")
    card = "\n\n".join([start.rstrip(), section.strip(), f"{heading}{rest}".rstrip()]) + "\n"
    entries = [PAPERS[key].bibtex for key in find_papers(options, rewards) if key != DAPO]  # TRL's part cites DAPO
    if entries:
        card += "\nCite the papers behind the training signal as:\n\n```bibtex\n" + "\n\n".join(entries) + "\n```\n"
    return card


def find_papers(options: DAPOConfig, rewards: Sequence[str]) -> list[str]:
    """Return the distinct `papers.bib` keys of the options and rewards in effect."""
    methods = [_method(options, name) for name in options_in_effect(options, METHOD_OPTIONS)]
    return list(dict.fromkeys(METHOD_PAPERS[name] for name in (*methods, *rewards) if name in METHOD_PAPERS))


def _method(options: DAPOConfig, name: str) -> str:
    """Return the key in `METHOD_PAPERS` of an option that is on."""
    return options.advantage_estimator if name == "advantage_estimator" else name


def _format_option(options: DAPOConfig, name: str) -> str:
    return _escape_cell(inline_code(f"{name}={vars(options)[name]}"))


def inline_code(text: str) -> str:
    """Return `text` as an inline code span that its content cannot close."""
    return f"`{' '.join(text.replace('`', chr(39)).split())}`"


def _escape_cell(text: str) -> str:
    return text.replace("|", "\\|")
