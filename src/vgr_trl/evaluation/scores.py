"""What an evaluation found, in numbers."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Scores:
    """What was measured on a set of questions; rates lie in [0, 1].

    `accuracy` and `format` are those of the greedy completion, `mean_at_k` and `format_sampled` means over the k
    sampled completions, `pass_at_k` the share of questions with at least one right among them (None for k = 0).
    """

    questions: int
    k: int
    accuracy: float
    mean_at_k: float | None
    pass_at_k: float | None
    format: float
    format_sampled: float | None


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


def scores_of(records: Sequence[dict[str, Any]]) -> Scores:
    """Return the scores of at least one record with correct, correct_sampled, format and format_sampled."""

    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(values)

    k = len(records[0]["correct_sampled"])
    return Scores(
        questions=len(records),
        k=k,
        accuracy=mean([record["correct"] for record in records]),
        mean_at_k=mean([mean(record["correct_sampled"]) for record in records]) if k else None,
        pass_at_k=mean([max(record["correct_sampled"]) for record in records]) if k else None,
        format=mean([record["format"] for record in records]),
        format_sampled=mean([mean(record["format_sampled"]) for record in records]) if k else None,
    )
