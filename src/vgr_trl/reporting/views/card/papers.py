"""The papers behind the options of this library, as `papers.bib` has them."""

import re
from dataclasses import dataclass
from pathlib import Path

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
