"""Keys and values of prompts, read by completions that are packed in one row."""

from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from vgr_trl.sharing.caches.prefix_cache import Prefix, StoredKeys


class PackedKeys(CacheLayerMixin):
    """Stored keys and values of prompts, each in front of its completions' own; never written.

    Args:
        stored: those of U prompts of P - 1 tokens.
        places: (K,) which of U * (P - 1) keys of prompts and Q keys of completions behind them, for each key in turn.
    """

    def __init__(self, stored: StoredKeys, places: torch.Tensor) -> None:
        super().__init__()
        self.is_sliding = stored.is_sliding
        self.stored, self.places = stored, places
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the prompts have been stored."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._behind(self.stored.keys, key_states), self._behind(self.stored.values, value_states)

    def _behind(self, stored: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        every = torch.cat([stored.transpose(1, 2).flatten(0, 1), new[0].transpose(0, 1)])  # (U * (P - 1) + Q, H, D)
        return every.index_select(0, self.places).transpose(0, 1).unsqueeze(0)  # (1, H, K, D)

    def get_seq_length(self) -> int:
        return self.stored.length()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return len(self.places), 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name in transformers 5.9


def packed_prefix(written: Prefix, places: torch.Tensor) -> Prefix:
    """Return a written prefix of layers that keep keys and values as packed completions read it."""
    return Prefix(layers=[PackedKeys(layer, places) for layer in written.layers])
