"""Map the queries and keys of a measured pass to the rows of the batch."""

from bisect import bisect_left
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

from vgr_trl.errors import ConfigError
from vgr_trl.pixels import on_device
from vgr_trl.sharing.model_support import cache_of
from vgr_trl.sharing.row import ROW, PackedRow


@dataclass(frozen=True)
class Queries:
    """Queries of a pass: `index` (T',) int64, increasing, from `first` up to but without `stop`."""

    index: Tensor
    first: int
    stop: int


@dataclass
class Pass:
    """A pass of B rows of the batch through the decoder.

    Attributes:
        rows: rows of the batch that pass.
        shape: B and Q, the number of positions.
        emitting: queries whose attention mass is wanted.
        instruction: queries of instruction tokens of any row; None if they are not wanted.
        row: layout, where prompts and completions pass as one row; None: padded rows pass.
        done: numbers of the measured layers; a checkpoint's recomputation calls them again.
    """

    rows: slice
    shape: tuple[int, int]
    emitting: Queries
    instruction: Queries | None
    row: PackedRow | None
    done: set[int] = field(default_factory=set)
    _padded_sets: dict[tuple[int, torch.device], Tensor] = field(default_factory=dict)  # by number of keys, K

    def sets_of_keys(self, sets: Tensor, queries: tuple[int, ...], num_keys: int, device: torch.device) -> Tensor:
        """Return the sets for the keys that an attention call over padded rows gets, (B, K, C) bool.

        Args:
            sets: (N, P or S, C) bool, sets of the whole batch.
            queries: B and Q of the call.
            num_keys: K.
            device: device of the call.

        Raises:
            ConfigError: a layer gets other rows or queries than the decoder, or more keys than there are positions.
        """
        if queries != self.shape or num_keys > self.shape[1]:
            call = f"A layer attends with rows and queries {queries} to {num_keys} keys, where {self.shape} pass"
            raise ConfigError(f"{call}: cross attention and fixed caches cannot be measured.")
        if (num_keys, device) not in self._padded_sets:  # all layers share it
            of_keys = sets[self.rows, :num_keys]
            of_keys = torch.nn.functional.pad(of_keys, (0, 0, 0, num_keys - of_keys.size(1)))
            self._padded_sets[num_keys, device] = of_keys.to(device)
        return self._padded_sets[num_keys, device]

    @cached_property
    def places(self) -> Tensor:
        """(B, T') where the wanted positions stand in the row; -1: the position did not pass."""
        assert self.row is not None
        return self.row.table[:, self.emitting.index.to(self.row.device)]

    def of_tokens(self, sets: Tensor) -> Tensor:
        """Pick the sets (N, P or S, C) at the tokens in the row, (L, C)."""
        assert self.row is not None
        tokens = self.row.tokens.to(sets.device)
        wide = torch.nn.functional.pad(sets[self.rows], (0, 0, 0, self.row.shape[1] - sets.size(1)))
        return wide.flatten(0, 1)[tokens]


class PassPlan:
    """Follows a batch through the decoder, by hooks on the base model and on its first attention module.

    Args:
        sets: (N, P or S, 2) bool, vision and instruction tokens.
        rows: wanted positions, see `AttentionProbe`.
        measure_prompt: whether the queries of instruction tokens are wanted.
        prompt: P, if `sets` are of whole rows whose completions are measured; None: `sets` are of prompts, or `rows`
            says which positions are measured.

    Attributes:
        positions: wanted positions, increasing.
        picks: index of each entry of `rows` in `positions`.
        current: the running pass; None: no pass has begun.
    """

    def __init__(
        self, sets: Tensor, rows: slice | Sequence[int] | None, measure_prompt: bool, prompt: int | None
    ) -> None:
        self.sets, self.rows, self.measure_prompt, self.prompt = sets, rows, measure_prompt, prompt
        self.positions: list[int] = []
        self.picks: list[int] = []
        self.current: Pass | None = None
        self._instruction = sets[:, :prompt, 1].any(0).nonzero().flatten().tolist() if measure_prompt else []
        self._length: int | None = None
        self._base_seen = False
        self._next_row = 0

    def hook(self, stack: ExitStack, base: nn.Module, attention: nn.Module) -> None:
        """Follow the batch until `stack` is closed."""
        for module, hook in ((base, self._begin_batch), (attention, self._begin_pass)):
            stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)

    def check_complete(self) -> None:
        """Raise `ConfigError` unless the whole batch has passed."""
        self._check_rows(self._next_row == len(self.sets), self._next_row)

    def _check_rows(self, condition: bool, count: int) -> None:
        if not condition:
            raise ConfigError(f"The probe has masks for {len(self.sets)} rows, but {count} pass: pass all of them.")

    def _begin_batch(self, base: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Find the wanted positions before rows pass through the whole model."""
        self._base_seen = True
        inputs: Any = kwargs.get("input_ids", args[0] if args else None)
        inputs = kwargs["inputs_embeds"] if inputs is None else inputs
        if positions_seen(cache_of(kwargs)):
            raise ConfigError("Attention is measured over whole sequences: pass them without a cache.")
        row: PackedRow | None = kwargs.get(ROW)
        self._plan_positions(inputs.size(1) if row is None else row.shape[1])

    def _plan_positions(self, length: int) -> None:
        if (columns := self.sets.size(1)) > length or self._length not in (None, length):
            lengths = f"masks for {columns} positions, and sequences of {self._length or length} and {length} pass"
            raise ConfigError(f"The probe has {lengths}: pass whole sequences of one length, without a cache.")
        self._length = length
        rows = self.rows
        if rows is None:
            columns = self.prompt or columns
            rows = slice(columns - 1, length - 1) if columns < length else slice(length)
        wanted = list(range(length)[rows]) if isinstance(rows, slice) else [range(length)[row] for row in rows]
        self.positions = sorted(set(wanted))
        self.picks = [bisect_left(self.positions, position) for position in wanted]

    def _begin_pass(self, attention: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Assign rows before they pass through the decoder."""
        if torch._C._current_graph_task_id() != -1:  # a backward pass recomputes checkpointed layers
            return
        hidden, row = args[0] if args else kwargs["hidden_states"], kwargs.get(ROW)
        count, length = hidden.shape[:2] if row is None else row.shape
        if not self._base_seen:  # the head calls the decoder of its base model directly
            self._plan_positions(length)
        start, self._next_row = self._next_row, self._next_row + count
        self._check_rows(self._next_row <= len(self.sets), self._next_row)
        self.current = Pass(
            rows=slice(start, self._next_row),
            shape=(count, length),
            emitting=_queries(self.positions, hidden.device),
            instruction=_queries(self._instruction, hidden.device) if self._instruction else None,
            row=row,
        )


def _queries(positions: list[int], device: torch.device) -> Queries:
    return Queries(on_device(positions, device), positions[0], positions[-1] + 1)


def positions_seen(cache: Cache | None) -> int:
    """Return the number of positions in a cache."""
    layers: Any = [] if cache is None else cache.layers
    return max((int(layer.get_seq_length()) for layer in layers if isinstance(layer, CacheLayerMixin)), default=0)
