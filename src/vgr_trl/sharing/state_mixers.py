"""Token mixers that carry a state through a row: linear attention and convolutions, as in Qwen3.5, Qwen3-Next and LFM2.

The module runs twice within its layer, over all prompts and then over all completions, which begin with the state of
their prompt. Nothing else of the layer is split.
"""

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.cache_utils import Cache, DynamicCache, LinearAttentionCacheLayerMixin
from transformers.modeling_layers import GradientCheckpointingLayer

from vgr_trl.sharing.row import ROW, Row

KINDS = ("linear_attention", "conv")  # as configurations call such layers
_CACHE_NAMES = ("cache_params", "cache", "past_key_values")
_split: set[type[nn.Module]] = set()


def split_state_mixers(base: Any) -> None:
    """Let the state mixers of a model read the layout of a row, for the whole process: checkpoints recompute later."""
    kinds = getattr(base.config.get_text_config(decoder=True), "layer_types", None) or ()
    if not {*KINDS}.intersection(kinds):
        return
    layers: list[Any] = DynamicCache(config=base.config).layers
    for module in base.modules():
        number = getattr(module, "layer_idx", None)
        if not isinstance(number, int) or isinstance(module, GradientCheckpointingLayer) or type(module) in _split:
            continue
        names = [name for name in _CACHE_NAMES if name in signature(module.forward).parameters]
        if names and kinds[number] in KINDS:
            kind: Any = type(module)
            kind.forward = _split_by_row(kind.forward, names[0], layers[number].number_of_states)
            _split.add(kind)


def _split_by_row(plain: Callable[..., Tensor], cache: str, number_of_states: int) -> Callable[..., Tensor]:
    @wraps(plain)
    def forward(module: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        row: Row | None = kwargs.pop(ROW, None)
        if row is None:
            return plain(module, hidden_states, *args, **kwargs)
        row.read_by.add(module.layer_idx)

        def run(places: Tensor, mask: Tensor | None, state: Any) -> Tensor:
            states = Cache(layers=[state] * (module.layer_idx + 1))  # which finds it by the number of the layer
            return plain(module, hidden_states[0, places], **{cache: states, "attention_mask": mask}).flatten(0, 1)

        stored, (places, mask, back) = _StoredState(number_of_states), row.left_padded
        before = run(places, mask, stored)[back]
        behind = run(row.own_places, None, _ExpandedState(stored, row.group_index))
        return torch.cat([before, behind[row.back[row.first :] - row.prompt_places.numel()]]).unsqueeze(0)

    return forward


class _State(LinearAttentionCacheLayerMixin):
    def __init__(self, number_of_states: int) -> None:
        super().__init__(number_of_states)
        self.record_past = True  # a pass over one token must not write states in place

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the states are given."""


class _StoredState(_State):
    """Convolution and recurrent states after the prompts."""

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **kwargs: Any
    ) -> Tensor:
        kernel = conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size
        full = pad(conv_states, (max(kernel - conv_states.shape[-1], 0), 0))
        self.conv_states[state_idx] = full[..., -kernel:]  # (U, D, kernel)
        return full

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        self.recurrent_states[state_idx] = recurrent_states  # (U, H, D, D)
        return recurrent_states


class _ExpandedState(_State):
    """The states of each completion's prompt; read-only."""

    def __init__(self, stored: _StoredState, index: Tensor) -> None:
        super().__init__(stored.number_of_states)
        for own, states in ((self.conv_states, stored.conv_states), (self.recurrent_states, stored.recurrent_states)):
            own |= {number: None if state is None else state.index_select(0, index) for number, state in states.items()}
        self.has_previous_state = dict.fromkeys(self.conv_states, True)

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        before: Any = self.conv_states[state_idx]
        return torch.cat([before, conv_states], dim=-1)

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        return recurrent_states
