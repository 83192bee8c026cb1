"""What a model card says beyond TRL's: origin, use, rewards, the options that were on, and the papers to cite."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from trl import GRPOConfig

from vgr_trl.config import AliasOptions, EfficiencyOptions, EvaluateOptions, ReportOptions
from vgr_trl.dapo_config import DAPOConfig
from vgr_trl.loss import PENALTY
from vgr_trl.options import options_in_effect
from vgr_trl.rollout import ConstructedTrainer


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


def _read_papers() -> dict[str, Paper]:
    papers = {}
    text = Path(__file__).with_name("papers.bib").read_text(encoding="utf-8")
    for entry in re.finditer(r"@misc\{(\w+),\n(.*?)\n\}", text, re.DOTALL):
        values = dict(re.findall(r"^ +(\w+) += \{(.*)\},$", entry[2], re.MULTILINE))
        papers[entry[1]] = Paper(values["title"].strip("{}"), values["eprint"], entry[0])
    return papers


PAPERS = _read_papers()
DAPO, MDI, VPPO, PAPO = "yu2025dapo", "wu2025language", "huang2025spotlight", "wang2025perception"
OF_ESTIMATOR = {
    "rloo": "ahmadian2024back", "remax": "li2023remax", "reinforce_plus_plus": "hu2025reinforce",
    "gae": "schulman2015high", "grpo_passk": "tang2025optimizing",
}  # fmt: skip
OF_OPTION = {  # option -> where what it switches on comes from
    "token_weights": MDI, "enable_perception_filtering": VPPO, "enable_trajectory_reweighting": VPPO,
    "use_entropy_penalty": VPPO, "perception_loss_weight": PAPO, "der_loss_weight1": PAPO, "der_loss_weight2": PAPO,
    "noisy_generations": "liu2025noisyrollout", "enable_entropy_filtering": "wang2025beyond", "dynamic_sampling": DAPO,
    "online_filtering": "cui2025process",
}  # fmt: skip
OF_REWARD = {
    "vgr_reward": MDI, "vgr_hard_negative_reward": MDI, "mdi_reward": MDI, "blind_accuracy_reward": "li2025self",
}  # fmt: skip
TAG_OF = {MDI: "vision-gain-ratio", VPPO: "vppo", PAPO: "papo"}
TAGS = ("dapo", "vgr_trl")
TRL_PAPER = {  # the form in which TRL wants the paper
    "title": PAPERS[DAPO].title, "id": PAPERS[DAPO].arxiv, "citation": PAPERS[DAPO].bibtex,
}  # fmt: skip
_ASIDE = (AliasOptions, ReportOptions, EvaluateOptions, EfficiencyOptions, GRPOConfig)  # which steer no method
OF_THE_METHOD = {option.name for group in DAPOConfig.__bases__ if group not in _ASIDE for option in fields(group)}
OF_THE_METHOD |= {"early_reward_weights", "vgr_hard_negative", "attention_reward_scale"}

_EXAMPLE = """\
from transformers import {auto}, {reader}

model = {auto}.from_pretrained("{where}", device_map="auto")
{name} = {reader}.from_pretrained("{where}")
messages = [
{system}    {{"role": "user", "content": {content}}},
]
inputs = {name}.apply_chat_template(
    messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
).to(model.device)
output = model.generate(**inputs, max_new_tokens={length})
print({name}.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))"""
_QUESTION = r'{"type": "text", "text": "What is in the picture?\nA. a cat\nB. a dog"}'
_CONTENT = f'[\n        {{"type": "image", "image": "picture.jpg"}},\n        {_QUESTION},\n    ]'


def rewards_of(trainer: ConstructedTrainer) -> list[str]:
    """Return the names of the rewards that a user has given."""
    return [name for name in trainer.reward_func_names if name != PENALTY]


def method_tags(options: DAPOConfig, rewards: Sequence[str]) -> list[str]:
    """Return the tags of a model trained with `options` and the rewards of these names."""
    return [*TAGS, *(TAG_OF[key] for key in papers_behind(options, rewards) if key in TAG_OF)]


def extend_card(trainer: ConstructedTrainer, name: str | None, data: str | None) -> None:
    """Add to the card that TRL has written: origin and use, rewards, the options that were on, the papers to cite.

    Args:
        name: of the model; None: that of its folder.
        data: what it was trained on; None: not known.
    """
    file = Path(str(trainer.args.output_dir), "README.md")
    card = with_origin(file.read_text(encoding="utf-8"), trainer, name, data)
    file.write_text(extended_card(card, trainer.args, rewards_of(trainer)), encoding="utf-8")


def with_origin(card: str, trainer: ConstructedTrainer, name: str | None, data: str | None) -> str:
    """Return TRL's card with its title, its sentence on origin and its example replaced by those of the model."""
    args, rows, has_images = trainer.args, trainer.train_dataset, bool(trainer._is_vlm)
    count = len(rows) if hasattr(rows, "__len__") else 0
    system = _system_prompt(rows[0]) if count else None
    example = _EXAMPLE.format(
        auto="AutoModelForImageTextToText" if has_images else "AutoModelForCausalLM",
        reader="AutoProcessor" if has_images else "AutoTokenizer",
        name="processor" if has_images else "tokenizer",
        where=args.hub_model_id or str(args.output_dir),
        system=f'    {{"role": "system", "content": {system!r}}},\n' if system else "",
        content=_CONTENT if has_images else '"What is 7 times 8?"',
        length=args.max_completion_length or 512,
    )
    origin = f"This {'vision-language ' if has_images else ''}model was trained"
    if base := getattr(trainer.model.config, "_name_or_path", None):
        origin += f" from {code(base) if Path(base).exists() else f'[{base}](https://huggingface.co/{base})'}"
    origin += f" on {f'{count:,} rows' if count else 'a stream'}{f' of {code(data)}' if data else ''}"
    title = f"# Model Card for {name or Path(str(args.output_dir)).resolve().name}"
    for pattern, text in (
        (r"^This model is a fine-tuned version of .*$", f"{origin}, by reinforcement learning."),
        (r"(?s:(?<=^## Quick start\n\n)```python\n.*?\n```)", f"```python\n{example}\n```"),
        (r"^# Model Card for .*$", title),
    ):
        card = re.sub(pattern, lambda _, text=text: text, card, count=1, flags=re.MULTILINE)  # type: ignore[misc]
    return card


def _system_prompt(row: Mapping[str, Any]) -> str | None:
    prompt = row.get("prompt")
    first = prompt[0] if isinstance(prompt, list) and prompt else None
    if not isinstance(first, Mapping) or first.get("role") != "system":
        return None
    content = first["content"]
    return content if isinstance(content, str) else "".join(part.get("text") or "" for part in content)


def extended_card(card: str, options: DAPOConfig, rewards: Sequence[str]) -> str:
    """Return TRL's model card, as Markdown, with the section before the versions and the citations at the end."""
    start, heading, rest = card.partition("### Framework versions")
    card = f"{start.rstrip()}\n\n{method_section(options, rewards)}\n{heading}{rest}".rstrip() + "\n"
    entries = [PAPERS[key].bibtex for key in papers_behind(options, rewards) if key != DAPO]  # DAPO's is in TRL's part
    if entries:
        card += "\nCite what the training signal builds on as:\n\n```bibtex\n" + "\n\n".join(entries) + "\n```\n"
    return card


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
        *(f"| {_cell(code(name))} | {weight:g} |" for name, weight in zip(rewards, weights, strict=True)),
        "",
    ]
    if found := options_in_effect(options, OF_THE_METHOD):
        lines += ["| option | what it does | paper |", "|---|---|---|"]
        for name, what in found.items():
            key = _paper(options, name)
            lines.append(f"| {_stated(options, name)} | {_cell(what)} | {PAPERS[key].link if key else ''} |")
    else:
        lines.append("No option that `vgr_trl` adds to the method was on.")
    return "\n".join([*lines, ""])


def papers_behind(options: DAPOConfig, rewards: Sequence[str]) -> list[str]:
    """Return the keys in `papers.bib` of what was on, each once."""
    keys = [_paper(options, name) for name in options_in_effect(options, OF_THE_METHOD)]
    return list(dict.fromkeys(key for key in (*keys, *map(OF_REWARD.get, rewards)) if key is not None))


def _paper(options: DAPOConfig, name: str) -> str | None:
    return OF_ESTIMATOR.get(options.advantage_estimator) if name == "advantage_estimator" else OF_OPTION.get(name)


def _stated(options: DAPOConfig, name: str) -> str:
    return _cell(code(f"{name}={getattr(options, name)}"))


def code(text: str) -> str:
    """Return `text` as code whose span it cannot end."""
    return f"`{' '.join(text.replace('`', chr(39)).split())}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
