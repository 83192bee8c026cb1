"""Attend within all windows of a vision tower in a single call.

transformers' towers of the Qwen-VL kind call `sdpa` for each window of 64 patches, 80 times a layer for an image of
1,280 tokens, and wait for the device three times a layer to learn the lengths of the windows.
"""

from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from inspect import signature
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import AttentionInterface

from vgr_trl.pixels import on_device
from vgr_trl.sharing.attention import keep_keys_unrepeated, sdpa_by_key_head


def join_windows(model: nn.Module) -> int:
    """Attend within all windows of vision towers in a single call from here on, where their attention is `sdpa`.

    Returns:
        The number of changed attention layers; 0 for towers of other families.
    """
    layers: list[Any] = [module for module in model.modules() if "cu_seqlens" in signature(module.forward).parameters]
    layers = [layer for layer in layers if hasattr(layer, "qkv") and hasattr(layer, "config")]
    for layer in layers:
        if _merge_bounds not in layer._forward_pre_hooks.values():  # hooked by another trainer with this model
            layer.register_forward_pre_hook(_merge_bounds, with_kwargs=True)
    if layers:
        keep_keys_unrepeated()
    return len(layers)


def plan_windows(lengths: list[int], device: torch.device) -> tuple[dict[int, torch.Tensor], torch.Tensor | None]:
    """Return the positions of consecutive windows among all patches.

    Args:
        lengths: number of patches of each window, S in all.
        device: of the positions.

    Returns:
        Length of a window -> indices of the patches in windows of this length, (windows * length,).
        (S,) index of each patch in the concatenation of these; None: all windows have one length.
    """
    places: defaultdict[int, list[int]] = defaultdict(list)
    for length, end in zip(lengths, accumulate(lengths), strict=True):
        places[length] += range(end - length, end)
    by_length = {length: on_device(patches, device) for length, patches in places.items()}
    return by_length, torch.cat([*by_length.values()]).argsort() if len(places) > 1 else None


_PLANS = WeakTensorKeyDictionary()  # cu_seqlens -> the arguments that take their place


def _merge_bounds(layer: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    """Merge cu_seqlens into a single segment, and pass the windows on to `sdpa_by_key_head`."""
    bounds: Any = kwargs.get("cu_seqlens")
    is_ours = AttentionInterface._global_mapping.get("sdpa") is sdpa_by_key_head
    if bounds is None or len(bounds) < 3 or not is_ours or layer.config._attn_implementation != "sdpa":
        return None
    if bounds not in _PLANS:  # all layers of a pass have the same bounds
        lengths = bounds.diff().tolist()
        attend = partial(attend_windows, *plan_windows(lengths, bounds.device))
        whole = torch.tensor([0, sum(lengths)], dtype=bounds.dtype)
        _PLANS[bounds] = {"cu_seqlens": whole, "attend_within": attend}
    return args, kwargs | _PLANS[bounds]


def attend_windows(
    by_length: Mapping[int, torch.Tensor],
    back: torch.Tensor | None,
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout: float,
    scaling: float | None,
) -> torch.Tensor:
    """Compute attention within windows, with a call for each length of windows.

    Args:
        by_length, back: positions of the windows, of `plan_windows`.
        module: attention layer.
        query: (1, H, S, D).
        key: (1, H, S, D).
        value: (1, H, S, D).
        dropout: probability.
        scaling: of the scores; None: 1 / sqrt(D).

    Returns:
        (1, S, H, D).
    """
    outputs = []
    for length, patches in by_length.items():
        chosen = (each[0] if back is None else each[0].index_select(1, patches) for each in (query, key, value))
        queries, keys, values = (each.unflatten(1, (-1, length)).transpose(0, 1) for each in chosen)  # (windows, H, …)
        output, _ = sdpa_attention_forward(module, queries, keys, values, None, dropout, scaling, is_causal=False)
        outputs.append(output.flatten(0, 1))  # (patches, H, D)
    found = outputs[0] if back is None else torch.cat(outputs).index_select(0, back)
    return found.unsqueeze(0)
