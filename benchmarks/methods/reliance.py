"""How far answers rely on a hint in the question."""

from collections.abc import Mapping, Sequence
from typing import Any

from vgr_trl.demo.dataset import Rows
from vgr_trl.evaluation import Evaluation


def reliance(seen: Evaluation, blanked: Evaluation, rows: Rows) -> dict[str, float]:
    """Return how far sampled answers rely on the hint, in [0, 1].

    copied: answers that are the hint where it misleads. blanked, hint true: accuracy with the image blanked where the
    hint is true, which is 1 for a copy of the hint and the family's chance for a guess.
    """
    return {
        "copied": round(copies(seen, rows), 4),
        "blanked, hint true": round(blanked.groups["true"].mean_at_k or 0.0, 4),
    }


def copies(seen: Evaluation, rows: Sequence[Mapping[str, Any]]) -> float:
    """Return the share of sampled answers that are the hint, of rows where it misleads."""
    same = [
        answer_of(text) == row["hint_word"]
        for row, record in zip(rows, seen.records, strict=True)
        if row["hint"] == "false"
        for text in record["sampled"]
    ]
    return sum(same) / len(same)


def answer_of(text: str) -> str:
    """Return what stands between the tags of an answer."""
    return text.partition("<answer>")[2].partition("</answer>")[0]
