"""Attention functions that models look up in transformers: wrapped, or replaced where prompts are shared."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor, nn
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.attention.bias import causal_lower_right
from torch.utils.weak import WeakTensorKeyDictionary
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import AttentionInterface

from vgr_trl.patching import patched_attribute

_SHARED_KEYS = WeakTensorKeyDictionary()  # keys that begin with those of a shared prompt -> True
_HIDES_NOTHING = WeakTensorKeyDictionary()  # mask -> whether it hides no earlier key


def mark_shared(keys: Tensor) -> Tensor:
    """Let `sdpa_by_key_head` know that keys, (B, H, K, D), belong to a pass with shared prompts.

    It knows them as long as they exist. A flag of the block would be gone when a checkpoint computes a layer again in
    the backward pass.
    """
    _SHARED_KEYS[keys] = True
    return keys


def wrap_attention(call: Callable[..., Any]) -> AbstractContextManager[None]:
    """Have `call` called with every attention function that a model looks up in this block, and its arguments.

    Eager and overridden functions are included.
    """
    look_up = AttentionInterface.get_interface

    def get_interface(interface: Any, name: str, default: Callable[..., Any]) -> Callable[..., Any]:
        return partial(call, look_up(interface, name, default))

    return patched_attribute(AttentionInterface, "get_interface", get_interface)


def sdpa_by_key_head(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    attend_within: Callable[..., Tensor] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute transformers' `sdpa` without copying keys and values for every query head where prompts are shared.

    Completions behind a shared prompt always have a mask. With one transformers repeats keys and values, and the
    backward pass keeps the copies: 219 MB a layer for Qwen2.5-VL-7B, P 1400, T 512, G 8. Here the queries of a key head
    read a view. Flash attention runs instead where the mask hides no earlier key, as behind prompts without padding;
    outputs of padding behind completions differ then. Passes without shared prompts run transformers' `sdpa`.

    Args:
        module: attention layer.
        query: (B, H, Q, D).
        key: (B, key heads, K, D), known by `mark_shared` where prompts are shared.
        value: (B, key heads, K, D).
        attention_mask: (B, 1, Q, K).
        dropout: probability.
        scaling: of the scores; None: 1 / sqrt(D).
        attend_within: function that computes the attention instead, (B, Q, H, D); a hook of the module passes it.
    """
    if attend_within is not None:
        return attend_within(module, query, key, value, dropout, scaling), None
    groups = getattr(module, "num_key_value_groups", 1)
    plain = dropout == 0 and not any(kwargs.get(name) is not None for name in ("softcap", "position_bias", "cache"))
    if query.size(2) == 1 and plain and groups > 1 and attention_mask is not None and attention_mask.size(1) == 1:
        return attend_one_token(query, key, value, attention_mask, scaling), None
    # Models that share prompts are not compiled.
    shares = plain and query.size(2) > 1 and not torch.compiler.is_compiling() and key in _SHARED_KEYS
    if not shares or attention_mask is None or attention_mask.size(1) != 1:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    if torch.is_autocast_enabled(query.device.type):  # which would cast keys and values again for every query head
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    takes_flash = can_use_flash_attention(SDPAParams(query, key, value, None, 0.0, False, True))
    if takes_flash and hides_nothing_before(attention_mask):
        return attend_to_all_before(query, key, value, scaling), None
    if groups == 1:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    if attention_mask.dtype == torch.bool:  # kernels would keep an aligned copy of it for each key head
        *rows, columns = attention_mask.shape
        aligned = query.new_zeros(*rows, columns + -columns % 8)[..., :columns]
        attention_mask = aligned.masked_fill_(~attention_mask, -torch.inf)
    seen = []
    for queries, *one_head in zip(query.split(groups, 1), key.split(1, 1), value.split(1, 1), strict=True):
        keys, values = (each.expand(-1, groups, -1, -1) for each in one_head)
        attend = nn.functional.scaled_dot_product_attention
        seen.append(attend(queries, keys, values, attn_mask=attention_mask, scale=scaling))
    return torch.cat(seen, 1).transpose(1, 2).contiguous(), None


def attend_one_token(
    query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, scaling: float | None
) -> Tensor:
    """Compute attention of one new token, where the queries of a key head read its keys together.

    transformers repeats keys and values for every query head, in compiled code or before 5.20.

    Args:
        query: (B, H, 1, D).
        key: (B, key heads, K, D).
        value: (B, key heads, K, D).
        attention_mask: (B, 1, 1, K).
        scaling: of the scores; None: 1 / sqrt(D).

    Returns:
        (B, 1, H, D).
    """
    rows, heads, _, width = query.shape
    queries = query.reshape(rows, key.size(1), -1, width)  # (B, key heads, H / key heads, D)
    attend = nn.functional.scaled_dot_product_attention
    return attend(queries, key, value, attn_mask=attention_mask, scale=scaling).reshape(rows, 1, heads, width)


def hides_nothing_before(mask: Tensor) -> bool:
    """Return whether each query sees all keys up to its own and no later key; the queries' keys are the last Q of K.

    Args:
        mask: (B, 1, Q, K) bool. Queries that do not see their own key are padding, and may see anything.
    """
    if mask.dtype != torch.bool:
        return False
    if mask not in _HIDES_NOTHING:  # all layers of a pass have the same mask, and the host waits for the answer once
        queries, keys = mask.shape[-2:]
        own = mask.diagonal(keys - queries, -2, -1).unsqueeze(-1)
        before = torch.ones(queries, keys, dtype=torch.bool, device=mask.device).tril(keys - queries)
        _HIDES_NOTHING[mask] = bool(((mask == before) | ~own).all())
    return bool(_HIDES_NOTHING[mask])


def attend_to_all_before(query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    """Compute causal attention of the last Q tokens to all K tokens, without a mask that the kernel reads.

    Args:
        query: (B, H, Q, D).
        key: (B, key heads, K, D).
        value: (B, key heads, K, D).
        scaling: of the scores; None: 1 / sqrt(D).

    Returns:
        (B, Q, H, D).
    """
    seen = causal_lower_right(query.size(2), key.size(2))
    attend = nn.functional.scaled_dot_product_attention
    return attend(query, key, value, attn_mask=seen, scale=scaling, enable_gqa=True).transpose(1, 2).contiguous()


def keep_keys_unrepeated() -> None:
    """Register `sdpa_by_key_head` as `sdpa` for the whole process: a checkpoint recomputes layers after the block."""
    if AttentionInterface._global_mapping.get("sdpa") is sdpa_attention_forward:
        AttentionInterface.register("sdpa", sdpa_by_key_head)


def prefers_cudnn() -> bool:
    """Whether `sdpa` tries cuDNN's kernel first: torch 2.11 and later, on Hopper and later GPUs."""
    if not torch.cuda.is_available() or not torch.backends.cuda.cudnn_sdp_enabled():
        return False
    return Version(torch.__version__).release >= (2, 11) and torch.cuda.get_device_capability()[0] >= 9
