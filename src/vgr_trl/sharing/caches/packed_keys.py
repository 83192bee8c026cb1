"""Keys and values of prompts, read by completions that are packed in one row."""

import torch

from vgr_trl.sharing.caches.prefix_cache import ExpandedKeys, Prefix


class PackedKeys(ExpandedKeys):
    """Stored keys and values of U prompts of P - 1 tokens, each in front of its completions' own; never written.

    Its index is (K,): which of U * (P - 1) keys of prompts and Q keys of completions behind them, for each key in turn.
    """

    def _behind(self, stored: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        every = torch.cat([stored.transpose(1, 2).flatten(0, 1), new[0].transpose(0, 1)])  # (U * (P - 1) + Q, H, D)
        return every.index_select(0, self.index).transpose(0, 1).unsqueeze(0)  # (1, H, K, D)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return len(self.index), 0


def packed_prefix(written: Prefix, places: torch.Tensor) -> Prefix:
    """Return a written prefix of layers that keep keys and values as packed completions read it."""
    return Prefix(layers=[PackedKeys(layer, places) for layer in written.layers])
