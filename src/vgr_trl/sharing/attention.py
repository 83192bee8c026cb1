"""Attention functions that models look up in transformers: wrapped, or replaced where prompts are shared."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor, nn
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.attention.bias import causal_lower_right
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import AttentionInterface

from vgr_trl.patching import patched_attribute


def marked(keys: Any) -> Tensor:
    """Mark keys, (B, H, K, D), as those of a pass with shared prompts."""
    keys.of_shared_prompts = True
    return keys  # type: ignore[no-any-return]


def wrap_attention(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> AbstractContextManager[None]:
    """Wrap what models get when they look up their attention function, eager ones and local overrides included."""
    look_up = AttentionInterface.get_interface

    def get_interface(interface: Any, name: str, default: Callable[..., Any]) -> Callable[..., Any]:
        return wrap(look_up(interface, name, default))

    return patched_attribute(AttentionInterface, "get_interface", get_interface)


def sdpa_by_key_head(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Return what transformers' `sdpa` does, without a copy of keys and values for every query head where it masks.

    With a mask, which completions behind a shared prompt always have, transformers repeats them, and the backward pass
    keeps the copies: 219 MB a layer for Qwen2.5-VL-7B, P 1400, T 512, G 8. Here the queries of a key head see a view.
    Where the mask hides no key before a query, as behind prompts without padding, flash attention takes its place: what
    comes out for padding behind completions differs then.
    Passes that share no prompts, of any model in the process, get what transformers does. A module's `attend_within`
    takes the place of all of this: see vgr_trl.vision.feature_cache.

    Args:
        query: (B, H, Q, D).
        key, value: (B, number of key heads, K, D); the keys `marked` where prompts are shared.
        attention_mask: (B, 1, Q, K).
    """
    if (within := getattr(module, "attend_within", None)) is not None:
        return within(module, query, key, value, dropout, scaling), None
    groups = getattr(module, "num_key_value_groups", 1)
    plain = dropout == 0 and not any(kwargs.get(name) is not None for name in ("softcap", "position_bias", "cache"))
    shares = plain and query.size(2) > 1 and hasattr(key, "of_shared_prompts")
    if not shares or attention_mask is None or attention_mask.size(1) != 1:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    if torch.is_autocast_enabled(query.device.type):  # it would cast keys and values again for every query head
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    takes_flash = can_use_flash_attention(SDPAParams(query, key, value, None, 0.0, False, True))
    if takes_flash and hides_nothing_before(attention_mask):
        return attend_to_all_before(query, key, value, scaling), None
    if groups == 1:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    if attention_mask.dtype == torch.bool:  # kernels would keep one of their own for each key head, with aligned rows
        *rows, columns = attention_mask.shape
        aligned = query.new_zeros(*rows, columns + -columns % 8)[..., :columns]
        attention_mask = aligned.masked_fill_(~attention_mask, -torch.inf)
    seen = []
    for queries, *one_head in zip(query.split(groups, 1), key.split(1, 1), value.split(1, 1), strict=True):
        keys, values = (each.expand(-1, groups, -1, -1) for each in one_head)
        attend = nn.functional.scaled_dot_product_attention
        seen.append(attend(queries, keys, values, attn_mask=attention_mask, scale=scaling))
    return torch.cat(seen, 1).transpose(1, 2).contiguous(), None


def hides_nothing_before(mask: Any) -> bool:
    """Return whether each query sees all keys up to its own, the last Q of K, and none behind; found once for a mask.

    Args:
        mask: (B, 1, Q, K) bool. Queries that do not see their own key are padding, and may see anything.
    """
    if mask.dtype != torch.bool:
        return False
    if not hasattr(mask, "hides_nothing_before"):  # one tensor for all layers of a pass; the host waits for the answer
        queries, keys = mask.shape[-2:]
        own = mask.diagonal(keys - queries, -2, -1).unsqueeze(-1)
        before = torch.ones(queries, keys, dtype=torch.bool, device=mask.device).tril(keys - queries)
        mask.hides_nothing_before = bool(((mask == before) | ~own).all())
    return bool(mask.hides_nothing_before)


def attend_to_all_before(query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    """Return attention of the last Q tokens to all K up to each, (B, Q, H, D), without a mask that a kernel reads.

    Args:
        query: (B, H, Q, D).
        key, value: (B, number of key heads, K, D).
    """
    seen = causal_lower_right(query.size(2), key.size(2))
    attend = nn.functional.scaled_dot_product_attention
    return attend(query, key, value, attn_mask=seen, scale=scaling, enable_gqa=True).transpose(1, 2).contiguous()


def keep_keys_unrepeated() -> None:
    """Let `sdpa` be `sdpa_by_key_head` from here on: a checkpoint computes layers again behind the block."""
    if AttentionInterface._global_mapping.get("sdpa") is sdpa_attention_forward:
        AttentionInterface.register("sdpa", sdpa_by_key_head)


def prefers_cudnn() -> bool:
    """Whether `sdpa` takes cuDNN's kernel first: torch from 2.11 on, on Hopper and later."""
    if not torch.cuda.is_available() or not torch.backends.cuda.cudnn_sdp_enabled():
        return False
    return Version(torch.__version__).release >= (2, 11) and torch.cuda.get_device_capability()[0] >= 9
