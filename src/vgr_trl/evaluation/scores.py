"""What an evaluation found, in numbers."""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Scores:
    """What was measured on a set of questions; rates lie in [0, 1].

    `accuracy` and `format` are those of the greedy completion, `mean_at_k` and `format_sampled` means over the k
    sampled completions, `pass_at_k` the share of questions with at least one right among them (None for k = 0).
    `interval` is where accuracy lies with 95 % confidence (Wilson), `unparsable` the share of greedy completions that
    state no answer, `majority` what the commonest letter and the commonest open answer would reach, `blind` the
    accuracy with grey images, None where that was not measured. `rewards` are means of further reward functions over
    the greedy completions they apply to.
    """

    questions: int
    k: int
    accuracy: float
    mean_at_k: float | None
    pass_at_k: float | None
    format: float
    format_sampled: float | None
    interval: tuple[float, float] = (0.0, 1.0)
    unparsable: float = 0.0
    majority: float = 0.0
    blind: float | None = None
    rewards: dict[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Evaluation(Scores):
    """Scores of all questions and of each group of them, what the model wrote, and how many rows had no solution."""

    skipped: int = 0
    groups: dict[str, Scores] = field(default_factory=dict)
    records: list[dict[str, Any]] = field(default_factory=list, repr=False)

    def to_dict(self, records: bool = False) -> dict[str, Any]:
        """Return the numbers as plain Python values; with `records` also every completion."""
        values = asdict(self)
        if not records:
            del values["records"]
        return values


def evaluation_of(records: list[dict[str, Any]], groups: Sequence[str] | None = None) -> Evaluation:
    """Return the scores of all records with a solution, one at least, and of each of their groups.

    Args:
        records: of the questions, as `judged` makes them.
        groups: of each of them; None: there are none.
    """
    scored = [record for record in records if record["correct"] is not None]
    members = defaultdict(list)
    for record, group in zip(records, groups or (), strict=groups is not None):
        if record["correct"] is not None:
            members[group].append(record)
    return Evaluation(
        **asdict(scores_of(scored)),
        skipped=len(records) - len(scored),
        groups={name: scores_of(of_group) for name, of_group in sorted(members.items())},
        records=records,
    )


def scores_of(records: Sequence[dict[str, Any]]) -> Scores:
    """Return the scores of at least one record with correct, correct_sampled, format and format_sampled."""

    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(values)

    k = len(records[0]["correct_sampled"])
    right = sum(record["correct"] for record in records)
    blind = [record["correct_blind"] for record in records if record.get("correct_blind") is not None]
    return Scores(
        questions=len(records),
        k=k,
        accuracy=mean([record["correct"] for record in records]),
        mean_at_k=mean([mean(record["correct_sampled"]) for record in records]) if k else None,
        pass_at_k=mean([max(record["correct_sampled"]) for record in records]) if k else None,
        format=mean([record["format"] for record in records]),
        format_sampled=mean([mean(record["format_sampled"]) for record in records]) if k else None,
        interval=wilson(right, len(records)),
        unparsable=mean([not record.get("parsed", True) for record in records]),
        majority=majority([record.get("answer") for record in records]),
        blind=mean(blind) if blind else None,
        rewards=_mean_rewards(records),
    )


def wilson(right: float, count: int, z: float = 1.959964) -> tuple[float, float]:
    """Return the interval of a share of `right` among `count` trials (E. B. Wilson, 1927), z deviations wide."""
    share, spread = right / count, z * z / count
    centre = (share + spread / 2) / (1 + spread)
    half = z * math.sqrt(share * (1 - share) / count + spread / count / 4) / (1 + spread)
    return max(0.0, centre - half), min(1.0, centre + half)


def majority(answers: Sequence[tuple[str, Any] | None]) -> float:
    """Return what share is right where each kind of question always gets its commonest answer.

    Args:
        answers: per question its kind (`letter` or `text`) and what is right; None: not known, wrong.
    """
    counts = Counter(tuple(answer) for answer in answers if answer is not None)
    best = {kind: max(count for (of, _), count in counts.items() if of == kind) for kind, _ in counts}
    return sum(best.values()) / len(answers)


def _mean_rewards(records: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    means = {}
    for name in records[0].get("rewards", {}):
        values = [record["rewards"][name] for record in records if record["rewards"][name] is not None]
        means[name] = sum(values) / len(values) if values else None
    return means
