"""Rewards with verl's signature, `compute_score`, and with EasyR1's, `compute_scores`.

Computes accuracy, format and length. Attention rewards are added after the actor's pass, by the options
`vgr_reward_weight`, `hard_negative_reward_weight` and `mdi_reward_weight`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from vgr_trl.errors import RewardError
from vgr_trl.rewards.functions import accuracy_reward, get_soft_overlong_punishment, think_format_reward

REWARD_NAME, REWARD_TYPE = "vgr", "batch"  # read by EasyR1


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    accuracy_weight: float = 1.0,
    format_weight: float = 0.0,
    length_weight: float = 0.0,
    max_completion_len: int | None = None,
    soft_punish_cache: int | None = None,
    reward_router_address: str | None = None,
    reward_model_tokenizer: Any = None,
) -> dict[str, float]:
    """Return accuracy, format and length, and their weighted sum as `score`.

    Accuracy is 1 for a right answer, else 0, also if the ground truth cannot be resolved. Format is 1 for a thought
    followed by an answer. Length is the soft overlong punishment.

    Args:
        data_source: of the row; not used.
        solution_str: the completion.
        ground_truth: a `solution` of `accuracy_reward`.
        extra_info: of the row; `choices` and `response_length` are used.
        accuracy_weight, format_weight, length_weight: weights of the rewards.
        max_completion_len, soft_punish_cache: of the length reward, in tokens.
        reward_router_address, reward_model_tokenizer: passed by verl's reward managers; not used.

    Raises:
        RewardError: the length reward has a weight, but an argument that it needs is missing.
    """
    info = extra_info or {}
    choices = info.get("choices")
    accuracy = accuracy_reward([solution_str], [ground_truth], None if choices is None else [list(choices)])[0] or 0.0
    score = {"accuracy": accuracy, "format": think_format_reward([solution_str])[0]}
    total = accuracy_weight * score["accuracy"] + format_weight * score["format"]
    if length_weight:
        if max_completion_len is None or soft_punish_cache is None or "response_length" not in info:
            raise RewardError("Length needs max_completion_len, soft_punish_cache, and response_length in extra_info.")
        punishment = get_soft_overlong_punishment(max_completion_len, soft_punish_cache)
        score["length"] = punishment([range(int(info["response_length"]))])[0]
        total += length_weight * score["length"]
    return {"score": total, **score}


def compute_scores(reward_inputs: Sequence[Mapping[str, Any]], **weights: Any) -> list[dict[str, float]]:
    """Return `overall`, `accuracy`, `format` (and `length`) of each completion.

    Args:
        reward_inputs: per completion `response`, `response_length` and `ground_truth`.
        weights: keyword arguments of `compute_score`.
    """
    scores = []
    for given in reward_inputs:
        score = compute_score("", given["response"], given["ground_truth"], given, **weights)
        scores.append({"overall": score.pop("score"), **score})
    return scores
