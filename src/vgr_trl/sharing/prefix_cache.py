"""Keys, values and states of prompts: written once by the prompts, read by every completion, with gradients."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from vgr_trl.sharing.attention import mark_shared
from vgr_trl.sharing.report import require


class PromptsStored(Exception):
    """A pass over prompts has stored everything that completions read, and stops."""


class _Keys(CacheLayerMixin):
    """A layer that marks its keys as shared, for `sdpa_by_key_head`."""

    keys: Any
    values: Any

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the keys are given."""

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name in transformers 5.9

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0


class StoredKeys(_Keys):
    """Keys and values of the U unique prompts, stored at the first update; a recomputation changes nothing."""

    def __init__(self, is_sliding: bool) -> None:
        super().__init__()
        self.is_sliding = is_sliding
        self.written_with_grad = self.ends_pass = False

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.keys, self.values, self.is_initialized = key_states, value_states, True  # (U, H, P - 1, D)
            self.written_with_grad = torch.is_grad_enabled()
        if self.ends_pass:
            raise PromptsStored
        return mark_shared(key_states), value_states

    def length(self) -> int:
        return 0 if self.keys is None else self.keys.shape[-2]

    def holds(self, length: int) -> bool:
        return self.length() == length

    def is_in_graph(self) -> bool:
        return bool(self.keys.requires_grad or self.values.requires_grad)

    def get_seq_length(self) -> int:
        return 0  # nothing precedes a prompt, nor its recomputation


class ExpandedKeys(_Keys):
    """Stored keys and values, prepended to the keys and values of every row of a batch; read-only."""

    def __init__(self, stored: StoredKeys, index: Tensor) -> None:
        super().__init__()
        self.stored, self.index = stored, index  # index (N,): row -> unique prompt
        self.is_sliding, self.is_initialized, self.was_read = stored.is_sliding, True, False

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.was_read = True
        return mark_shared(self._behind(self.stored.keys, key_states)), self._behind(self.stored.values, value_states)

    def _behind(self, stored: Tensor, new: Tensor) -> Tensor:
        return torch.cat([stored.index_select(0, self.index), new], dim=-2)

    def get_seq_length(self) -> int:
        return self.stored.length()


class PackedKeys(ExpandedKeys):
    """Stored keys and values of U prompts of P - 1 tokens, prepended to packed completions; read-only.

    The index (K,) gathers keys from the concatenation of U * (P - 1) keys of prompts and Q keys of completions.
    """

    def _behind(self, stored: Tensor, new: Tensor) -> Tensor:
        every = torch.cat([stored.transpose(1, 2).flatten(0, 1), new[0].transpose(0, 1)])  # (U * (P - 1) + Q, H, D)
        return every.index_select(0, self.index).transpose(0, 1).unsqueeze(0)  # (1, H, K, D)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return len(self.index), 0


class _State(LinearAttentionCacheLayerMixin):
    is_compileable = False

    def __init__(self, number_of_states: int) -> None:
        super().__init__(number_of_states)
        self.record_past = True  # a pass over one token must not write states in place

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the keys are given."""


class StoredState(_State):
    """Convolution and recurrent states after the unique prompts, stored at the first update."""

    def __init__(self, number_of_states: int, is_recurrent: bool) -> None:
        super().__init__(number_of_states)
        self.is_recurrent = is_recurrent  # a convolution alone has no recurrent state
        self.written_with_grad = True

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **kwargs: Any
    ) -> Tensor:
        kernel = conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size
        full = torch.nn.functional.pad(conv_states, (max(kernel - conv_states.shape[-1], 0), 0))
        self._store(self.conv_states, state_idx, full[..., -kernel:])  # (U, D, kernel)
        return full

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        self._store(self.recurrent_states, state_idx, recurrent_states)  # (U, H, D, D)
        return recurrent_states

    def _store(self, states: dict[int, Any], state_idx: int, new: Tensor) -> None:
        if states[state_idx] is None:
            states[state_idx] = new
            self.written_with_grad &= torch.is_grad_enabled()

    def _states(self) -> list[Any]:
        return [*self.conv_states.values(), *(self.recurrent_states.values() if self.is_recurrent else ())]

    def holds(self, length: int) -> bool:
        return all(state is not None for state in self._states())

    def is_in_graph(self) -> bool:
        return any(state.requires_grad for state in self._states())


class _Expanded(dict[int, Any]):
    """States by number, each expanded to the rows of the batch when it is read."""

    def __init__(self, states: dict[int, Any], index: Tensor) -> None:
        super().__init__(states)
        self.index = index

    def __getitem__(self, state_idx: int) -> Tensor:
        expanded: Tensor = super().__getitem__(state_idx).index_select(0, self.index)
        return expanded


class ExpandedState(_State):
    """Stored states, expanded to every row of a batch; read-only."""

    def __init__(self, stored: StoredState, index: Tensor) -> None:
        super().__init__(stored.number_of_states)
        self.conv_states: dict[int, Any] = _Expanded(stored.conv_states, index)
        self.recurrent_states = _Expanded(stored.recurrent_states, index)
        self.has_previous_state = dict.fromkeys(range(stored.number_of_states), True)
        self.was_read = False

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        self.was_read = True
        return torch.cat([self.conv_states[state_idx], conv_states], dim=-1)

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        return recurrent_states


def is_stateless_layer(layer: Any) -> bool:
    """Whether a cache layer reads the keys and values of another layer; older releases have none of them."""
    return type(layer).__name__ == "DummyLayer"


class WrittenPrefix(Cache):
    """A cache that a forward pass over the unique prompts fills.

    Args:
        config: of the model.
        groups: (N,) row of the batch -> number of its prompt.
    """

    layers: list[Any]

    def __init__(self, config: PretrainedConfig, groups: Sequence[int]) -> None:
        layers = DynamicCache(config=config).layers
        kinds = layer_types(config) or [""] * len(layers)
        super().__init__(layers=[_make_layer(layer, kind) for layer, kind in zip(layers, kinds, strict=False)])
        self.groups = list(groups)

    def check(self, length: int, hidden: Tensor | None) -> None:
        """Raise `UnsupportedModel` unless every layer holds the whole prompt, and its graph if gradients are on.

        Args:
            length: number of positions of the prompt.
            hidden: (U, P - 1, D) last hidden states; None: the pass stopped at the last layer's keys and values.
        """
        layers = [layer for layer in self.layers if not is_stateless_layer(layer)]
        require(all(layer.holds(length) for layer in layers), "the model did not keep the whole prompt in its cache")
        if not torch.is_grad_enabled():
            return
        # Every layer behind the first trained weight is in the graph, unless the model has cut it off.
        trained = hidden is None or hidden.requires_grad
        in_graph = [*(layer.is_in_graph() for layer in layers), trained]
        with_gradients = all(layer.written_with_grad for layer in layers) and in_graph == sorted(in_graph)
        require(with_gradients, "the model kept the prompt without its gradients")
        require(any(in_graph[:-1]) or not trained, "only weights behind the last cache are trained")


def layer_types(config: Any) -> list[str]:
    """Return the type of each layer of a language model; empty where its config names none."""
    return list(getattr(config.get_text_config(decoder=True), "layer_types", None) or ())


def _make_layer(layer: Any, kind: str) -> Any:
    if is_stateless_layer(layer):
        return layer
    if isinstance(layer, LinearAttentionLayer):
        return StoredState(layer.number_of_states, is_recurrent=kind != "conv")
    return StoredKeys(layer.is_sliding)


class ReadPrefix(Cache):
    """A written prefix for rows of a batch.

    Args:
        written: cache of the unique prompts.
        index: (B,) int64, number of the prompt of each row.
        rows: (B,) number of each row in the batch.
    """

    layers: list[Any]

    def __init__(self, written: WrittenPrefix, index: Tensor, rows: Sequence[int]) -> None:
        kinds: dict[type, Any] = {StoredKeys: ExpandedKeys, StoredState: ExpandedState}  # other layers store nothing
        layers = [kinds[type(layer)](layer, index) if type(layer) in kinds else layer for layer in written.layers]
        super().__init__(layers=layers)
        self.rows = list(rows)

    def check(self) -> None:
        """Raise `UnsupportedModel` unless every layer has read its prefix."""
        was_read = all(is_stateless_layer(layer) or layer.was_read for layer in self.layers)
        require(was_read, "the model did not read the prompt from its cache")
