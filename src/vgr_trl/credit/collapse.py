"""Signs that the implicit perception loss is being won by breaking the policy, as the paper on it describes them.

See "Early signs of KL hacking" and "Influential factors" in PAPO, https://huggingface.co/papers/2507.06448.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import mean
from typing import NamedTuple

PERCEPTION_LOSS = "perception_loss"
ENTROPIES = ("entropy", "perturbed_entropy")
CLIPPED = ("clip_ratio/high_mean", "cispo_clip_ratio")

_SHORTEST_HISTORY = 8
_COLLAPSES = 0.04
_COLLAPSES_WITHOUT_ENTROPY_TERMS = 0.02  # 7B models did, 3B models did not


def coefficient_warning(
    coefficient: float, entropy_coefficient: float = 0.0, perturbed_entropy_coefficient: float = 0.0
) -> str | None:
    """Return one sentence if the perception loss has a coefficient at which the paper saw collapse, else None.

    Args:
        coefficient: weight of the perception loss (gamma), at least 0.
        entropy_coefficient: weight of the entropy of the original tokens (eta_1), at least 0.
        perturbed_entropy_coefficient: weight of the entropy given the perturbed image (eta_2), at least 0.
    """
    if coefficient >= _COLLAPSES:
        return (
            f"The coefficient of the perception loss is {coefficient}, and runs collapsed at {_COLLAPSES}: use "
            f"{_COLLAPSES_WITHOUT_ENTROPY_TERMS} or less."
        )
    if coefficient >= _COLLAPSES_WITHOUT_ENTROPY_TERMS and min(entropy_coefficient, perturbed_entropy_coefficient) <= 0:
        return (
            f"The coefficient of the perception loss is {coefficient} without both entropy terms, and 7B models "
            f"collapsed so at {_COLLAPSES_WITHOUT_ENTROPY_TERMS}: lower it, or set both entropy coefficients to about "
            "0.03."
        )
    return None


def collapse_warning(history: Sequence[Mapping[str, float]]) -> str | None:
    """Return one sentence naming the signs of collapse in the newest quarter of the history, or None.

    All signs must be there: the mean perception loss of the newest quarter has fallen below twice the lowest value
    before (it is the negative divergence), and the means of both entropies and of the clipped fraction have risen
    above the highest values before. A clipped fraction that is missing, or 0 throughout (one optimizer step per
    rollout has no ratio to clip), is no sign either way.

    Args:
        history: metrics of consecutive steps, oldest first; at least 8, better 20 to 50. Read are `perception_loss`
            (negative mean divergence, without its coefficient), `entropy`, `perturbed_entropy` and
            `clip_ratio/high_mean` (or `cispo_clip_ratio`). Steps that lack a value or have NaN do not count for it.
    """
    loss = _changes(history, PERCEPTION_LOSS)
    if loss is None or not loss.now < 2 * min(loss.lowest_before, 0.0):
        return None
    signs = [f"{PERCEPTION_LOSS} fell from {loss}"]
    for name in (*ENTROPIES, *CLIPPED):
        series = _changes(history, name)
        if name in CLIPPED and (series is None or series.highest_before == series.now == 0):
            continue
        if series is None or not series.now > series.highest_before:
            return None
        signs.append(f"{name} rose from {series}")
    return (
        f"The policy shows the signs of a collapse caused by the perception loss: {', '.join(signs)}; go back to an "
        "earlier checkpoint with a lower coefficient, or with higher weights of both entropy terms."
    )


class _Changes(NamedTuple):
    """A metric before the newest quarter of the history, and its mean in it."""

    lowest_before: float
    highest_before: float
    mean_before: float
    now: float

    def __str__(self) -> str:
        return f"{self.mean_before:.3g} to {self.now:.3g}"


def _changes(history: Sequence[Mapping[str, float]], name: str) -> _Changes | None:
    """None where fewer than `_SHORTEST_HISTORY` steps have a value."""
    values = [step[name] for step in history if not math.isnan(step.get(name, math.nan))]
    if len(values) < _SHORTEST_HISTORY:
        return None
    newest = len(values) // 4
    before, now = values[:-newest], values[-newest:]
    return _Changes(min(before), max(before), mean(before), mean(now))
