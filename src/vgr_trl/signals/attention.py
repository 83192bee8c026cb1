"""Attention mass of emitting queries, measured during a forward pass with whatever attention kernel it uses.

The mass on a set of keys is the attention output for a value vector that is 1 on the set and 0 elsewhere. While a probe
is active, every attention call of the language model runs as always, and then once more for the queries of interest,
with two indicator columns as values. No (H, T, S) matrix is made, unless the model itself makes one (eager attention).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.modeling_utils import AttentionInterface

from vgr_trl.errors import ConfigError
from vgr_trl.sharing.backbone import causal_model
from vgr_trl.signals.decoder import find_decoder, layer_index, refuse_unmeasurable
from vgr_trl.signals.measured import AttentionMass
from vgr_trl.signals.modality import ModalityMasks
from vgr_trl.signals.second_call import attend_again

SIDES = 2  # vision, instruction


@dataclass
class _Pass:
    """A pass through the decoder: rows of the batch from `start`, behind `seen` positions in the cache."""

    start: int
    seen: int
    queries: slice  # of the pass
    columns: slice  # of what is measured
    done: set[int] = field(default_factory=set)


class AttentionProbe:
    """Measures, while it is active, how much attention the queries of a batch pay to vision and instruction tokens.

        with AttentionProbe(model, masks) as probe:
            model(**inputs)
        probe.mass

    The batch may pass through the model in several calls of consecutive rows, with gradient checkpointing, and with its
    prompts shared (`share_prompts`). What the model returns is what it returns without a probe.

    Args:
        model: transformers model, also wrapped, with sdpa, flash or eager attention.
        masks: of the prompts (N, P), or of whole sequences (N, S).
        rows: query positions to measure: a slice, or increasing integers without gaps. None: with masks (N, P) the
            emitting rows of the completion, P - 1 to S - 2; with masks of whole sequences all S.
        keep_rows: rows of the batch whose attention over the vision tokens is kept: `kept[row]` is (L, T, V) float32,
            the mean over heads, with V the vision tokens of that row in order.

    Raises:
        ConfigError: the attention of the model cannot be measured, or other rows pass through it than `masks` has.
    """

    def __init__(
        self,
        model: Any,
        masks: ModalityMasks,
        rows: slice | Sequence[int] | None = None,
        keep_rows: Sequence[int] = (),
    ) -> None:
        refuse_unmeasurable(model)
        self.base: Any = causal_model(model).base_model
        self.decoder: Any = find_decoder(model)
        self.modules = {id(module) for module in self.decoder.modules() if layer_index(module) is not None}
        self.rows, self.keep_rows = rows, tuple(keep_rows)
        self.sets = torch.stack([masks.vision, masks.instruction], dim=-1)  # (N, P or S, 2)
        self.measured = slice(0, 0)  # positions
        self.layers: dict[int, torch.Tensor] = {}  # layer -> (N, T, 2)
        self.maps: dict[tuple[int, int], torch.Tensor] = {}  # (row, layer) -> (T, V)
        self.current: _Pass | None = None
        self.next_row = 0
        self.stack = ExitStack()

    def __enter__(self) -> "AttentionProbe":
        for module, hook in ((self.base, self._begin_batch), (self.decoder.layers[0], self._begin_pass)):
            self.stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
        self.stack.enter_context(_attention_wrapped(self._wrap))
        return self

    def __exit__(self, *error: Any) -> None:
        self.stack.close()

    @property
    def mass(self) -> AttentionMass:
        """What was measured, (L, N, T), with the layers that have attention; `mask` counts every token as valid.

        Raises:
            ConfigError: fewer rows have passed through the model than `masks` has.
        """
        if self.next_row != len(self.sets) or not self.layers:
            raise ConfigError(
                f"The probe has masks for {len(self.sets)} rows, but {self.next_row} have passed through the model: "
                "pass the whole batch while it is active."
            )
        sides = torch.stack([self.layers[layer] for layer in sorted(self.layers)])  # (L, N, T, 2)
        counts = self.sets.sum(1)  # (N, 2)
        return AttentionMass(
            vision=sides[..., 0],
            instruction=sides[..., 1],
            num_vision=counts[:, 0],
            num_instruction=counts[:, 1],
            mask=torch.ones(sides.shape[1:3], dtype=torch.bool, device=sides.device),
        )

    @property
    def kept(self) -> dict[int, torch.Tensor]:
        """Row -> (L, T, V) float32, attention over its vision tokens, for the rows of `keep_rows`."""
        return {row: torch.stack([self.maps[row, layer] for layer in sorted(self.layers)]) for row in self.keep_rows}

    # The passes of the batch

    def _begin_batch(self, base: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before rows pass through the whole model: find out which positions are to be measured."""
        given: Any = kwargs.get("input_ids", args[0] if args else None)
        given = kwargs["inputs_embeds"] if given is None else given
        columns, length = self.sets.size(1), given.size(1)
        rows = self.rows
        if rows is None:
            rows = slice(columns - 1, length - 1) if columns < length else slice(0, length)
        positions = range(length)[rows] if isinstance(rows, slice) else rows
        start, stop = positions[0], positions[-1] + 1
        if stop - start != len(positions) or stop > length:
            raise ConfigError(f"rows of the probe is {self.rows}: give positions without gaps in [0, {length}).")
        self.measured = slice(start, stop)
        self.sets = self.sets.to(given.device)

    def _begin_pass(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before rows pass through the decoder: once for a plain batch, twice where prompts are shared."""
        if _in_backward():
            return
        hidden = args[0] if args else kwargs["hidden_states"]
        count, length = hidden.shape[:2]
        seen = _positions_seen(kwargs.get("past_key_values"))
        start, stop = max(self.measured.start, seen), min(self.measured.stop, seen + length)
        self.current = None
        if start >= stop:  # prompts, behind which completions are computed later
            return
        if self.next_row + count > len(self.sets):
            raise ConfigError(
                f"The probe has masks for {len(self.sets)} rows, but {self.next_row + count} pass through the model: "
                "give masks of the whole batch."
            )
        columns = slice(start - self.measured.start, stop - self.measured.start)
        self.current = _Pass(self.next_row, seen, slice(start - seen, stop - seen), columns)
        self.next_row += count

    # The attention calls of a pass

    def _wrap(self, attention: Callable[..., Any]) -> Callable[..., Any]:
        def measured(module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
            outputs = attention(module, query, key, value, *args, **kwargs)
            layer, at_hand = layer_index(module), self.current
            if at_hand is not None and layer is not None and id(module) in self.modules and layer not in at_hand.done:
                at_hand.done.add(layer)
                options = dict(zip(("attention_mask",), args, strict=False)) | kwargs
                with torch.no_grad():
                    self._measure(layer, at_hand, attention, module, query, key, outputs[1], options)
            return outputs

        return measured

    def _measure(
        self,
        layer: int,
        at_hand: _Pass,
        attention: Callable[..., Any],
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        weights: torch.Tensor | None,
        options: dict[str, Any],
    ) -> None:
        batch = slice(at_hand.start, at_hand.start + len(query))
        first_key = at_hand.seen + query.size(2) - key.size(2)
        sets = _columns(self.sets[batch], first_key, key.size(2)).to(query.dtype)  # (B, K, 2)
        attend = _by_weights(weights, at_hand.queries) if weights is not None else None
        if attend is None:
            attend = attend_again(attention, module, query, key, at_hand.queries, options)
        mass = attend(sets)  # (B, T', 2)
        if layer not in self.layers:
            shape = (len(self.sets), self.measured.stop - self.measured.start, SIDES)
            self.layers[layer] = torch.zeros(shape, device=query.device)
        self.layers[layer][batch, at_hand.columns] = mass
        for row in self.keep_rows:
            if batch.start <= row < batch.stop:
                self._keep_map(row, layer, at_hand, row - batch.start, sets, attend)

    def _keep_map(
        self, row: int, layer: int, at_hand: _Pass, index: int, sets: torch.Tensor, attend: Callable[..., torch.Tensor]
    ) -> None:
        keys = sets[index, :, 0].nonzero().flatten()  # (V',)
        each = torch.zeros(*sets.shape[:2], len(keys), dtype=sets.dtype, device=sets.device)
        each[index, keys, torch.arange(len(keys), device=keys.device)] = 1
        vision = int(self.sets[row, :, 0].sum())
        if (row, layer) not in self.maps:
            length = self.measured.stop - self.measured.start
            self.maps[row, layer] = torch.zeros(length, vision, device=sets.device)
        # Keys that a cache with a window has dropped are the first ones, and get no attention.
        self.maps[row, layer][at_hand.columns, vision - len(keys) :] = attend(each)[index]


def _by_weights(weights: torch.Tensor, queries: slice) -> Callable[[torch.Tensor], torch.Tensor]:
    """Attention on sets of keys where the model has made the matrix itself."""
    mean = weights[:, :, queries].float().mean(1)  # (B, T', K)
    return lambda sets: mean @ sets.float()


def _columns(sets: torch.Tensor, first: int, count: int) -> torch.Tensor:
    """Columns `first` to `first + count` of (B, S, 2), with nothing behind its end."""
    found = sets[:, first : first + count]
    return torch.nn.functional.pad(found, (0, 0, 0, count - found.size(1)))


def _positions_seen(cache: Any) -> int:
    layers = [] if cache is None else cache.layers
    return max((int(layer.get_seq_length()) for layer in layers if hasattr(layer, "get_seq_length")), default=0)


def _in_backward() -> bool:
    """Whether a backward pass is running, which recomputes checkpointed layers."""
    return torch._C._current_graph_task_id() != -1


@contextmanager
def _attention_wrapped(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Wrap what models get when they look up their attention function, eager ones and local overrides included."""
    look_up = AttentionInterface.get_interface

    def get_interface(interface: Any, name: str, default: Callable[..., Any]) -> Callable[..., Any]:
        return wrap(look_up(interface, name, default))

    AttentionInterface.get_interface = get_interface  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        AttentionInterface.get_interface = look_up  # type: ignore[method-assign]
