"""Map the queries and keys of a measured pass to the rows of the batch."""

from bisect import bisect_left
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

from vgr_trl.errors import ConfigError
from vgr_trl.pixels import on_device
from vgr_trl.sharing.model_support import cache_of
from vgr_trl.sharing.prefix_cache import ReadPrefix, WrittenPrefix


@dataclass(frozen=True)
class Queries:
    """Queries of a pass: `index` (T',) int64, increasing, from `first` up to but without `stop`."""

    index: Tensor
    first: int
    stop: int


@dataclass
class Pass:
    """A pass of B rows through the decoder, which stand for rows of the batch.

    Attributes:
        numbers: batch rows measured by this pass.
        groups: for each of `numbers` its number among the B; rows whose prompt passes once have the same.
        shape: B, and the number Q of positions that pass.
        seen: number of positions in the cache, in front of the positions that pass.
        emitting: queries whose attention mass is wanted; None if this pass has none.
        columns: places of the emitting queries among the wanted positions.
        instruction: queries of instruction tokens of any row; None if they are not wanted, or not in this pass.
        device: of the pass.
        done: numbers of the measured layers; a checkpoint's recomputation calls them again.
        indices: `numbers` and `groups` on the device.
        owners: (B,) on the device, for each row that passes a batch row with its tokens.
    """

    numbers: list[int]
    groups: list[int]
    shape: tuple[int, int]
    seen: int
    emitting: Queries | None
    columns: slice
    instruction: Queries | None
    device: torch.device
    done: set[int] = field(default_factory=set)
    _found: dict[tuple[int, torch.device], Tensor] = field(default_factory=dict)  # sets of so many keys

    def __post_init__(self) -> None:
        self.indices = on_device(self.numbers, self.device), on_device(self.groups, self.device)
        owners = [self.numbers[self.groups.index(group)] for group in range(self.shape[0])]
        self.owners = on_device(owners, self.device)

    def sets_of_keys(self, sets: Tensor, queries: tuple[int, ...], num_keys: int, device: torch.device) -> Tensor:
        """Return the sets of the keys of an attention call, (B, K, 2) bool.

        Args:
            sets: (N, P or S, 2) bool, of the batch.
            queries: number of rows and queries of the call.
            num_keys: K.
            device: of the call.

        Raises:
            ConfigError: a layer gets other rows or queries than the decoder, or more keys than there are positions.
        """
        first = self.seen + self.shape[1] - num_keys  # a sliding-window cache has dropped earlier keys
        if queries != self.shape or first < 0:
            call = f"A layer attends with rows and queries {queries} to {num_keys} keys, where {self.shape} pass behind"
            raise ConfigError(f"{call} {self.seen} positions: cross attention and fixed caches cannot be measured.")
        if (num_keys, device) not in self._found:  # once for all layers
            found = sets[self.owners.to(sets.device)][:, first : first + num_keys]
            found = torch.nn.functional.pad(found, (0, 0, 0, num_keys - found.size(1)))
            self._found[num_keys, device] = found.to(device)
        return self._found[num_keys, device]


class PassPlan:
    """Follows a batch through the decoder, by hooks on the base model and on its first attention module.

    Args:
        sets: (N, P or S, 2) bool, vision and instruction tokens.
        rows: wanted positions, as `AttentionProbe` takes them.
        measure_prompt: whether the queries of instruction tokens are wanted.
        prompt: P, if `sets` are of whole rows whose completions are measured; None: `sets` are of prompts, or `rows`
            says which positions are measured.

    Attributes:
        positions: wanted positions, increasing.
        picks: for each entry of `rows`, its place among the positions.
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
        self._next_row = self._to_come = self._passed = 0  # rows of a split batch, and rows of it so far

    def hook(self, stack: ExitStack, base: nn.Module, attention: nn.Module) -> None:
        """Follow the batch until `stack` is closed."""
        for module, hook in ((base, self._begin_batch), (attention, self._begin_pass)):
            stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)

    def check_complete(self) -> None:
        """Raise `ConfigError` unless the whole batch has passed."""
        self._check_rows(self._next_row == len(self.sets), self._next_row)

    def _check_rows(self, condition: bool, passed: int) -> None:
        if not condition:
            raise ConfigError(f"The probe has masks for {len(self.sets)} rows, but {passed} pass: pass all of them.")

    def _begin_batch(self, base: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Find the wanted positions before rows pass through the whole model."""
        self._base_seen = True
        inputs: Any = kwargs.get("input_ids", args[0] if args else None)
        inputs = kwargs["inputs_embeds"] if inputs is None else inputs
        if positions_seen(cache_of(kwargs)):
            raise ConfigError("Attention is measured over whole sequences: pass them without a cache.")
        self._plan_positions(inputs.size(1))

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
        """Assign rows before they pass through the decoder, which they do once, or more often with shared prompts."""
        if torch._C._current_graph_task_id() != -1:  # a backward pass recomputes checkpointed layers
            return
        hidden = args[0] if args else kwargs["hidden_states"]
        count, length, _ = hidden.shape
        if not self._base_seen:  # a head that calls the decoder of its base model
            self._plan_positions(length)
        cache = cache_of(kwargs)
        seen = positions_seen(cache)
        groups = cache.groups if isinstance(cache, WrittenPrefix) else None
        some = cache.rows if isinstance(cache, ReadPrefix) else None
        self._to_come = len(groups) if groups is not None else self._to_come if some is not None else count
        start, stop = self._next_row, self._next_row + self._to_come
        self._check_rows(stop <= len(self.sets), stop)
        columns = slice(bisect_left(self.positions, seen), bisect_left(self.positions, seen + length))
        self.current = Pass(
            numbers=list(range(start, stop)) if some is None else [start + row for row in some],
            groups=list(range(count)) if groups is None else groups,
            shape=(count, length),
            seen=seen,
            emitting=_queries(self.positions[columns], seen, hidden.device),
            columns=columns,
            instruction=_queries([at for at in self._instruction if 0 <= at - seen < length], seen, hidden.device),
            device=hidden.device,
        )
        if groups is None:  # else these rows pass again, behind their prompts
            self._passed += count
            if self._passed == self._to_come:
                self._next_row, self._passed = stop, 0


def _queries(positions: list[int], seen: int, device: torch.device) -> Queries | None:
    if not positions:
        return None
    return Queries(on_device(positions, device) - seen, positions[0] - seen, positions[-1] + 1 - seen)


def positions_seen(cache: Cache | None) -> int:
    """Return the number of positions in a cache."""
    layers: Any = [] if cache is None else cache.layers
    return max((int(layer.get_seq_length()) for layer in layers if isinstance(layer, CacheLayerMixin)), default=0)
