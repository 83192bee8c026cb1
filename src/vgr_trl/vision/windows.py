"""Attend within all windows of a vision tower in one call.

transformers' towers of the Qwen-VL kind call `sdpa` for each window of 64 patches, 80 times a layer for an image of
1,280 tokens, and wait for the device three times a layer to learn the lengths of the windows.
"""

from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from inspect import signature
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import AttentionInterface

from vgr_trl.pixels import (
    on_device,
)
from vgr_trl.sharing.attention import keep_keys_unrepeated, sdpa_by_key_head


def join_windows(model: nn.Module) -> int:
    """Let the attention of vision towers, where it is `sdpa`, take all windows at once from here on.

    Returns:
        The number of attention layers that do; 0 for towers of other families.
    """
    layers: list[Any] = [module for module in model.modules() if "cu_seqlens" in signature(module.forward).parameters]
    layers = [layer for layer in layers if hasattr(layer, "qkv") and hasattr(layer, "config")]
    for layer in layers:
        if not hasattr(layer, "attend_within"):  # of another trainer with this model
            layer.register_forward_pre_hook(_give_whole, with_kwargs=True)
            layer.attend_within = None
    if layers:
        keep_keys_unrepeated()
    return len(layers)


@dataclass(frozen=True)
class Windows:
    """Where the windows of all patches lie.

    Attributes:
        patches: S, of all windows.
        by_length: length -> (number of windows * length,) the patches of its windows.
        back: (S,) where each patch stands behind the windows of all lengths; None: all are of one length, in order.
    """

    patches: int
    by_length: dict[int, torch.Tensor]
    back: torch.Tensor | None


def plan_windows(lengths: list[int], device: torch.device) -> Windows:
    """Return where windows of these lengths lie, one behind the other."""
    places: defaultdict[int, list[int]] = defaultdict(list)
    for length, end in zip(lengths, accumulate(lengths), strict=True):
        places[length] += range(end - length, end)
    by_length = {length: on_device(patches, device) for length, patches in places.items()}
    back = torch.cat([*by_length.values()]).argsort() if len(places) > 1 else None
    return Windows(sum(lengths), by_length, back)


def _give_whole(layer: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    """Replace the bounds of the windows by those of all patches, and leave the windows for the attention function."""
    layer.attend_within = None
    bounds: Any = kwargs.get("cu_seqlens")
    ours = AttentionInterface._global_mapping.get("sdpa") is sdpa_by_key_head
    if bounds is None or len(bounds) < 3 or not ours or layer.config._attn_implementation != "sdpa":
        return None
    if not hasattr(bounds, "windows"):  # one tensor for all layers of a pass
        bounds.windows = plan_windows(bounds.diff().tolist(), bounds.device)
    layer.attend_within = partial(attend_windows, bounds.windows)
    return args, kwargs | {"cu_seqlens": torch.tensor([0, bounds.windows.patches], dtype=bounds.dtype)}


def attend_windows(
    windows: Windows,
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout: float,
    scaling: float | None,
) -> torch.Tensor:
    """Return attention within windows, (1, S, H, D), in one call for all windows of a length.

    Args:
        query, key, value: (1, H, S, D).
    """
    outputs = []
    for length, patches in windows.by_length.items():
        chosen = (each[0] if windows.back is None else each[0].index_select(1, patches) for each in (query, key, value))
        queries, keys, values = (each.unflatten(1, (-1, length)).transpose(0, 1) for each in chosen)  # (windows, H, …)
        output, _ = sdpa_attention_forward(module, queries, keys, values, None, dropout, scaling, is_causal=False)
        outputs.append(output.flatten(0, 1))  # (patches, H, D)
    found = outputs[0] if windows.back is None else torch.cat(outputs).index_select(0, windows.back)
    return found.unsqueeze(0)
