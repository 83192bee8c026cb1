"""Rewards that are no numbers to compare."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from vgr_trl.errors import RewardError


def refuse_infinite(rewards: torch.Tensor, names: Sequence[str], rows: Sequence[Mapping[str, Any]], first: int) -> None:
    """Raise `RewardError` if a reward is infinite; NaN stands for one that does not apply.

    Args:
        rewards: of all processes, (N of all, number of functions); all processes raise together.
        names: of the reward functions.
        rows: of the data, of the completions of this process.
        first: number of the first of them among all.
    """
    infinite = rewards.isinf().nonzero().tolist()
    if not infinite:
        return
    row, function = infinite[0]
    here = f", {_shown(rows[row - first])}" if first <= row < first + len(rows) else ""
    raise RewardError(
        f"The reward {names[function]} is {rewards[row, function].item()} for row {row} of the {len(rewards)} of the "
        f"rollout batch{here}: return a finite float32 number, or None where the reward does not apply."
    )


def _shown(row: Mapping[str, Any]) -> str:
    """The row's `id`, if it has one, or the text that its prompt ends with."""
    if row.get("id") is not None:
        return f"of the data's row with id {row['id']!r}"
    prompt = row["prompt"]
    content = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    if not isinstance(content, str):
        content = " ".join(part.get("text") or "" for part in content).strip()
    return f"whose prompt ends with {content[-80:]!r}"
