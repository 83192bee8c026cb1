"""An attention function run once more, for some queries, with sets of keys as values."""

from collections.abc import Callable
from typing import Any

import torch

_OF_WHOLE_CALLS = ("position_ids", "output_attentions")


def attend_again(
    attention: Callable[..., Any],
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    queries: slice,
    options: dict[str, Any],
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function from sets of keys, (B, K, C) of ones and zeros, to the attention on them, (B, T', C) float32.

    Keys behind the last query of interest are left out, so that causal kernels, which align the last query with the
    last key, mean the same queries.

    Args:
        attention: as transformers registers it.
        module: attention module that it is called for.
        query: (B, H, Q, D).
        key: (B, H of keys, K, D).
        queries: the queries of interest, T' of Q.
        options: the other arguments of the call; `attention_mask` among them is (B or 1, 1 or H, Q, K), for flash
            attention (B, K), or None.
    """
    stop = key.size(2) - query.size(2) + queries.stop  # keys that the last query of interest may see
    chosen = {"query": query[:, :, queries], "key": key[:, :, :stop]}
    kept = {name: value for name, value in options.items() if name not in _OF_WHOLE_CALLS}
    kept |= {"dropout": 0.0, "attention_mask": _mask(module, query, key, queries, stop, options)}
    width = key.size(-1)

    def attend(sets: torch.Tensor) -> torch.Tensor:
        parts = []
        for part in sets[:, :stop].split(width, dim=-1):
            values = torch.nn.functional.pad(part, (0, width - part.size(-1)))  # (B, K', D)
            values = values.unsqueeze(1).expand(-1, key.size(1), -1, -1)
            outputs, _ = attention(module, **chosen, value=values, **kept)  # (B, T', H, D)
            parts.append(outputs[..., : part.size(-1)].float().mean(2))
        return torch.cat(parts, dim=-1)

    return attend


def _mask(
    module: Any, query: torch.Tensor, key: torch.Tensor, queries: slice, stop: int, options: dict[str, Any]
) -> torch.Tensor | None:
    mask = options.get("attention_mask")
    if mask is not None:
        return mask[:, :stop] if mask.ndim == 2 else mask[:, :, queries, :stop]
    causal = options.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    aligned_to_the_end = "flash" in (getattr(module.config, "_attn_implementation", None) or "")
    if not causal or query.size(2) == 1 or aligned_to_the_end:
        return None
    position = torch.arange(key.size(2) - query.size(2), key.size(2), device=key.device)[queries]  # (T',)
    allowed = position.unsqueeze(1) >= torch.arange(stop, device=key.device)  # (T', K')
    return allowed[None, None]
