"""Extract the groups of a rollout batch, and insert groups into one."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from accelerate.utils import gather_object

from vgr_trl.rollout import Rollout
from vgr_trl.rows import OLD_LOGPS, Placement, Rows, join_rows, valid_tokens
from vgr_trl.sampling.zero_variance import group_std
from vgr_trl.signals.named import RolloutSignals, columns_to_signals, signals_to_columns


@dataclass(frozen=True, eq=False)  # tensors do not compare to a bool
class Group:
    """The G completions of one prompt, with all that training on them again takes.

    Every process knows of every group; one of them, the holder, has its rows.

    Attributes:
        advantages: (G,) float32, on the CPU.
        rewards: (G,) float32, weighted sums without what the KL adds; NaN for a completion without any. On the CPU.
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

    @cached_property
    def priority(self) -> float:
        """Priority in a replay buffer, which decides how long it stays and how often it is drawn."""
        return priority(self.advantages.unsqueeze(0), self.rewards.unsqueeze(0)).item()

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
) -> list[Group]:
    """Return the groups with the numbers `wanted`, copied to the CPU.

    The process with a group's first completion becomes its holder. If any wanted group is spread over processes, all
    of them gather once, to bring its other rows there.

    Args:
        batch: the local rows, as TRL's `_generate_and_score_completions` returns them.
        wanted: numbers of groups, the same on every process.
        advantages: of all processes, (num_groups * G,); those of `batch` are not read.
        rewards: weighted sums, likewise.

    Raises:
        DataError: the batch cannot be cut into rows.
    """
    rows = Rows.from_batch({**batch, **signals_to_columns(signals)})
    rows.columns.pop("advantages", None)
    lengths = [batch[name].sum(1).tolist() for name in ("prompt_mask", "completion_mask")]
    pieces = {}
    for group in wanted:
        if here := [row for row, _ in placement.here(group)]:
            widths = [max(1, *(lengths_of[row] for row in here)) for lengths_of in lengths]
            pieces[group] = rows.take(here).trim(*widths).stored()
    holders = {group: placement.holder(group) for group in wanted}
    whole = placement.bring_to_holders(pieces, holders, gather_object)

    def joined(group: int) -> Rows | None:
        if group not in whole:
            return None
        parts = whole[group]
        return parts[0] if len(parts) == 1 else join_rows(parts, pad_token_id=pad_token_id).stored()

    size = placement.num_generations
    advantages, rewards = (v.detach().to("cpu", torch.float32).view(-1, size) for v in (advantages, rewards))
    return [
        Group(advantages[group].clone(), rewards[group].clone(), step, holders[group], joined(group))
        for group in wanted
    ]


def _replace_columns(rows: Rows, columns: dict[str, Any]) -> Rows:
    return replace(rows, columns={**rows.columns, **columns})


def insert_groups(
    batch: Mapping[str, Any],
    replacements: Mapping[int, Group],
    placement: Placement,
    *,
    pad_token_id: int,
    pad_to_multiple_of: int | None = None,
    signals: RolloutSignals | None = None,
) -> tuple[dict[str, Any], RolloutSignals | None]:
    """Return the batch and its signals with other groups in the place of some; the arguments are not changed.

    The local batch is padded to the longest prompt and completion in it, and keeps its structure: what it does not
    have (reference log-probabilities, say) is not brought in, except for image inputs. `num_items_in_batch` is not
    corrected; see `correct_num_items`. If any group has to go to another process, all of them gather once.

    Args:
        batch: the local rows, as TRL's `_generate_and_score_completions` returns them, with advantages (N,).
        replacements: number of a group of the batch -> the group that takes its place; the same on every process. It
            may come from a buffer or from another batch.
        pad_to_multiple_of: P and T become multiples of it.

    Raises:
        DataError: a group lacks what the batch has.
    """
    rows = Rows.from_batch({**batch, **signals_to_columns(signals)})
    parts, source = [rows], list(range(len(rows)))
    for target, group in _bring_rows(replacements, placement).items():
        here = placement.here(target)
        first = sum(map(len, parts))
        parts.append(group.take([index for _, index in here]))
        for position, (row, _) in enumerate(here):
            source[row] = first + position
    if len(parts) == 1:
        return dict(batch), signals
    joined = join_rows(parts, pad_token_id=pad_token_id, pad_to_multiple_of=pad_to_multiple_of).take(source)
    return joined.into_batch(batch), columns_to_signals(joined.columns)


def _bring_rows(replacements: Mapping[int, Group], placement: Placement) -> dict[int, Rows]:
    """The rows of the groups of which this process needs some, with their advantages."""
    travelling = [target for target, group in replacements.items() if list(placement.holders(target)) != [group.holder]]
    arrived = {target: group.rows for target, group in replacements.items()}
    if travelling:
        sent = [(target, arrived[target]) for target in travelling if arrived[target] is not None]
        arrived |= dict(gather_object(sent))
    needed = {target: arrived[target] for target in replacements if placement.here(target)}
    return {
        target: _replace_columns(rows, {"advantages": replacements[target].advantages})
        for target, rows in needed.items()
        if rows is not None
    }


def correct_num_items(batch: Mapping[str, Any], gather: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
    """Return the batch with the `num_items_in_batch` that it now has, as TRL counts: valid tokens of all processes."""
    return {**batch, "num_items_in_batch": gather(valid_tokens(batch).sum()).sum()}


def priority(advantages: torch.Tensor, rewards: torch.Tensor) -> torch.Tensor:
    """Return the sum of |advantages| (num_groups, G) times the deviation of the rewards, (num_groups,) float64."""
    return advantages.double().abs().sum(dim=-1) * group_std(rewards.flatten(), rewards.size(-1))


def cut_groups(rollout: Rollout, wanted: list[int], *, pad_token_id: int, step: int) -> list[Group]:
    """Return groups of a rollout whose groups have been selected; see `groups_from_batch`."""
    selection = rollout.selection
    return groups_from_batch(
        rollout.batch,
        wanted,
        selection.placement,
        advantages=selection.advantages,
        rewards=selection.task_rewards,
        pad_token_id=pad_token_id,
        step=step,
        signals=rollout.signals,
    )


def fill_old_logps(group: Group) -> Group:
    """Return the group with the measured log-probabilities as old ones, where its batch came without."""
    if group.rows is None or OLD_LOGPS in group.rows.columns:
        return group
    return replace(group, rows=_replace_columns(group.rows, {OLD_LOGPS: group.rows.columns["signals.logps"]}))
