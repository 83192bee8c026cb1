"""The replay buffer of a trainer: what is drawn, what enters and when, what is logged and saved of it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object

from vgr_trl.errors import ConfigError
from vgr_trl.sampling import Group, Placement, ReplayBuffer, merge_states, split_state, with_old_logps

OLD_LOGPS = "old_per_token_logps"


class Replay:
    """Groups of earlier rollout batches, which take the place of dead ones.

    Where neither TRL nor a measurement has scored a rollout batch, its groups wait for the first training pass over
    them, which knows the log-probabilities of the policy that generated them.

    Args:
        trainer: a constructed `DAPOTrainer` with a `replay_buffer_size` above 0.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer, args = trainer, trainer.args
        self.buffer = ReplayBuffer(
            args.replay_buffer_size,
            min_reward=args.filter_min_reward,
            variance_epsilon=args.replay_var_epsilon,
            max_age=args.replay_max_age,
            seed=args.seed,
            estimator=args.advantage_estimator,
        )
        self._waiting: dict[int, Group] = {}
        self._waiting_placement: Placement | None = None
        self._first_logps: torch.Tensor | None = None
        self._rows_seen = 0

    def draw(self, count: int) -> list[Group]:
        """Return up to `count` groups for the batch at hand; those that have become too old leave before."""
        self.buffer.advance(self.trainer.state.global_step)
        return self.buffer.sample(count)

    def admits(self, advantages: torch.Tensor, rewards: torch.Tensor) -> list[bool]:
        """Whether each group of a batch would enter by itself.

        Args:
            advantages: (N of all,).
            rewards: (N of all,), weighted sums.
        """
        size = self.trainer.num_generations
        return self.buffer.admits(*(value.cpu().view(-1, size) for value in (advantages, rewards)))

    def keep(self, groups: Mapping[int, Group], placement: Placement, scored: bool) -> None:
        """Put groups into the buffer, or let them wait for the first training pass over them.

        Args:
            groups: number in the batch that is trained on -> group.
            placement: of that batch.
            scored: whether their log-probabilities came with them, from TRL or from the measurement.
        """
        if scored:
            for group in groups.values():
                self.buffer.add(_with_measured_logps(group))
        else:
            self._waiting, self._waiting_placement = dict(groups), placement
            self._first_logps, self._rows_seen = None, 0

    @property
    def waits(self) -> bool:
        """Whether groups wait."""
        return bool(self._waiting)

    def numbered(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return the batch such that `first_pass` knows its rows again, if groups of it wait."""
        if not self._waiting:
            return batch
        return {**batch, "rollout_row": torch.arange(len(batch["prompt_ids"]))}

    def first_pass(self, inputs: dict[str, Any], logps: torch.Tensor) -> None:
        """Take the log-probabilities (N, T) of the first training pass for those of the policy that generated.

        They complete replayed batches, whose fresh rows have NaN, and the groups that wait to enter the buffer.
        """
        old = inputs.get(OLD_LOGPS)
        if old is not None:
            inputs[OLD_LOGPS] = torch.where(old.isnan(), logps.detach(), old)
        if not self._waiting or self._waiting_placement is None:
            return
        if self._first_logps is None:
            self._first_logps = logps.new_zeros(self._waiting_placement.rows, logps.size(1))
        self._first_logps[inputs["rollout_row"]] = logps.detach()
        self._rows_seen += len(logps)
        if self._rows_seen == self._waiting_placement.rows:
            known = with_old_logps(self._waiting, self._first_logps, self._waiting_placement, gather_object)
            for group in known.values():
                self.buffer.add(group)
            self._waiting, self._first_logps = {}, None

    def metrics(self, replaced_fraction: float) -> dict[str, float]:
        """Return what is logged of the buffer, the same on every process, which all call it.

        Args:
            replaced_fraction: groups of the batch that came from the buffer, of all.
        """
        accelerator = self.trainer.accelerator
        megabytes = accelerator.gather(torch.tensor([self.buffer.megabytes], device=accelerator.device))
        return {
            "replay/size": len(self.buffer),
            "replay/megabytes": megabytes.sum().item(),
            "replay/replaced_fraction": replaced_fraction,
            "replay/mean_age": self.buffer.mean_age,
        }

    def load(self, states: Sequence[Mapping[str, Any]], folder: Path) -> None:
        """Continue with the buffer that the processes of a run have saved, as many as they were.

        Args:
            states: of their buffers.
            folder: the checkpoint, for the error.

        Raises:
            ConfigError: its groups have another number of completions.
        """
        accelerator, wanted = self.trainer.accelerator, self.trainer.num_generations
        merged = merge_states(states)
        for group in merged["groups"]:
            if (size := len(group["advantages"])) != wanted:
                raise ConfigError(
                    f"num_generations is {wanted}, but the replay buffer in {folder} holds groups of {size} "
                    f"completions: continue with num_generations {size}, or without replay_buffer_size until the next "
                    "checkpoint, which leaves the buffer behind."
                )
        self.buffer.load_state_dict(split_state(merged, accelerator.process_index, accelerator.num_processes))


def _with_measured_logps(group: Group) -> Group:
    if group.rows is None or OLD_LOGPS in group.rows.columns:
        return group
    columns = {**group.rows.columns, OLD_LOGPS: group.rows.columns["signals.logps"]}
    return replace(group, rows=replace(group.rows, columns=columns))
