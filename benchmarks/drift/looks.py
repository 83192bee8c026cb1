"""What completions of a model are, how they look at their images, and what makes them differ within a group."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from demo_signals import conversations, tokenised

from vgr_trl.demo.dataset import Rows
from vgr_trl.demo.shapes import FAMILIES
from vgr_trl.evaluation.writer import Writer
from vgr_trl.rewards import accuracy_reward, vgr_reward
from vgr_trl.signals import RolloutScorer, split_layers, vision_gain_ratio
from vgr_trl.signals.modality import special_token_ids
from vgr_trl.signals.ratios import token_vision_gain_ratio

GROUP = 8
NUMBERS = dict[str, float]


@dataclass(frozen=True)
class Said:
    """Sampled completions, GROUP of every row."""

    texts: list[str]
    right: list[float]


def sample(model: Any, processor: Any, rows: Rows) -> Said:
    """Return completions of a model, the same for the same model."""
    model.eval()
    torch.manual_seed(1)
    writer = Writer(model, processor, max_completion_length=16)
    texts = [text for group in writer.sample(writer.prompt(conversations(rows, False)), GROUP, 1.0) for text in group]
    right = accuracy_reward(texts, [row["solution"] for row in rows for _ in range(GROUP)])
    return Said(texts, [value or 0.0 for value in right])


def late_vgr(model: Any, processor: Any, rows: Rows, texts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return late VGR of completions, (N,), and of their tokens, (N, T)."""
    model.eval()
    repeated = [row for row in rows for _ in range(GROUP)]
    inputs: dict[str, Any] = Writer(model, processor, 16).prompt(conversations(repeated, False))
    ids, mask = tokenised(texts, processor)
    scorer = RolloutScorer(model, special_token_ids=special_token_ids(processor))
    prompt = inputs.pop("input_ids"), inputs.pop("attention_mask")
    mass = scorer.score(*prompt, ids, mask, num_generations=GROUP, **inputs).attention
    assert mass is not None
    late = split_layers(len(mass.vision))["late"]
    return vision_gain_ratio(mass, late).double(), token_vision_gain_ratio(mass, late).double()


def within_groups(model: Any, processor: Any, rows: Rows) -> NUMBERS:
    """Return what makes the VGR of completions of one prompt differ, under one model.

    `spread`: quartile distance over median; `best`: how much lower the lowest of a group is than its mean. Correlations
    are of ln VGR less its group's mean: with that of the same completions behind the image of another row of the same
    question (`other image`), between even and odd tokens (`halves`), with being right (`right`). `words`: share of the
    variance that is explained, on the other half of the groups, by which words and how many a completion has;
    `right, words apart`: the correlation with being right of what they leave. `alike`: share of groups whose
    completions are all right or all wrong; `reward of VGR`: share of all |advantage| that stands in them with the VGR
    reward at 0.2.
    """
    said = sample(model, processor, rows)
    vgr, tokens = late_vgr(model, processor, rows, said.texts)
    elsewhere, _ = late_vgr(model, processor, with_other_images(rows), said.texts)
    logs = centred(vgr.log())
    right = torch.tensor(said.right).double()
    groups = vgr.view(-1, GROUP)
    low, middle, high = torch.quantile(groups, torch.tensor([0.25, 0.5, 0.75]).double(), dim=1)
    explained, left = by_words(logs, said.texts)
    alike = right.view(-1, GROUP).std(1) == 0
    advantages = advantages_with_vgr(right, vgr).view(-1, GROUP).abs().sum(1)
    return {
        "VGR": float(vgr.mean()),
        "spread": float(((high - low) / middle).median()),
        "best": float(((groups.mean(1) - groups.min(1).values) / groups.mean(1)).mean()),
        "other image": correlation(logs, centred(elsewhere.log())),
        "halves": correlation(*(centred(tokens[:, start::2].nanmean(1).log()) for start in (0, 1))),
        "right": correlation(logs, centred(right)),
        "words": explained,
        "right, words apart": correlation(left, centred(right)),
        "alike": float(alike.double().mean()),
        "reward of VGR": float(advantages[alike].sum() / advantages.sum()),
    }


def with_other_images(rows: Rows) -> Rows:
    """Return the rows, each with the image of the next row that asks the same."""
    shown = list(rows)
    for family in FAMILIES:
        places = [place for place, row in enumerate(rows) if row["family"] == family]
        for place, other in zip(places, places[1:] + places[:1], strict=True):
            shown[place] = rows[place] | {"image": rows[other]["image"]}
    return shown


def centred(values: torch.Tensor) -> torch.Tensor:
    """Return values less the means of their groups, (N,)."""
    groups = values.view(-1, GROUP)
    return (groups - groups.mean(1, keepdim=True)).flatten()


def correlation(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the correlation of values that are centred already; 0 where one does not vary."""
    size = one.norm() * other.norm()
    return float(one @ other / size) if size > 0 else 0.0


def by_words(values: torch.Tensor, texts: Sequence[str]) -> tuple[float, torch.Tensor]:
    """Return how much of the variance the words of completions explain, and what they leave, (N,).

    Coefficients are those of the other half of the groups, with a small ridge.
    """
    split = [text.replace("<", " <").replace(">", "> ").split() for text in texts]
    names = sorted({word for words in split for word in words})
    counts = torch.tensor([[words.count(name) for name in names] for words in split]).double()
    counts = torch.stack([centred(column) for column in counts.T], dim=1)
    first = torch.arange(len(values)) // GROUP % 2 == 0
    left = values.clone()
    for known, asked in ((first, ~first), (~first, first)):
        gram = counts[known].T @ counts[known] + torch.eye(len(names)).double()
        left[asked] -= counts[asked] @ torch.linalg.solve(gram, counts[known].T @ values[known])
    return float(1 - left.square().sum() / values.square().sum()), left


def advantages_with_vgr(right: torch.Tensor, vgr: torch.Tensor) -> torch.Tensor:
    """Return group-normalised advantages of accuracy 2.5 and the VGR reward 0.2, (N,)."""
    ranks = torch.tensor(vgr_reward([""] * len(vgr), vgr.tolist(), GROUP)).double()
    rewards = (2.5 * right + 0.2 * ranks).view(-1, GROUP)
    return ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).flatten()


def parts(model: Any, processor: Any, rows: Rows, before: dict[str, Any], after: dict[str, Any]) -> NUMBERS:
    """Return how VGR changed from one state of a model to another, by what is said and by the weights that look.

    Each is the mean over both orders of changing one after the other. `bias`: how far the frequencies of the words in
    thoughts are from those of the truth (total variation, mean over colours, shapes and corners).
    """
    texts = {}
    for name, state in (("before", before), ("after", after)):
        model.load_state_dict(state)
        texts[name] = sample(model, processor, rows).texts
    found: dict[tuple[str, str], float] = {}
    for weights, state in (("before", before), ("after", after)):
        model.load_state_dict(state)
        for said in texts:
            found[weights, said] = float(late_vgr(model, processor, rows, texts[said])[0].mean())
    total = found["after", "after"] - found["before", "before"]
    other_words = (
        found["before", "after"] - found["before", "before"] + found["after", "after"] - found["after", "before"]
    )
    return {
        "late VGR": found["after", "after"],
        "said": other_words / 2,
        "weights": total - other_words / 2,
        "bias": bias(texts["after"], rows),
    }


def bias(texts: Sequence[str], rows: Rows) -> float:
    """Return how far the words of thoughts are from the truth in frequency, in [0, 1]."""
    thoughts = [text.split("</think>")[0].removeprefix("<think>").split() for text in texts]
    truth = [row["thought"].split() for row in rows for _ in range(GROUP)]

    def shares(said: Sequence[Sequence[str]], words: Sequence[str]) -> list[float]:
        counts = [sum(thought.count(word) for thought in said) for word in words]
        return [count / max(sum(counts), 1) for count in counts]

    return statistics.mean(
        sum(abs(a - b) for a, b in zip(shares(thoughts, words), shares(truth, words), strict=True)) / 2
        for _, words in FAMILIES.values()
    )
