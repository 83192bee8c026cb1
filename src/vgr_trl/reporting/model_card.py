"""Extend TRL's model card: origin, rewards, options in effect, and papers to cite."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

from trl import GRPOConfig

from vgr_trl.config import EfficiencyOptions, EvaluateOptions, ReportOptions
from vgr_trl.dapo_config import DAPOConfig
from vgr_trl.loss.kl import PENALTY
from vgr_trl.options import options_in_effect
from vgr_trl.reporting.markdown import load_sections


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
METHOD_OPTIONS = {each.name for group in DAPOConfig.__bases__ if group not in _OTHER_GROUPS for each in fields(group)}
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
        options: of the run.
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
