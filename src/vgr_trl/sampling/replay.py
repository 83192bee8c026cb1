"""Replay buffer: groups of earlier rollouts take the place of zero-variance groups."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from vgr_trl.checkpoints import load_shares, save_share
from vgr_trl.credit import active_rules
from vgr_trl.registries import short_name
from vgr_trl.rollout import ConstructedTrainer, Rollout
from vgr_trl.sampling.groups import Group, cut_groups, fill_old_logps, priority
from vgr_trl.sampling.zero_variance import group_spread

logger = logging.get_logger(__name__)


# A buffer of groups that had a gradient, to take the place of groups that have none


class ReplayBuffer:
    """Keeps the groups of highest priority and draws from them.

    The priority of a group is the sum of |advantage| times the standard deviation of its rewards. A group without a
    gradient or whose mean reward is too low does not enter. When the buffer is full the group of lowest priority
    leaves, of equal ones the oldest, so that a new group takes the place of an old one of the same priority.

    With several processes each has a buffer that knows all groups, adds and draws the same ones (as long as it is
    called with the same arguments everywhere) and has the rows of those groups that the process is the holder of.

    Args:
        size: groups to keep at most, at least 1.
        min_reward: mean reward that a group needs to enter. None: any.
        variance_epsilon: when a group has no gradient, see `zero_variance_groups`; at least 0.
        max_age: steps after which a group leaves, at least 1. None: never.
        seed: of what is drawn.
        estimator: of the groups' advantages.
    """

    def __init__(
        self,
        size: int,
        *,
        min_reward: float | None = None,
        variance_epsilon: float = 1e-6,
        max_age: int | None = None,
        seed: int = 0,
        estimator: str = "grpo",
    ) -> None:
        self.size, self.min_reward, self.variance_epsilon = size, min_reward, variance_epsilon
        self.max_age, self.estimator = max_age, estimator
        self.step = 0
        self._groups: list[Group] = []  # in the order of being added
        self._generator = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def megabytes(self) -> float:
        """Millions of bytes that the rows on this process take, each prompt's images counted once."""
        return sum(group.nbytes for group in self._groups) / 1e6

    @property
    def mean_age(self) -> float:
        """Steps since the groups were generated, on average; 0 for an empty buffer."""
        ages = [self.step - group.step for group in self._groups]
        return sum(ages) / len(ages) if ages else 0.0

    def advance(self, step: int) -> None:
        """Set the step; evict groups older than `max_age`."""
        self.step = step
        if self.max_age is not None:
            self._groups = [group for group in self._groups if step - group.step <= self.max_age]

    def admits(self, advantages: torch.Tensor, rewards: torch.Tensor) -> list[bool]:
        """Whether each of the groups would enter by itself; cheaper than making them.

        Args:
            advantages: (num_groups, G).
            rewards: weighted sums, (num_groups, G).
        """
        values = priority(advantages, rewards)
        found = group_spread(advantages.flatten(), rewards.flatten(), rewards.size(-1), estimator=self.estimator)
        enters = (found > self.variance_epsilon) & values.isfinite()
        if self.min_reward is not None:
            enters &= rewards.double().nanmean(dim=-1) >= self.min_reward
        if len(self) >= self.size:
            enters &= values >= min(group.priority for group in self._groups)
        return enters.tolist()

    def add(self, group: Group) -> bool:
        """Add a group, unless it is not admitted; return whether it was."""
        if not self.admits(group.advantages.unsqueeze(0), group.rewards.unsqueeze(0))[0]:
            return False
        self._groups.append(group)
        self.step = max(self.step, group.step)
        if len(self) > self.size:
            self._groups.remove(min(self._groups, key=lambda each: each.priority))  # of equal ones the first
        return True

    def sample(self, count: int) -> list[Group]:
        """Draw `count` different groups, each with probability proportional to its priority among those left.

        Groups of priority 0 are drawn, with equal probabilities, when no others are left. All stay in the buffer.

        Args:
            count: at least 0; where it is more than there are, all are returned.
        """
        if not count or not self._groups:
            return []
        weights = torch.tensor([group.priority for group in self._groups], dtype=torch.float64)
        least = torch.finfo(weights.dtype).tiny  # of a group of priority 0, which comes behind all others
        order = torch.multinomial(weights.clamp(min=least), min(count, len(self)), generator=self._generator)
        return [self._groups[index] for index in order.tolist()]

    def state_dict(self) -> dict[str, Any]:
        """Return what this process has, as tensors, numbers, lists and dictionaries (for `torch.save`)."""
        return {
            "step": self.step,
            "estimator": self.estimator,
            "generator": self._generator.get_state(),
            "groups": [group.state_dict() for group in self._groups],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken; the options of this buffer hold for the groups too.

        For another number of processes see `merge_states` and `split_state`.
        """
        self._generator.set_state(state["generator"])
        self._groups = []
        for saved in state["groups"]:
            self.add(Group.from_state(saved))
        self.advance(state["step"])


def merge_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one state with the rows of all groups, from the states that the processes of a run saved together.

    Args:
        states: what `ReplayBuffer.state_dict` returned on each process of one checkpoint, in any order.
    """
    first = states[0]
    groups = [
        next(state["groups"][index] for state in states if state["groups"][index]["rows"] is not None)
        for index in range(len(first["groups"]))
    ]
    return {**first, "groups": groups}


def split_state(state: Mapping[str, Any], process_index: int, num_processes: int) -> dict[str, Any]:
    """Return the share of one process: all groups, every `num_processes`-th of them with its rows.

    Args:
        state: with the rows of all groups, as `merge_states` returns it.
    """
    groups = []
    for index, group in enumerate(state["groups"]):
        holder = index % num_processes
        groups.append({**group, "holder": holder, "rows": group["rows"] if holder == process_index else None})
    return {**state, "groups": groups}


# The replay buffer of a trainer: what is drawn, what enters and when, what is logged and saved of it


class Replay:
    """Groups of earlier rollout batches, which take the place of zero-variance ones."""

    def __init__(self, trainer: ConstructedTrainer) -> None:
        args, self._trainer = trainer.args, trainer
        self.buffer = ReplayBuffer(
            args.replay_buffer_size,
            min_reward=args.filter_min_reward,
            variance_epsilon=args.replay_var_epsilon,
            max_age=args.replay_max_age,
            seed=args.seed,
            estimator=args.advantage_estimator,
        )

    def draw(self, count: int) -> list[Group]:
        """Return up to `count` groups for the current batch; those that have become too old leave before."""
        self.buffer.advance(self._trainer.state.global_step)
        return self.buffer.sample(count)

    def keep(self, trainer: ConstructedTrainer, rollout: Rollout, fresh: dict[int, Group]) -> None:
        """Put groups with a gradient into the buffer.

        Args:
            fresh: groups of further prompts, by their place in the batch.
        """
        selection = rollout.selection
        size = selection.placement.num_generations
        values = (each.cpu().view(-1, size) for each in (selection.advantages, selection.task_rewards))
        admitted = self.buffer.admits(*values)
        wanted = [group for group in selection.kept if admitted[group]]
        groups = cut_groups(
            rollout, wanted, pad_token_id=trainer._tokenizer.pad_token_id, step=trainer.state.global_step
        )
        for group in [*map(fill_old_logps, groups), *fresh.values()]:
            self.buffer.add(group)

    def metrics(self, replaced_fraction: float) -> dict[str, float]:
        """Return what is logged of the buffer, the same on every process, which all call it.

        Args:
            replaced_fraction: groups of the batch that came from the buffer, of all.
        """
        accelerator = self._trainer.accelerator
        megabytes = accelerator.gather(torch.tensor([self.buffer.megabytes], device=accelerator.device))
        return {
            "replay/size": len(self.buffer),
            "replay/megabytes": megabytes.sum().item(),
            "replay/replaced_fraction": replaced_fraction,
            "replay/mean_age": self.buffer.mean_age,
        }

    def save(self, folder: Path) -> None:
        """Write the share of this process into a checkpoint, complete or not at all."""
        accelerator = self._trainer.accelerator
        state = {**self.buffer.state_dict(), "contents": self._contents()}
        save_share(state, folder, accelerator.process_index, accelerator.num_processes, "replay")

    def load(self, folder: Path) -> None:
        """Continue with the buffer of a checkpoint, which another number of processes may have written.

        It starts empty, with a warning, if its groups cannot be trained on with the options of this run.
        """
        accelerator, states = self._trainer.accelerator, load_shares(folder, "replay")
        reason: str | None = "the checkpoint was written without replay_buffer_size"
        if states:
            merged = merge_states(states)
            reason = self._why_unusable(merged)
            if reason is None:
                self.buffer.load_state_dict(split_state(merged, accelerator.process_index, accelerator.num_processes))
        if reason is not None and accelerator.is_main_process:
            logger.warning(f"The replay buffer of {folder} starts empty: {reason}.")

    def _contents(self) -> list[str]:
        """The options that decide what is stored of each group, as far as they are on, and what is measured of it."""
        args, measurement = self._trainer.args, self._trainer.measurement
        options = {
            "beta": args.beta != 0,
            "kl_coef": args.kl_coef > 0,
            "kl_penalty full": args.has_kl_loss and args.kl_penalty == "full",
            "use_vllm": args.use_vllm and args.vllm_importance_sampling_correction,
            "perception_loss_weight or der_loss_weight2": args.uses_perception_loss,
        }
        rules = [short_name(rule) for rule in active_rules(args)]
        return [*(name for name, is_on in options.items() if is_on), *measurement.needed, *measurement.views, *rules]

    def _why_unusable(self, state: Mapping[str, Any]) -> str | None:
        """Why the groups of a saved buffer cannot be trained on with the options of this run, None if they can."""
        args = self._trainer.args
        if state["estimator"] != args.advantage_estimator:
            return f"advantage_estimator is {args.advantage_estimator}, and was {state['estimator']}"
        sizes = {len(group["advantages"]) for group in state["groups"]}
        if sizes - {args.num_generations}:
            return f"num_generations is {args.num_generations}, and its groups have {max(sizes)} completions"
        if missing := [name for name in self._contents() if name not in state["contents"]]:
            return f"it was stored without {' and '.join(missing)}"
        return None
