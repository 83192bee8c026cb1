"""A cache of generation that grows in place: transformers copies all keys and values for each new token."""

from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer

ROOM = 128  # tokens for which there is room before the next copy


class GrowingLayer(DynamicLayer):
    """Keys and values of some rows of a filled layer, to which tokens are added; for `generate` without beams.

    Args:
        filled: the other layer.
        index: (N,) row -> row of the other layer.
    """

    keys: Any
    values: Any

    def __init__(self, filled: Any, index: torch.Tensor) -> None:
        super().__init__()
        self.dtype, self.device, self.is_initialized = filled.dtype, filled.device, True
        filled.reorder_cache(index)
        self._longer = [_with_room(filled.keys), _with_room(filled.values)]
        self._show(filled.get_seq_length())

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        start = self.get_seq_length()
        stop = start + key_states.size(-2)
        if stop > self._longer[0].size(-2):
            self._longer = [_with_room(self.keys, key_states.size(-2)), _with_room(self.values, key_states.size(-2))]
        for longer, new in zip(self._longer, (key_states, value_states), strict=True):
            longer[:, :, start:stop] = new
        self._show(stop)
        return self.keys, self.values

    def _show(self, length: int) -> None:
        self.keys, self.values = (longer[:, :, :length] for longer in self._longer)


def _with_room(filled: torch.Tensor, at_least: int = 0) -> torch.Tensor:
    """Return a tensor that begins with (N, H, S, D), and has more tokens."""
    rows, heads, length, width = filled.shape
    longer = filled.new_empty(rows, heads, length + max(at_least, ROOM), width)
    longer[:, :, :length] = filled
    return longer


def grow_in_place(cache: Cache, index: torch.Tensor) -> None:
    """Give a filled cache rows `index`, (N,), of its own, with room behind them in layers that keep all tokens."""
    for number, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer and layer.is_initialized:
            cache.layers[number] = GrowingLayer(layer, index)
        else:
            layer.reorder_cache(index)  # type: ignore[arg-type]  # a LongTensor, which no tensor is for mypy
