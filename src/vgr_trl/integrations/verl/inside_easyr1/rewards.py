"""A reward file for EasyR1: `worker.reward.reward_function=<this file>:compute_score`."""

from collections.abc import Mapping, Sequence
from typing import Any

from vgr_trl.integrations.verl import rewards

REWARD_NAME = "vgr"
REWARD_TYPE = "batch"


def compute_score(reward_inputs: Sequence[Mapping[str, Any]], **weights: Any) -> list[dict[str, float]]:
    """Return `overall`, `accuracy`, `format` (and `length`) of each completion.

    Args:
        reward_inputs: per completion `response`, `response_length` and `ground_truth`.
        weights: keyword arguments of `vgr_trl.integrations.verl.rewards.compute_score`.
    """
    scores = []
    for given in reward_inputs:
        score = rewards.compute_score("", given["response"], given["ground_truth"], given, **weights)
        scores.append({"overall": score.pop("score"), **score})
    return scores
