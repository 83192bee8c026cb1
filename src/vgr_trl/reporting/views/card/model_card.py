"""What a model card says beyond TRL's: rewards, the options that were on, and the papers to cite."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vgr_trl.reporting.views.card.model_use import About, introduced
from vgr_trl.reporting.views.card.papers import DAPO, ESTIMATORS, HIGH_ENTROPY, MDI, PAPO, PRIME, VPPO, Paper

TAGS = ("dapo", "vgr_trl")
TRL_PAPER = {"title": DAPO.title, "id": DAPO.arxiv, "citation": DAPO.bibtex}  # the form in which TRL wants the paper
ATTENTION_REWARDS = ("vgr_reward", "vgr_hard_negative_reward", "mdi_reward")
BEFORE = "### Framework versions"  # heading of TRL's card that follows on the procedure


@dataclass(frozen=True)
class Feature:
    """Something that options switch on.

    Attributes:
        is_on: whether it is, given the options.
        effect: what it does, in one clause.
        options: names of the options that steer it.
        paper: where it comes from.
        tag: of the model card.
    """

    is_on: Callable[[Any], bool]
    effect: str
    options: tuple[str, ...]
    paper: Paper | None = None
    tag: str | None = None


def _estimates_by(name: str) -> Callable[[Any], bool]:
    return lambda options: options.advantage_estimator == name


FEATURES = (
    *(
        Feature(
            _estimates_by(name),
            "advantages by another estimator than GRPO's",
            ("advantage_estimator", "critic", "gamma", "lam") if name == "gae" else ("advantage_estimator",),
            paper,
        )
        for name, paper in ESTIMATORS.items()
    ),
    Feature(
        lambda options: options.early_reward_weights is not None,
        "other reward weights at the start",
        ("early_reward_weights",),
    ),
    Feature(
        lambda options: options.token_weights,
        "tokens that look at the image more get more of the credit",
        (
            "token_weights_clip",
            "token_weights_topk_ratio",
            "token_weights_smooth_sigma",
            "token_weights_last_k_layers",
            "token_weights_positive_only",
        ),
        MDI,
        "vision-gain-ratio",
    ),
    Feature(
        lambda options: options.enable_perception_filtering,
        "credit only for the tokens that depend on the image, or weights by how much they do",
        ("top_p_perception_tokens", "perception_weighting", "perturbation"),
        VPPO,
        "vppo",
    ),
    Feature(
        lambda options: options.enable_trajectory_reweighting,
        "completions that depend on the image count more",
        ("trajectory_scaling_min", "perturbation"),
        VPPO,
        "vppo",
    ),
    Feature(
        lambda options: options.use_entropy_penalty,
        "a penalty on the negative log-probability of the tokens",
        ("entropy_penalty_coef",),
        VPPO,
        "vppo",
    ),
    Feature(
        lambda options: options.kl_coef > 0,
        "the policy is kept near its reference by their KL divergence",
        ("kl_coef", "kl_penalty", "use_kl_loss", "kl_type"),
    ),
    Feature(
        lambda options: options.enable_entropy_filtering,
        "credit only for the tokens of highest entropy",
        ("top_p_entropy_tokens",),
        HIGH_ENTROPY,
    ),
    Feature(
        lambda options: max(options.perception_loss_weight, options.der_loss_weight1, options.der_loss_weight2) > 0,
        "a loss that rewards answering differently without the image",
        ("perception_loss_weight", "der_loss_weight1", "der_loss_weight2", "perturbation"),
        PAPO,
        "papo",
    ),
    Feature(
        lambda options: options.replay_buffer_size > 0,
        "groups without a gradient are replaced by stored ones",
        ("replay_buffer_size", "filter_min_reward", "replay_max_age"),
    ),
    Feature(
        lambda options: options.dynamic_sampling is not None,
        "further prompts are drawn while groups have no gradient",
        ("dynamic_sampling", "dynamic_sampling_max_rounds"),
        DAPO,
    ),
    Feature(
        lambda options: options.online_filtering,
        "groups that are too easy or too hard are not trained on",
        ("filter_key", "filter_low", "filter_high"),
        PRIME,
    ),
)


def method_tags(options: Any, rewards: Sequence[str]) -> list[str]:
    """Return the tags of a model trained with `options`, a `DAPOConfig`, and the rewards of these names."""
    tags = [*TAGS, *(feature.tag for feature in _on(options) if feature.tag)]
    if set(rewards) & set(ATTENTION_REWARDS):
        tags.append("vision-gain-ratio")
    return list(dict.fromkeys(tags))


def method_section(options: Any, rewards: Sequence[str]) -> str:
    """Return, as Markdown, the rewards with their weights and what was switched on, with its options.

    Args:
        options: a `DAPOConfig`.
        rewards: names of the reward functions, in the order of their weights.
    """
    weights = options.reward_weights or [1.0] * len(rewards)
    lines = [
        "### Training signal",
        "",
        "`DAPOTrainer` of `vgr_trl`, which extends TRL's `GRPOTrainer`: loss "
        + ", ".join(_stated(options, name) for name in ("loss_type", "epsilon", "epsilon_high", "beta"))
        + f", {options.num_generations} completions per prompt.",
        "",
        "| reward | weight |",
        "|---|---:|",
        *(f"| {_code(name)} | {weight:g} |" for name, weight in zip(rewards, weights, strict=True)),
        "",
    ]
    if found := _on(options):
        lines += ["| what was on | options | paper |", "|---|---|---|"]
        for feature in found:
            given = [name for name in feature.options if getattr(options, name) is not None]
            stated = ", ".join(_stated(options, name) for name in given)
            lines.append(f"| {feature.effect} | {stated} | {feature.paper.link if feature.paper else ''} |")
    else:
        lines.append("No option that `vgr_trl` adds to the method was on.")
    return "\n".join([*lines, ""])


def citations(options: Any, rewards: Sequence[str]) -> str:
    """Return, as Markdown, the BibTeX of the papers behind what was on; DAPO's stands in TRL's part of the card."""
    papers = [feature.paper for feature in _on(options) if feature.paper is not None]
    if set(rewards) & set(ATTENTION_REWARDS):
        papers.append(MDI)
    others = [paper for paper in dict.fromkeys(papers) if paper != DAPO]
    if not others:
        return ""
    entries = "\n\n".join(paper.bibtex for paper in others)
    return f"Cite what the training signal builds on as:\n\n```bibtex\n{entries}\n```\n"


def extended_card(card: str, options: Any, rewards: Sequence[str], about: About | None = None) -> str:
    """Return TRL's model card with the section and the citations in their places.

    Args:
        card: Markdown as TRL writes it.
        options: a `DAPOConfig`.
        rewards: names of the reward functions, in the order of their weights.
        about: takes the place of what TRL's card says of origin and use; None: TRL's stays.
    """
    section = method_section(options, rewards)
    if about is not None:
        card = introduced(card, about)
    start, heading, rest = card.partition(BEFORE)
    card = f"{start}{section}\n{heading}{rest}" if heading else f"{card.rstrip()}\n\n{section}"
    cited = citations(options, rewards)
    return f"{card.rstrip()}\n\n{cited}" if cited else card


def _on(options: Any) -> list[Feature]:
    return [feature for feature in FEATURES if feature.is_on(options)]


def _stated(options: Any, name: str) -> str:
    return _code(f"{name}={getattr(options, name)}")


def _code(text: str) -> str:
    """Return `text` as code that can end neither its span nor its table cell."""
    text = " ".join(text.replace("`", "'").split())
    return f"`{text}`".replace("|", "\\|")
