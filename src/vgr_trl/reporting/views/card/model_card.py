"""What a model card says beyond TRL's: rewards, the options that were on with their `help`, and the papers to cite."""

from collections.abc import Sequence
from dataclasses import fields

from trl import GRPOConfig

from vgr_trl.config import AliasOptions, DAPOConfig, EvaluateOptions, ReportOptions, SkipOptions
from vgr_trl.config.effects import options_in_effect
from vgr_trl.reporting.views.card.model_use import About, code, introduced
from vgr_trl.reporting.views.card.papers import DAPO, ESTIMATORS, PAPERS, REWARDS, TAG_OF, Paper

TAGS = ("dapo", "vgr_trl")
TRL_PAPER = {"title": DAPO.title, "id": DAPO.arxiv, "citation": DAPO.bibtex}  # the form in which TRL wants the paper
BEFORE = "### Framework versions"  # heading of TRL's card that follows on the procedure
_ASIDE = (AliasOptions, ReportOptions, EvaluateOptions, SkipOptions, GRPOConfig)  # which steer no method
OF_THE_METHOD = {option.name for group in DAPOConfig.__bases__ if group not in _ASIDE for option in fields(group)}
OF_THE_METHOD |= {"early_reward_weights", "vgr_hard_negative", "attention_reward_scale"}


def method_tags(options: DAPOConfig, rewards: Sequence[str]) -> list[str]:
    """Return the tags of a model trained with `options` and the rewards of these names."""
    tags = [TAG_OF[paper] for paper in _papers(options, rewards) if paper in TAG_OF]
    return list(dict.fromkeys([*TAGS, *tags]))


def method_section(options: DAPOConfig, rewards: Sequence[str]) -> str:
    """Return, as Markdown, the rewards with their weights and the options that steered the method.

    Args:
        rewards: names of the reward functions, in the order of their weights.
    """
    weights = options.reward_weights or [1.0] * len(rewards)
    stated = ", ".join(_stated(options, name) for name in ("loss_type", "epsilon", "epsilon_high", "beta"))
    lines = [
        "### Training signal",
        "",
        f"`DAPOTrainer` of `vgr_trl`, which extends TRL's `GRPOTrainer`: loss {stated}, {options.num_generations} "
        "completions per prompt.",
        "",
        "| reward | weight |",
        "|---|---:|",
        *(f"| {_code(name)} | {weight:g} |" for name, weight in zip(rewards, weights, strict=True)),
        "",
    ]
    if found := _in_effect(options):
        lines += ["| option | what it does | paper |", "|---|---|---|"]
        for name, what in found.items():
            paper = _paper(options, name)
            lines.append(f"| {_stated(options, name)} | {_cell(what)} | {paper.link if paper else ''} |")
    else:
        lines.append("No option that `vgr_trl` adds to the method was on.")
    return "\n".join([*lines, ""])


def citations(options: DAPOConfig, rewards: Sequence[str]) -> str:
    """Return, as Markdown, the BibTeX of the papers behind what was on; DAPO's stands in TRL's part of the card."""
    others = [paper for paper in _papers(options, rewards) if paper != DAPO]
    if not others:
        return ""
    entries = "\n\n".join(paper.bibtex for paper in others)
    return f"Cite what the training signal builds on as:\n\n```bibtex\n{entries}\n```\n"


def extended_card(card: str, options: DAPOConfig, rewards: Sequence[str], about: About | None = None) -> str:
    """Return TRL's model card with the section and the citations in their places.

    Args:
        card: Markdown as TRL writes it.
        about: takes the place of what TRL's card says of origin and use; None: TRL's stays.
    """
    section = method_section(options, rewards)
    if about is not None:
        card = introduced(card, about)
    start, heading, rest = card.partition(BEFORE)
    card = f"{start}{section}\n{heading}{rest}" if heading else f"{card.rstrip()}\n\n{section}"
    cited = citations(options, rewards)
    return f"{card.rstrip()}\n\n{cited}" if cited else card


def _in_effect(options: DAPOConfig) -> dict[str, str]:
    """What each option of the method says of itself that was given, or that belongs to one that was."""
    return options_in_effect(options, OF_THE_METHOD)


def _paper(options: DAPOConfig, name: str) -> Paper | None:
    """Where what an option switches on comes from."""
    return ESTIMATORS.get(options.advantage_estimator) if name == "advantage_estimator" else PAPERS.get(name)


def _papers(options: DAPOConfig, rewards: Sequence[str]) -> list[Paper]:
    found = [_paper(options, name) for name in _in_effect(options)]
    found += [REWARDS.get(name) for name in rewards]
    return list(dict.fromkeys(paper for paper in found if paper is not None))


def _stated(options: DAPOConfig, name: str) -> str:
    return _code(f"{name}={getattr(options, name)}")


def _code(text: str) -> str:
    """Return `text` as code that can end neither its span nor its table cell."""
    return _cell(code(text))


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
