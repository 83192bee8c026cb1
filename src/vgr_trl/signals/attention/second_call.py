"""An attention call of a model, asked again for some of its queries, with sets of keys as values; or its weights."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from vgr_trl.errors import ConfigError

_OF_WHOLE_CALLS = ("position_ids", "output_attentions")
_PACKED = ("cu_seq_lens_q", "cu_seq_lens_k")


@dataclass(frozen=True)
class Queries:
    """Some queries of a pass: `index` (T',) int64, increasing, from `first` up to but without `stop`."""

    index: torch.Tensor
    first: int
    stop: int


@dataclass(frozen=True)
class AttentionWeights:
    """Attention that a model has made as a matrix: (B, H, Q, K)."""

    weights: torch.Tensor

    @property
    def shape(self) -> tuple[int, int, int]:
        """B, Q and K."""
        rows, _, queries, keys = self.weights.shape
        return rows, queries, keys

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.weights.device

    def mass_on_keys(self, sets: torch.Tensor, queries: Queries, rows: slice = slice(None)) -> torch.Tensor:
        """As `AttentionCall.mass_on_keys`."""
        return self.weights[rows][:, :, queries.index].mean(1, dtype=torch.float32) @ sets.float()


@dataclass(frozen=True)
class AttentionCall:
    """One call of a registered attention function, and how much of its attention goes to sets of keys.

    Attributes:
        function: as transformers registers it.
        module: attention module that it was called for.
        query: (B, H, Q, D).
        key: (B, H of keys, K, D).
        options: the other arguments of the call; `attention_mask` among them is (B or 1, 1 or H, Q, K), for flash
            attention (B, K), or None.
        packed: several sequences may stand in one row, which flash attention tells apart by their positions: the
            function is asked again for all queries.
    """

    function: Callable[..., Any]
    module: nn.Module
    query: torch.Tensor
    key: torch.Tensor
    options: dict[str, Any]
    packed: bool = False

    @property
    def shape(self) -> tuple[int, int, int]:
        """B, Q and K."""
        return self.query.size(0), self.query.size(2), self.key.size(2)

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.key.device

    def mass_on_keys(self, sets: torch.Tensor, queries: Queries, rows: slice = slice(None)) -> torch.Tensor:
        """Return the attention on sets of keys, the mean over heads, (B', T', C) float32.

        Args:
            sets: (B', K, C) of ones and zeros, for B' of the B rows.
            queries: the queries of interest, T' of Q.
            rows: which of the B rows.
        """
        width = self.key.size(-1)  # fused kernels want values as wide as keys
        parts = [self._outputs(part, queries, rows) for part in sets.split(width, dim=-1)]
        return torch.cat(parts, dim=-1)

    def _outputs(self, sets: torch.Tensor, queries: Queries, rows: slice) -> torch.Tensor:
        """The function run on at most D sets: (B', T', C)."""
        if self.packed:
            return self._whole(sets, queries, rows)
        flash = "flash" in (getattr(self.module.config, "_attn_implementation", None) or "")
        # Causal kernels align the last query with the last key, so the keys end with those of the last query.
        last = queries.stop if self._is_causal() else self.query.size(2)
        stop = self.key.size(2) - self.query.size(2) + last
        chosen = slice(queries.first, last) if flash else queries.index  # flash needs them without gaps
        key = self.key[rows, :, :stop]
        values = torch.nn.functional.pad(sets[:, :stop].to(key.dtype), (0, key.size(-1) - sets.size(-1)))  # (B', K', D)
        options = self._options(chosen, stop, rows, flash)
        outputs, _ = self.function(
            self.module,
            self.query[rows, :, chosen],
            key,
            values.unsqueeze(1).expand(-1, key.size(1), -1, -1),
            options.pop("attention_mask", None),
            **options,
        )  # (B', T' or more, H, D)
        mass: torch.Tensor = outputs[..., : sets.size(-1)].mean(2, dtype=torch.float32)
        return mass[:, queries.index - queries.first] if flash else mass

    def _whole(self, sets: torch.Tensor, queries: Queries, rows: slice) -> torch.Tensor:
        """As `_outputs`, with every argument of the call but the values as it was."""
        values = torch.nn.functional.pad(sets.to(self.key.dtype), (0, self.key.size(-1) - sets.size(-1)))
        heads = self.key.size(1)
        options = {**self.options, "dropout": 0.0}
        mask = options.pop("attention_mask", None)
        outputs, _ = self.function(
            self.module, self.query, self.key, values.unsqueeze(1).expand(-1, heads, -1, -1), mask, **options
        )
        mass: torch.Tensor = outputs[..., : sets.size(-1)].mean(2, dtype=torch.float32)
        return mass[rows, queries.index]

    def _options(self, chosen: slice | torch.Tensor, stop: int, rows: slice, flash: bool) -> dict[str, Any]:
        if any(self.options.get(name) is not None for name in _PACKED):
            raise ConfigError("Attention cannot be measured in packed sequences: pass one sequence per row, padded.")
        kept = {name: value for name, value in self.options.items() if name not in _OF_WHOLE_CALLS}
        for name in ("attention_mask", "position_bias"):
            if (per_query := kept.get(name)) is not None and per_query.ndim == 4:
                of_rows = per_query[rows] if per_query.size(0) > 1 else per_query
                kept[name] = of_rows[:, :, chosen, :stop]
        mask = kept.get("attention_mask")
        if mask is None and not flash and self._is_causal():
            kept["attention_mask"] = self._causal_mask(chosen, stop)
        elif mask is not None and mask.ndim == 2:
            kept["attention_mask"] = mask[rows, :stop]
        return {**kept, "dropout": 0.0}

    def _is_causal(self) -> bool:
        """Whether no query sees what comes behind it, by the kernel's own rule; a mask may say otherwise."""
        mask = self.options.get("attention_mask")
        causal = self.options.get("is_causal")
        causal = getattr(self.module, "is_causal", True) if causal is None else causal
        return bool(causal) and self.query.size(2) > 1 and (mask is None or mask.ndim == 2)

    def _causal_mask(self, chosen: slice | torch.Tensor, stop: int) -> torch.Tensor:
        """What the function does by itself if all queries are given, (1, 1, T', K')."""
        before = self.key.size(2) - self.query.size(2)
        position = torch.arange(before, self.key.size(2), device=self.key.device)[chosen]  # (T',)
        return (position.unsqueeze(1) >= torch.arange(stop, device=self.key.device))[None, None]
