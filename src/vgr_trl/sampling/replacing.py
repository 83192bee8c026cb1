"""Groups put into a rollout batch, in the place of some of its own."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from vgr_trl.batch.inputs import valid_tokens
from vgr_trl.batch.joining import join_rows
from vgr_trl.batch.placement import Gather, Placement, checked
from vgr_trl.batch.rows import Rows
from vgr_trl.batch.signals import RolloutSignals
from vgr_trl.errors import DataError
from vgr_trl.sampling.groups import Group


def write_groups_into_batch(
    batch: Mapping[str, Any],
    replacements: Mapping[int, Group],
    placement: Placement,
    *,
    pad_token_id: int,
    pad_to_multiple_of: int | None = None,
    signals: RolloutSignals | None = None,
    gather: Gather | None = None,
) -> tuple[dict[str, Any], RolloutSignals | None]:
    """Return the batch and its signals with other groups in the place of some; the arguments are not changed.

    The local batch is padded to the longest prompt and completion in it, and keeps its structure: what it does not
    have (reference log-probabilities, say) is not brought in. Two exceptions, because such batches may be mixed: image
    inputs, and `old_per_token_logps`, which are NaN for rows that come without and then are to be taken from the first
    training pass. `num_items_in_batch` is not corrected; see `correct_num_items`. If any group has to go to another
    process, all of them call `gather` once.

    Args:
        batch: the local rows, as TRL's `_generate_and_score_completions` returns them, with advantages (N,).
        replacements: number of a group of the batch -> the group that takes its place; the same on every process. It
            may come from a buffer or from another batch.
        pad_to_multiple_of: P and T become multiples of it.

    Raises:
        DataError: a group has another number of completions or lacks what the batch has, or `gather` is missing.
    """
    rows = Rows.of_batch(batch, signals)
    if batch["advantages"].ndim != 1:
        raise DataError(
            f"The batch has advantages of shape {tuple(batch['advantages'].shape)}: replace groups while there is one "
            "advantage per completion, before credit is spread over tokens."
        )
    parts, source = [rows], list(range(len(rows)))
    for target, group in _brought(replacements, placement, gather).items():
        here = placement.here(target)
        first = sum(map(len, parts))
        parts.append(group.take([index for _, index in here]))
        for position, (row, _) in enumerate(here):
            source[row] = first + position
    if len(parts) == 1:
        return dict(batch), signals
    joined = join_rows(parts, pad_token_id=pad_token_id, pad_to_multiple_of=pad_to_multiple_of).take(source)
    return joined.into_batch(batch), joined.signals()


def _brought(replacements: Mapping[int, Group], placement: Placement, gather: Gather | None) -> dict[int, Rows]:
    """The rows of the groups of which this process needs some, with their advantages."""
    placement.check(replacements)
    for group in replacements.values():
        if len(group.advantages) != placement.num_generations:
            raise DataError(
                f"A group has {len(group.advantages)} completions, but num_generations is "
                f"{placement.num_generations}: continue with the same, or start with an empty replay buffer."
            )
    travelling = {
        target: group
        for target, group in replacements.items()
        if any(process != group.holder for process in placement.holders(target))
    }
    arrived: dict[int, Rows | None] = {target: group.rows for target, group in replacements.items()}
    if travelling:
        sent = [(target, group.rows) for target, group in travelling.items() if group.holder == placement.process_index]
        arrived |= dict(checked(gather)(sent))
    brought = {}
    for target, group in replacements.items():
        if placement.here(target):
            rows = arrived[target]
            if rows is None:
                raise DataError("A group to be put into the batch has no rows on the process that holds it.")
            brought[target] = replace(rows, columns={**rows.columns, "advantages": group.advantages})
    return brought


def correct_num_items(batch: Mapping[str, Any], gather: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
    """Return the batch with `num_items_in_batch` counted anew, as TRL counts it: valid tokens of all processes.

    Args:
        gather: returns a number of each process as one tensor, as accelerate's function of this name does; called once.
    """
    return {**batch, "num_items_in_batch": gather(valid_tokens(batch).sum()).sum()}
