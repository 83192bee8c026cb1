"""Groups: the completions of one prompt, taken out of a rollout batch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from vgr_trl.batch.joining import join_rows
from vgr_trl.batch.placement import Gather, Placement
from vgr_trl.batch.rows import Rows
from vgr_trl.batch.signals import RolloutSignals
from vgr_trl.errors import DataError


@dataclass(frozen=True, eq=False)  # tensors do not compare to a bool
class Group:
    """The G completions of one prompt, with all that training on them again takes.

    Every process knows of every group; one of them, the holder, has its rows.

    Attributes:
        advantages: (G,) float32, on the CPU.
        rewards: (G,) float32, weighted sums; NaN for a completion without any. On the CPU.
        step: global step at which it was generated.
        holder: process that has the rows.
        rows: on the CPU, no longer than the group's own longest prompt and completion; None on other processes.
    """

    advantages: torch.Tensor
    rewards: torch.Tensor
    step: int = 0
    holder: int = 0
    rows: Rows | None = None

    @cached_property
    def nbytes(self) -> int:
        """Bytes of its rows on this process, image inputs that they share counted once."""
        return 0 if self.rows is None else self.rows.nbytes

    def state_dict(self) -> dict[str, Any]:
        """Return the group as tensors, numbers, lists and dictionaries."""
        state = {name: getattr(self, name) for name in ("advantages", "rewards", "step", "holder")}
        return {**state, "rows": None if self.rows is None else dict(vars(self.rows))}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "Group":
        """Return the group that `state_dict` described."""
        rows = state["rows"]
        return cls(**{**state, "rows": None if rows is None else Rows(**rows)})


def groups_from_batch(
    batch: Mapping[str, Any],
    wanted: Sequence[int],
    placement: Placement,
    *,
    advantages: torch.Tensor,
    rewards: torch.Tensor,
    pad_token_id: int,
    step: int = 0,
    signals: RolloutSignals | None = None,
    gather: Gather | None = None,
) -> list[Group]:
    """Return the groups with the numbers `wanted`, copied to the CPU.

    The process with a group's first completion becomes its holder. If any wanted group is spread over processes, all
    of them call `gather` once, to bring its other rows there.

    Args:
        batch: the local rows, as TRL's `_generate_and_score_completions` returns them.
        wanted: numbers of groups, the same on every process.
        advantages: of all processes, (num_groups * G,); those of `batch` are not read.
        rewards: weighted sums, likewise.
        gather: over the processes; None if there is one.

    Raises:
        DataError: the batch cannot be cut into rows, or `gather` is missing.
    """
    placement.check(wanted)
    rows = Rows.of_batch(batch, signals)
    rows.columns.pop("advantages", None)
    lengths = [batch[name].sum(1).tolist() for name in ("prompt_mask", "completion_mask")]
    pieces = {}
    for group in wanted:
        if here := [row for row, _ in placement.here(group)]:
            widths = [max(1, *(lengths_of[row] for row in here)) for lengths_of in lengths]
            pieces[group] = rows.take(here).narrowed(*widths).stored()
    holders = {group: placement.holder(group) for group in wanted}
    whole = placement.bring_to_holders(pieces, holders, gather)
    kept = {group: _joined(parts, pad_token_id) for group, parts in whole.items()}
    compared = [
        value.detach().to("cpu", torch.float32).view(-1, placement.num_generations) for value in (advantages, rewards)
    ]
    return [
        Group(
            advantages=compared[0][group].clone(),
            rewards=compared[1][group].clone(),
            step=step,
            holder=holders[group],
            rows=kept.get(group),
        )
        for group in wanted
    ]


def _joined(parts: list[Rows], pad_token_id: int) -> Rows:
    return parts[0] if len(parts) == 1 else join_rows(parts, pad_token_id=pad_token_id).stored()


def with_old_logps(
    groups: Mapping[int, Group], old_per_token_logps: torch.Tensor, placement: Placement, gather: Gather | None = None
) -> dict[int, Group]:
    """Return the groups with the log-probabilities of the policy that generated them.

    For batches that come without: TRL leaves them out while they equal those of the first training pass, which is
    where they are taken from. They go to the process that holds the group, which for a group of another round of
    generation need not be one of those that train on it; then, and if it is spread, all call `gather` once.

    Args:
        groups: number in the batch -> group; the same numbers on every process.
        old_per_token_logps: of the local rows of that batch, in its order, (N, T).
    """
    pieces = {}
    for group in groups:
        if here := [row for row, _ in placement.here(group)]:
            pieces[group] = old_per_token_logps[here].detach().cpu()  # (rows of the group here, T)
    completed = dict(groups)
    holders = {number: group.holder for number, group in groups.items()}
    for group, parts in placement.bring_to_holders(pieces, holders, gather).items():
        rows = groups[group].rows
        if rows is None:
            raise DataError(f"Group {group} has no rows on process {holders[group]}, which is to hold it.")
        length = rows.completion_length
        logps = [torch.nn.functional.pad(part, (0, max(0, length - part.size(1))))[:, :length] for part in parts]
        columns = {**rows.columns, "old_per_token_logps": torch.cat(logps)}
        completed[group] = replace(groups[group], rows=replace(rows, columns=columns))
    return completed
