"""Rewards as TRL calls them, and what comes back: one number per completion, finite, or none that applies."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers.utils import logging
from trl.trainer.grpo_trainer import RewardFunc

from vgr_trl.errors import RewardError
from vgr_trl.rewards.outcome import checked
from vgr_trl.rewards.schedule import RewardSchedule
from vgr_trl.rewards.whole_groups import WholeGroups
from vgr_trl.signals import Measurement
from vgr_trl.signals.reward_columns import SINGLE_COLUMNS
from vgr_trl.training.generation.blind import blind_answers
from vgr_trl.training.host import Host
from vgr_trl.training.kl import KLControl
from vgr_trl.training.measure import score_completions, signals_as_columns
from vgr_trl.training.rollout import Rollout

logger = logging.get_logger(__name__)


class Judge:
    """Gives the rewards of a run what they read, and checks what they return.

    Args:
        trainer: what rewards with an argument `trainer` get.
    """

    def __init__(
        self, host: Host, trainer: object, schedule: RewardSchedule, measurement: Measurement, kl: KLControl
    ) -> None:
        self.host, self.trainer, self.schedule = host, trainer, schedule
        self._measurement, self._kl = measurement, kl
        self._with_nan: set[str] = set()

    def prepare(
        self, rollout: Rollout | None, completion_ids: list[list[int]]
    ) -> tuple[dict[str, list[Any]], dict[str, float]]:
        """Set the weights of this step; return the columns that rewards get of the completions, and their metrics.

        Args:
            rollout: at hand, which is measured if TRL has not scored it; None: outside of one nothing is measured.
        """
        self._set_weights()
        if rollout is None:
            return {}, {}
        columns, metrics = blind_answers(rollout, self.host, completion_ids) if self._measurement.blind else ({}, {})
        self.host.show_columns(columns)
        measured, of_signals = self._measure(rollout, completion_ids)
        return columns | measured, metrics | of_signals

    def _measure(
        self, rollout: Rollout, completion_ids: list[list[int]]
    ) -> tuple[dict[str, list[Any]], dict[str, float]]:
        rollout.judging = True
        if not self._measurement.wanted.scoring:
            return {}, {}
        if rollout.signals is None:
            score_completions(rollout, self.host, self._measurement, completion_ids)
        columns, metrics = signals_as_columns(rollout, self.host, self._measurement)
        if "vgr" in columns:
            self.host.show_columns({name: columns[name] for name in SINGLE_COLUMNS})
        penalties, of_kl = self._kl.penalise(rollout)
        return columns | penalties, metrics | of_kl

    def _set_weights(self) -> None:
        if self.schedule.changes:
            state = self.host.state
            early = self.schedule.early_steps(self.host.args.get_warmup_steps(state.max_steps), state.max_steps)
            weights = self.schedule.weights_at(state.global_step, early)
            self.host.reward_weights[: len(weights)] = torch.tensor(weights)

    def guarded(self, reward_funcs: Sequence[RewardFunc], rollout: Rollout | None) -> list[RewardFunc]:
        """Return the reward functions such that they return one number or None per completion, or fail by name.

        Args:
            rollout: at hand; one greedy completion has no others to be compared with, and earns 0 there.
        """
        alone = rollout is not None and rollout.greedy
        return [
            self._guarded(_zero if alone and isinstance(reward, WholeGroups) else reward, name)
            for reward, name in zip(reward_funcs, self.host.reward_names, strict=True)
        ]

    def _guarded(self, reward: RewardFunc, name: str) -> RewardFunc:
        if isinstance(reward, torch.nn.Module):
            return reward
        return checked(reward, name, self._warn_of_nan, self.trainer, self.host.args.reward_timeout)

    def check(
        self,
        rewards: torch.Tensor,
        reward_funcs: Sequence[RewardFunc],
        rollout: Rollout | None,
        rows: Sequence[Mapping[str, Any]],
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """Return the rewards, and for which share of all completions each does not apply; the rollout keeps them.

        Args:
            rewards: of all processes, (N of all, F).

        Raises:
            RewardError: a reward is infinite.
        """
        rewards = self._kl.without_unscored(rewards)
        refuse_infinite(rewards, self.host.reward_names, rows, len(rows) * self.host.accelerator.process_index)
        metrics = {}
        for reward, name, undefined in zip(reward_funcs, self.host.reward_names, rewards.isnan().T, strict=True):
            metrics[f"rewards/{name}/not_applicable"] = undefined.float().mean().item()
            if isinstance(reward, torch.nn.Module) and undefined.any():
                self._warn_of_nan(name, int(undefined.sum()))
        if rollout is not None:
            rollout.rewards = rewards
        return rewards, metrics

    def _warn_of_nan(self, name: str, count: int) -> None:
        if name not in self._with_nan:
            self._with_nan.add(name)
            logger.warning(
                f"The reward {name} returned NaN for {count} completions: they count as not applicable, as None does "
                f"(metric rewards/{name}/not_applicable; this is said once). Return None where that is meant."
            )


def _zero(completions: list[Any], **kwargs: Any) -> list[float | None]:
    return [0.0] * len(completions)


def refuse_infinite(rewards: torch.Tensor, names: Sequence[str], rows: Sequence[Mapping[str, Any]], first: int) -> None:
    """Raise `RewardError` if a reward is infinite; NaN stands for one that does not apply.

    Args:
        rewards: of all processes, (N of all, number of functions); all processes raise together.
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
