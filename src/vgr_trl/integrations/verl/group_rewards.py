"""Rewards made of signals, which are known only after the pass in the actor: added in front of the advantages."""

from collections.abc import Sequence
from typing import Any

import torch

from vgr_trl.errors import ConfigError
from vgr_trl.integrations.verl.at_hand import SignalsAtHand
from vgr_trl.rewards.attention import hard_negative_rewards, mdi_reward, vgr_reward
from vgr_trl.signals.ratios import vision_gain_ratio


def add_signal_rewards(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: Sequence[Any], found: SignalsAtHand
) -> torch.Tensor:
    """Return the rewards (N, T) with those made of attention added to the last token of each completion.

    A reward that is not defined for a completion adds nothing to it, and is counted.

    Args:
        token_level_rewards: (N, T), whose sums are the rewards of the completions.
        response_mask: (N, T).
        index: (N,), the same for completions of one prompt, in any order.
        found: signals of the batch; its metrics are filled.

    Raises:
        ConfigError: attention was not measured.
    """
    options = found.options
    if not options.rewards_attention:
        return token_level_rewards
    mass = found.attention(response_mask.bool(), "late")
    if mass is None:
        raise ConfigError("A reward made of attention has a weight, but the batch has no measured attention.")
    vgr = vision_gain_ratio(mass).tolist()
    right = (token_level_rewards.sum(1) >= options.right_from).tolist()
    added = torch.zeros(len(vgr))
    weights = {
        "vgr": options.vgr_reward_weight,
        "vgr_hard_negative": options.hard_negative_reward_weight,
        "mdi": options.mdi_reward_weight,
    }
    for group in _groups(index, response_mask.any(1)):
        own, accuracy = [vgr[row] for row in group], [float(right[row]) for row in group]
        for name, weight in weights.items():
            if weight:
                values = _rewards(name, own, accuracy, options.mdi_balance_ratio)
                _add(added, group, values, weight, name, found.metrics)
    last = response_mask.long().cumsum(1).argmax(1)  # (N,)
    rewards = token_level_rewards.float().clone()
    rewards[torch.arange(len(rewards)), last] += added.to(rewards.device)
    for name in weights:
        count = found.metrics.pop(f"rewards/{name}/count", 0)
        if count:
            found.metrics[f"rewards/{name}/mean"] = found.metrics.pop(f"rewards/{name}/sum") / count
            found.metrics[f"rewards/{name}/not_applicable"] = int(response_mask.any(1).sum()) - count
    return rewards


def _rewards(name: str, vgr: list[float], accuracy: list[float], ratio: float) -> list[float | None]:
    """One reward of the completions of a prompt."""
    if name == "vgr_hard_negative":
        return hard_negative_rewards(accuracy, vgr, len(vgr))
    texts = [""] * len(vgr)
    return mdi_reward(texts, vgr, ratio) if name == "mdi" else vgr_reward(texts, vgr, len(vgr))


def _add(
    added: torch.Tensor,
    group: list[int],
    values: Sequence[float | None],
    weight: float,
    name: str,
    metrics: dict[str, float],
) -> None:
    for row, value in zip(group, values, strict=True):
        if value is not None:
            added[row] += weight * value
            for kind, amount in (("sum", value), ("count", 1)):
                key = f"rewards/{name}/{kind}"
                metrics[key] = metrics.get(key, 0) + amount


def _groups(index: Sequence[Any], answered: torch.Tensor) -> list[list[int]]:
    """Rows of each prompt, without those that verl appends to fill a batch, which have no tokens."""
    groups: dict[Any, list[int]] = {}
    for row in answered.nonzero().flatten().tolist():
        groups.setdefault(index[row], []).append(row)
    return list(groups.values())
