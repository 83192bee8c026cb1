"""Rewards with verl's signature, `compute_score(data_source, solution_str, ground_truth, extra_info)`.

Accuracy, format and length are known as soon as a completion is; the rewards made of attention come from
`extra_info`, for whoever has measured it there. In a run of verl they are added behind the pass in the actor, by the
options `vgr_reward_weight`, `hard_negative_reward_weight` and `mdi_reward_weight`.
"""

from collections.abc import Callable, Mapping
from typing import Any

from vgr_trl.rewards.accuracy import accuracy_reward
from vgr_trl.rewards.attention import hard_negative_rewards, mdi_reward, vgr_reward
from vgr_trl.rewards.simple import get_soft_overlong_punishment, think_format_reward
from vgr_trl.utils import RewardError

Info = Mapping[str, Any] | None


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Info = None,
    *,
    accuracy_weight: float = 1.0,
    format_weight: float = 0.0,
    length_weight: float = 0.0,
    max_completion_len: int | None = None,
    soft_punish_cache: int | None = None,
    reward_router_address: str | None = None,
    reward_model_tokenizer: Any = None,
) -> dict[str, float]:
    """Return the weighted sum of accuracy, format and length as `score`, and each of them.

    Args:
        data_source: of the row; not used.
        solution_str: the completion.
        ground_truth: as `accuracy_reward` takes a solution.
        extra_info: of the row; `choices` of it are used, and `response_length` for the length.
        accuracy_weight, format_weight, length_weight: of the rewards.
        max_completion_len, soft_punish_cache: of the length, in tokens.
        reward_router_address, reward_model_tokenizer: passed by verl's reward managers; not used.

    Raises:
        RewardError: the length has a weight, and something that it needs is not given.
    """
    score = {
        "accuracy": accuracy_score(data_source, solution_str, ground_truth, extra_info),
        "format": format_score(data_source, solution_str, ground_truth, extra_info),
    }
    total = accuracy_weight * score["accuracy"] + format_weight * score["format"]
    if length_weight:
        score["length"] = length_score(
            data_source,
            solution_str,
            ground_truth,
            extra_info,
            max_completion_len=max_completion_len,
            soft_punish_cache=soft_punish_cache,
        )
        total += length_weight * score["length"]
    return {"score": total, **score}


def accuracy_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Info = None) -> float:
    """Return 1 for a right answer, else 0; 0 too where the ground truth cannot be resolved."""
    choices = (extra_info or {}).get("choices")
    return accuracy_reward([solution_str], [ground_truth], None if choices is None else [list(choices)])[0] or 0.0


def format_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Info = None) -> float:
    """Return 1 for a thought and then an answer, else 0."""
    return think_format_reward([solution_str])[0]


def length_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Info = None,
    *,
    max_completion_len: int | None = None,
    soft_punish_cache: int | None = None,
) -> float:
    """Return the soft overlong punishment, from `response_length` of `extra_info`."""
    length = _given(extra_info, "response_length", "length")
    if max_completion_len is None or soft_punish_cache is None:
        raise RewardError("The length reward needs max_completion_len and soft_punish_cache, in tokens: give both.")
    punishment = get_soft_overlong_punishment(max_completion_len, soft_punish_cache)
    return punishment([range(int(length))])[0]


def mdi_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Info = None) -> float | None:
    """Return the MDI reward, from `vgr` of `extra_info`; None where that is undefined."""
    return mdi_reward([solution_str], [_given(extra_info, "vgr", "mdi")])[0]


def vgr_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Info = None) -> float | None:
    """Return the VGR reward of one completion, from `group_vgr` and its own `group_index` of `extra_info`."""
    group = list(_given(extra_info, "group_vgr", "vgr"))
    return vgr_reward([""] * len(group), group, len(group))[int(_given(extra_info, "group_index", "vgr"))]


def hard_negative_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Info = None
) -> float | None:
    """Return the VGR reward among right answers, from `group_vgr`, `group_accuracy` and `group_index`."""
    group = list(_given(extra_info, "group_vgr", "vgr_hard_negative"))
    accuracy = list(_given(extra_info, "group_accuracy", "vgr_hard_negative"))
    rewards = hard_negative_rewards(accuracy, group, len(group))
    return rewards[int(_given(extra_info, "group_index", "vgr_hard_negative"))]


SCORES: Mapping[str, Callable[..., float | None]] = {
    "accuracy": accuracy_score,
    "format": format_score,
    "length": length_score,
    "mdi": mdi_score,
    "vgr": vgr_score,
    "vgr_hard_negative": hard_negative_score,
}


def _given(extra_info: Info, key: str, reward: str) -> Any:
    if extra_info is None or key not in extra_info:
        raise RewardError(f"The reward {reward} needs {key!r} in extra_info, which has {sorted(extra_info or ())}.")
    return extra_info[key]
