"""Which rows and positions of a batch pass through a decoder at a time, and which of its queries are to be measured."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache

from vgr_trl.errors import ConfigError
from vgr_trl.signals.attention.second_call import Queries


@dataclass
class Pass:
    """A pass through the decoder, of B rows that stand for rows [`start`, `stop`) of the batch.

    Attributes:
        start, stop: rows of the batch that what is measured belongs to.
        some: numbers of those rows, if not all that stand between are meant.
        groups: where prompts pass once for several rows, row - `start` -> its number among the B; else None.
        shape: B, and the positions Q that pass.
        seen: positions of these rows that are in a cache, in front of those that pass.
        emitting: queries whose attention mass is wanted, None if there are none in this pass.
        columns: which of the wanted positions they are.
        instruction: queries of instruction tokens of any row; None if they are not wanted, or not in this pass.
        done: layers that have been measured; recomputation comes to them again.
    """

    start: int
    stop: int
    groups: list[int] | None
    shape: tuple[int, int]
    seen: int
    emitting: Queries | None
    columns: slice
    instruction: Queries | None
    some: list[int] | None = None
    done: set[int] = field(default_factory=set)

    @property
    def rows(self) -> slice | list[int]:
        """Of the batch."""
        return slice(self.start, self.stop) if self.some is None else self.some

    @property
    def numbers(self) -> Sequence[int]:
        """Those of these rows."""
        return range(self.start, self.stop) if self.some is None else self.some

    def index_of(self, row: int) -> int | None:
        """Which of the B rows stands for a row of the batch, None if none does."""
        if row not in self.numbers:
            return None
        if self.some is not None:
            return self.some.index(row)
        return row - self.start if self.groups is None else self.groups[row - self.start]

    def own(self, sets: torch.Tensor) -> torch.Tensor:
        """What of `sets` (N, P or S, 2) belongs to the B rows."""
        if self.groups is None:
            return sets[self.rows]
        return sets[[self.start + self.groups.index(group) for group in range(max(self.groups) + 1)]]

    def expand_to_rows(self, measured: torch.Tensor) -> torch.Tensor:
        """What has been measured of the B rows, for the rows of the batch."""
        return measured if self.groups is None else measured[self.groups]

    def sets_of_keys(self, sets: torch.Tensor, queries: tuple[int, int], num_keys: int) -> torch.Tensor:
        """The columns of `sets` (N, P or S, 2) that belong to the keys of an attention call, (B, K, 2).

        Args:
            sets: of the batch.
            queries: rows and queries of the call.
            num_keys: K.

        Raises:
            ConfigError: a layer was given other rows or queries than passed into the decoder, or there are more keys
                than positions, so that nobody knows what they are.
        """
        if queries != self.shape:
            raise ConfigError(
                f"A layer attends with {queries[1]} queries in {queries[0]} rows where {self.shape[1]} positions in "
                f"{self.shape[0]} rows pass through the model: layers that regroup their input cannot be measured."
            )
        num_queries = self.shape[1]
        first = self.seen + num_queries - num_keys  # a cache with a window has dropped what comes before
        if first < 0:
            raise ConfigError(
                f"A layer attends to {num_keys} keys after {self.seen + num_queries} positions: cross attention and "
                "caches of fixed length cannot be measured."
            )
        found = self.own(sets)[:, first : first + num_keys]
        return torch.nn.functional.pad(found, (0, 0, 0, num_keys - found.size(1)))

    def instruction_rows(self, sets: torch.Tensor) -> torch.Tensor:
        """Which of the `instruction` queries are instruction tokens of their own row, (B, P') bool."""
        assert self.instruction is not None
        return self.own(sets)[:, self.instruction.index.to(sets.device) + self.seen, 1]


class PassPlan:
    """Follows a batch through the decoder, from hooks in front of the base model and of its first attention module.

    Args:
        sets: (N, P or S, 2) bool, vision and instruction tokens.
        rows: wanted positions, as `AttentionProbe` takes them.
        measure_prompt: whether the queries of instruction tokens are wanted.
    """

    def __init__(self, sets: torch.Tensor, rows: slice | Sequence[int] | None, measure_prompt: bool) -> None:
        self.sets, self.rows, self.measure_prompt = sets, rows, measure_prompt
        self.positions: list[int] = []  # wanted, increasing
        self.picks: slice | list[int] = slice(None)  # puts them in the order asked for
        self.instruction: list[int] = sets[..., 1].any(0).nonzero().flatten().tolist() if measure_prompt else []
        self.current: Pass | None = None
        self.next_row = 0
        self._length: int | None = None
        self._base_seen = False
        self._to_come = self._passed = 0  # rows that come in several passes; those of them that have come

    def begin_batch(self, base: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before rows pass through the whole model: find out which positions are wanted."""
        self._base_seen = True
        given: Any = kwargs.get("input_ids", args[0] if args else None)
        given = kwargs["inputs_embeds"] if given is None else given
        if _positions_seen(kwargs.get("past_key_values")):
            raise ConfigError("Attention is measured of whole sequences: pass them without a cache.")
        self._plan_positions(given.size(1))

    def _plan_positions(self, length: int) -> None:
        if (columns := self.sets.size(1)) > length:
            raise ConfigError(
                f"The probe has masks for {columns} positions, and {length} pass through the model at a time: pass "
                "whole sequences, without a cache."
            )
        if self._length not in (None, length):
            raise ConfigError(
                f"Sequences of {self._length} and of {length} positions pass through the model: pad them to one length."
            )
        self._length = length
        rows = self.rows
        if rows is None:
            rows = slice(columns - 1, length - 1) if columns < length else slice(0, length)
        try:
            wanted = list(range(length)[rows]) if isinstance(rows, slice) else [range(length)[row] for row in rows]
        except IndexError:
            wanted = []
        if not wanted:
            raise ConfigError(f"rows of the probe is {self.rows}: give positions in [0, {length}), at least one.")
        self.positions = sorted(set(wanted))
        if wanted != self.positions:
            self.picks = [bisect_left(self.positions, position) for position in wanted]

    def begin_pass(self, attention: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before rows pass through the decoder: once for a plain batch, twice where prompts are shared."""
        if _in_backward():
            return
        hidden = args[0] if args else kwargs["hidden_states"]
        if hidden.ndim != 3:
            raise ConfigError(
                f"{type(attention).__name__} takes {tuple(hidden.shape)}: only layers whose attention takes (rows, "
                "positions, width) can be measured."
            )
        count, length, _ = hidden.shape
        if not self._base_seen:  # a head that calls the decoder inside of its base model: the batch passes as it is
            self._plan_positions(length)
        cache = kwargs.get("past_key_values", kwargs.get("layer_past"))
        seen = _positions_seen(cache)
        groups: list[int] | None = getattr(cache, "groups", None)
        some: list[int] | None = getattr(cache, "rows", None)
        self._to_come = len(groups) if groups is not None else self._to_come if some is not None else count
        stop = self.next_row + self._to_come
        if stop > len(self.sets):
            raise ConfigError(
                f"The probe has masks for {len(self.sets)} rows, but {stop} pass through the model: give masks of the "
                "whole batch."
            )
        columns = slice(bisect_left(self.positions, seen), bisect_left(self.positions, seen + length))
        instruction = [position for position in self.instruction if seen <= position < seen + length]
        self.current = Pass(
            start=self.next_row,
            stop=stop,
            groups=groups,
            shape=(count, length),
            seen=seen,
            emitting=_queries(self.positions[columns], seen, hidden.device),
            columns=columns,
            instruction=_queries(instruction, seen, hidden.device),
            some=None if some is None else [self.next_row + row for row in some],
        )
        if groups is not None:  # the same rows are still to come, behind their prompts
            return
        self._passed += count
        if self._passed == self._to_come:
            self.next_row, self._passed = stop, 0


def _queries(positions: list[int], seen: int, device: torch.device) -> Queries | None:
    if not positions:
        return None
    index = torch.tensor(positions, device=device) - seen
    return Queries(index, positions[0] - seen, positions[-1] + 1 - seen)


def _positions_seen(cache: Cache | None) -> int:
    layers = [] if cache is None else cache.layers
    return max((int(layer.get_seq_length()) for layer in layers if hasattr(layer, "get_seq_length")), default=0)


def _in_backward() -> bool:
    """Whether a backward pass is running, which recomputes checkpointed layers."""
    return torch._C._current_graph_task_id() != -1
