"""Rewards of attention in several forms, beside accuracy 2.5, format 0.5 and length 1, and two controls."""

import random
from dataclasses import dataclass, field
from typing import Any

from collapse import floored

from vgr_trl.rewards import (
    accuracy_reward,
    get_soft_overlong_punishment,
    mdi_reward,
    needs_whole_groups,
    think_format_reward,
    vgr_reward,
)

ACCURACY, FORMAT, LENGTH = 2.5, 0.5, 1.0
SCALED = {"attention_reward_scale": "accuracy"}
UNDIVIDED = {"scale_rewards": "none"}
APART = {"multi_objective_aggregation": "normalize_then_sum"}


@dataclass(frozen=True)
class Variant:
    """What is trained with.

    Attributes:
        reward: beside the other three; None: there is none.
        weight: of that reward.
        options: of `DAPOConfig`.
    """

    reward: Any = None
    weight: float = 0.2
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def rewards(self) -> list[Any]:
        """All rewards."""
        others = [accuracy_reward, think_format_reward, get_soft_overlong_punishment(16, 5)]
        return others if self.reward is None else [*others, self.reward]

    @property
    def weights(self) -> list[float]:
        """Their weights."""
        return [ACCURACY, FORMAT, LENGTH] + [self.weight] * (self.reward is not None)


@needs_whole_groups("vgr")
def drawn_reward(completions: Any, vgr: Any, num_generations: int, **kwargs: Any) -> list[float | None]:
    """Return the VGR reward of the group's values in random order: as large, and of nothing."""
    drawn: list[Any] = []
    for first in range(0, len(vgr), num_generations):
        group = vgr[first : first + num_generations]
        drawn += random.sample(group, len(group))
    return vgr_reward(completions, drawn, num_generations)


VARIANTS = {
    "plain": Variant(),
    "VGR": Variant(vgr_reward),
    "VGR, drawn": Variant(drawn_reward),
    "VGR, floor 0.2": Variant(floored(0.2)),
    "VGR, not divided": Variant(vgr_reward, options=UNDIVIDED),
    "VGR, each divided": Variant(vgr_reward, options=APART),
    "VGR, scaled": Variant(vgr_reward, options=SCALED),
    "VGR 1.0": Variant(vgr_reward, 1.0),
    "VGR 1.0, not divided": Variant(vgr_reward, 1.0, UNDIVIDED),
    "VGR 1.0, each divided": Variant(vgr_reward, 1.0, APART),
    "VGR 1.0, scaled": Variant(vgr_reward, 1.0, SCALED),
    "MDI": Variant(mdi_reward),
    "MDI, scaled": Variant(mdi_reward, options=SCALED),
}
