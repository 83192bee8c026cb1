"""Flash attention for transformers where flash-attn is not installed: the copy of its kernels that PyTorch has."""

from typing import Any

import torch
from transformers import modeling_flash_attention_utils as flash


def install() -> None:
    """Let transformers find these in place of the package; sliding windows and dropout are not for them."""
    module: Any = flash
    module._lazy_imports = lambda *args, **kwargs: (dense, variable, None, flash._pad_input, flash._unpad_input)
    module._loaded_implementation = None


def variable(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int,
    softmax_scale: float | None = None, causal: bool = False,
) -> torch.Tensor:  # fmt: skip
    """(Q, H, D), (K, H', D) -> (Q, H, D); of each row, the last query belongs to the last key."""
    bounds = (cu_seqlens_q, cu_seqlens_k, int(max_seqlen_q), int(max_seqlen_k))
    found = torch.ops.aten._flash_attention_forward(q, k, v, *bounds, 0.0, causal, False, scale=softmax_scale)
    return found[0]  # its gradient is PyTorch's, by aten._flash_attention_backward


def dense(q: Any, k: Any, v: Any, softmax_scale: float | None = None, causal: bool = False) -> torch.Tensor:
    """(N, Q, H, D), (N, K, H', D) -> (N, Q, H, D)."""
    rows = [torch.arange(len(one) + 1, device=one.device, dtype=torch.int32) * one.size(1) for one in (q, k)]
    given: list[Any] = [*(one.flatten(0, 1) for one in (q, k, v)), *rows, q.size(1), k.size(1), softmax_scale, causal]
    return variable(*given).unflatten(0, q.shape[:2])


def attend_with(model: Any, name: str) -> None:
    """Let the language model attend by `sdpa` or `flash_attention_2`, without asking for the package."""
    for config in (model.config, model.config.get_text_config(decoder=True)):
        config._attn_implementation_internal = name
