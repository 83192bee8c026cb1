"""What a model card says beyond TRL's: rewards, the options that were on with their `help`, and the papers to cite."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from trl import GRPOConfig

from vgr_trl.config import AliasOptions, EfficiencyOptions, EvaluateOptions, ReportOptions
from vgr_trl.dapo_config import DAPOConfig
from vgr_trl.options import options_in_effect

# ---------------------------------------------------------------------------------------------------------------------
# What a model card says of a model's origin, and how to use it.


_ORIGIN = re.compile(r"^This model is a fine-tuned version of .*$", re.MULTILINE)
_USE = re.compile(r"(?<=^## Quick start\n\n)```python\n.*?\n```", re.MULTILINE | re.DOTALL)
_VISION = """\
from transformers import AutoModelForImageTextToText, AutoProcessor

model = AutoModelForImageTextToText.from_pretrained("{where}", device_map="auto")
processor = AutoProcessor.from_pretrained("{where}")
question = "What is in the picture?\\nA. a cat\\nB. a dog"
messages = [
{system}    {{
        "role": "user",
        "content": [{{"type": "image", "image": "picture.jpg"}}, {{"type": "text", "text": question}}],
    }},
]
inputs = processor.apply_chat_template(
    messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
).to(model.device)
output = model.generate(**inputs, max_new_tokens={length})
print(processor.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))"""
_TEXT = """\
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{where}", device_map="auto")
tokenizer = AutoTokenizer.from_pretrained("{where}")
messages = [
{system}    {{"role": "user", "content": "What is 7 times 8?"}},
]
inputs = tokenizer.apply_chat_template(
    messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
).to(model.device)
output = model.generate(**inputs, max_new_tokens={length})
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))"""


@dataclass(frozen=True)
class About:
    """A trained model.

    Attributes:
        name: of the model.
        where: a hub name or folder, from which it is loaded.
        base: what it was trained from; None: its own weights, of no name.
        data: what it was trained on; None: not known.
        rows: of that; None: a stream.
        system: the system prompt of training; None: none.
        reads_images: whether it is a vision-language model.
        length: longest completion of training, in tokens.
    """

    name: str
    where: str
    base: str | None
    data: str | None
    rows: int | None
    system: str | None
    reads_images: bool
    length: int


def introduced(card: str, about: About) -> str:
    """Return TRL's card with its sentence on origin and its example replaced by those of the model."""
    source = f"trained from {_linked(about.base)}" if about.base else "trained"
    rows = f"{about.rows:,} rows" if about.rows is not None else "a stream"
    on = f" on {rows} of {code(about.data)}" if about.data else f" on {rows}"
    origin = (
        f"This {'vision-language ' if about.reads_images else ''}model was {source}{on}, by reinforcement learning."
    )
    system = f'    {{"role": "system", "content": {about.system!r}}},\n' if about.system else ""
    example = (_VISION if about.reads_images else _TEXT).format(where=about.where, system=system, length=about.length)
    card = _ORIGIN.sub(lambda _: origin, card, count=1)
    card = _USE.sub(lambda _: f"```python\n{example}\n```", card, count=1)
    return re.sub(
        r"^# Model Card for .*$", lambda _: f"# Model Card for {about.name}", card, count=1, flags=re.MULTILINE
    )


def _linked(name: str) -> str:
    return code(name) if Path(name).exists() else f"[{name}](https://huggingface.co/{name})"


def code(text: str) -> str:
    """Return `text` as code whose span it cannot end."""
    return f"`{' '.join(text.replace('`', chr(39)).split())}`"


# ---------------------------------------------------------------------------------------------------------------------
# The papers behind the options of this library, as `papers.bib` has them.


_ENTRY = re.compile(r"@misc\{(?P<key>\w+),\n(?P<fields>.*?)\n\}", re.DOTALL)
_FIELD = re.compile(r"^ +(\w+) += \{(.*)\},$", re.MULTILINE)


@dataclass(frozen=True)
class Paper:
    """A paper on arXiv, and the entry that cites it."""

    title: str
    arxiv: str
    bibtex: str

    @property
    def link(self) -> str:
        """The paper as a Markdown link."""
        return f"[{self.title}](https://huggingface.co/papers/{self.arxiv})"


def _read(text: str) -> dict[str, Paper]:
    found = {}
    for entry in _ENTRY.finditer(text):
        fields = dict(_FIELD.findall(entry["fields"]))
        found[entry["key"]] = Paper(fields["title"].strip("{}"), fields["eprint"], entry[0])
    return found


_PAPERS = _read(Path(__file__).with_name("papers.bib").read_text(encoding="utf-8"))
DAPO, MDI, VPPO, PAPO = (
    _PAPERS[key] for key in ("yu2025dapo", "wu2025language", "huang2025spotlight", "wang2025perception")
)
ESTIMATORS = {
    "rloo": _PAPERS["ahmadian2024back"],
    "remax": _PAPERS["li2023remax"],
    "reinforce_plus_plus": _PAPERS["hu2025reinforce"],
    "gae": _PAPERS["schulman2015high"],
    "grpo_passk": _PAPERS["tang2025optimizing"],
}
PAPERS = {  # option -> where what it switches on comes from
    "token_weights": MDI,
    **dict.fromkeys(("enable_perception_filtering", "enable_trajectory_reweighting", "use_entropy_penalty"), VPPO),
    **dict.fromkeys(("perception_loss_weight", "der_loss_weight1", "der_loss_weight2"), PAPO),
    "noisy_generations": _PAPERS["liu2025noisyrollout"],
    "enable_entropy_filtering": _PAPERS["wang2025beyond"],
    "dynamic_sampling": DAPO,
    "online_filtering": _PAPERS["cui2025process"],
}
REWARDS = {  # reward -> where it comes from
    **dict.fromkeys(("vgr_reward", "vgr_hard_negative_reward", "mdi_reward"), MDI),
    "blind_accuracy_reward": _PAPERS["li2025self"],
}
TAG_OF = {MDI: "vision-gain-ratio", VPPO: "vppo", PAPO: "papo"}


TAGS = ("dapo", "vgr_trl")
TRL_PAPER = {"title": DAPO.title, "id": DAPO.arxiv, "citation": DAPO.bibtex}  # the form in which TRL wants the paper
BEFORE = "### Framework versions"  # heading of TRL's card that follows on the procedure
_ASIDE = (AliasOptions, ReportOptions, EvaluateOptions, EfficiencyOptions, GRPOConfig)  # which steer no method
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
