"""States of a replay buffer over processes: each saves its own; another number of processes can continue."""

from collections.abc import Mapping, Sequence
from typing import Any

from vgr_trl.errors import DataError


def merge_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one state with the rows of all groups, from the states that the processes of a run saved together.

    Args:
        states: what `ReplayBuffer.state_dict` returned on each process, in any order.

    Raises:
        DataError: they are not of the same moment, or the state of a process is missing.
    """
    first = states[0]
    if any((state["added"], state["numbers"]) != (first["added"], first["numbers"]) for state in states):
        raise DataError(
            "The states of the replay buffer are not of the same step: give those that one checkpoint holds."
        )
    groups = []
    for index, number in enumerate(first["numbers"]):
        found = [state["groups"][index] for state in states if state["groups"][index]["rows"] is not None]
        if not found:
            raise DataError(
                f"Group {number} of the replay buffer is in none of its {len(states)} states: give those of all "
                "processes that saved the checkpoint."
            )
        groups.append(found[0])
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
