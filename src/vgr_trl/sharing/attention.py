"""Attention over the row of a pass, and the attention functions that models look up in transformers.

`read_rows` lets every attention function of the process read the layout among its keyword arguments, which a gradient
checkpoint keeps: prompts attend to themselves, completions to their prompts and to themselves. Mixers that carry a
state (linear attention, convolutions) are split inside their layer.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache, partial, wraps
from inspect import signature
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.cache_utils import Cache, DynamicCache, LinearAttentionCacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import AttentionInterface

from vgr_trl.patching import patched_attribute
from vgr_trl.sharing.model_support import indexed_modules, layer_types
from vgr_trl.sharing.row import ROW, Bounds, PackedRow, Visibility

_OF_PACKED_ROWS = ("position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def wrap_attention(call: Callable[..., Any]) -> AbstractContextManager[None]:
    """Route every attention call in this block through `call`, which gets the function and its arguments.

    Eager and overridden functions are included.
    """
    read_rows()
    look_up = AttentionInterface.get_interface

    def get_interface(interface: Any, name: str, default: Callable[..., Any]) -> Callable[..., Any]:
        return partial(call, look_up(interface, name, default))

    return patched_attribute(AttentionInterface, "get_interface", get_interface)


@cache
def read_rows() -> None:
    """Let all attention functions of this process read row layouts, because checkpoints recompute behind any block."""
    look_up = AttentionInterface.get_interface

    def get_interface(interface: Any, name: str, default: Callable[..., Any]) -> Callable[..., Any]:
        attend = look_up(interface, name, default)
        return attend if torch.compiler.is_compiling() else partial(attend_row, attend)

    AttentionInterface.get_interface = get_interface  # type: ignore[method-assign, assignment]


def attend_row(
    attend: Callable[..., Any], module: Any, query: Tensor, key: Tensor, value: Tensor, *mask: Any, **options: Any
) -> Any:
    """Compute the attention of a row by an attention function of transformers; other calls are its own.

    Args:
        attend: the function.
        module: attention layer.
        query: (1, H, L, D).
        key: (1, key heads, L, D).
        value: (1, key heads, L, D).
        mask: mask of the model, which a row does not need.
        options: further arguments of the function, and the layout.

    Returns:
        (1, L, H, D), and the function's second result for calls without a layout.
    """
    row: PackedRow | None = options.pop(ROW, None)
    if row is None or not isinstance(getattr(module, "layer_idx", None), int):  # such as layers of a vision tower
        return attend(module, query, key, value, *mask, **options)
    row.read_by.add(module.layer_idx)
    options = {name: option for name, option in options.items() if name not in ("attention_mask", *_OF_PACKED_ROWS)}
    if getattr(module, "attn_temperature_tuning", False) and not module.use_rope:
        query = query * _scale_by_position(module, row)
    seen = visibility(module, row, options.get("sliding_window"))
    if "flash" in module.config._attn_implementation:
        return _attend_packed(attend, module, query, key, value, row, options), None
    if attend is sdpa_by_key_head:
        is_plain = not options.get("dropout") and all(
            options.get(name) is None for name in ("softcap", "position_bias")
        )
        if is_plain and can_merge(query, seen):
            return attend_merged(query, key, value, row, options.get("scaling")), None
        attend = attend_by_sdpa if is_plain else attend
    return _attend_padded(attend, module, query, key, value, row, seen, options), None


def _scale_by_position(module: Any, row: PackedRow) -> Any:
    """Correct Llama 4's query scale, computed from places in the row, to positions; return factors (L, 1)."""

    def scale(position: Tensor) -> Any:
        return torch.log1p(((position + 1.0) / module.floor_scale).floor()) * module.attn_scale + 1.0

    place = torch.arange(len(row.tokens), device=row.device)
    return (scale(row.tokens % row.shape[1]) / scale(place)).unsqueeze(1)


def visibility(module: Any, row: PackedRow, window: int | None) -> Visibility:
    """Return which tokens of a row an attention layer sees.

    Args:
        module: attention layer.
        row: layout.
        window: window that the layer passes to its attention function; None: no window.
    """
    config = module.config
    kinds, chunk = layer_types(config), None
    if kinds:
        kind = kinds[module.layer_idx]
        window = config.sliding_window if kind == "sliding_attention" else None
        chunk = config.attention_chunk_size if kind == "chunked_attention" else None
    # Images of Gemma 4 see themselves in layers with a window only.
    sees_images = row.images is not None and (config.model_type != "gemma4_text" or window is not None)
    window, chunk = (None if size is None or row.longest <= size else size for size in (window, chunk))
    return Visibility(window, chunk, sees_images)


def _attend_padded(
    attend: Callable[..., Any], module: Any, query: Tensor, key: Tensor, value: Tensor, row: PackedRow,
    seen: Visibility, options: dict[str, Any],
) -> Tensor:  # fmt: skip
    """Attend in two calls with masks: all prompts, padded, then all completions, padded."""
    prompts, completions = len(row.prompts), len(row.completions)
    places = (None if row.is_even else row.query_places, row.key_places, row.key_places)
    tokens = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]  # (L, heads, D)
    tokens = [tensor if at is None else tensor.index_select(0, at) for tensor, at in zip(tokens, places, strict=True)]
    first = prompts * max(row.prompts)
    of_prompts = (part[:first].unflatten(0, (prompts, -1)).transpose(1, 2) for part in tokens)  # (U, heads, P, D)
    behind = (part[first:].unflatten(0, (completions, -1)).transpose(1, 2) for part in tokens)  # (N, …, C or P + C, D)
    is_eager = module.config._attn_implementation == "eager"
    # Eager attention adds masks to its scores, also causal ones, which a chunk of the whole row asks for.
    masks: Any = row.masks(seen._replace(chunk=seen.chunk or row.longest) if is_eager else seen)
    if is_eager:
        least = torch.finfo(query.dtype).min
        masks = [torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, least) for mask in masks]
    parts = [
        attend(module, *inputs, mask, **options)[0].flatten(0, 1)  # (places, H, D)
        for inputs, mask in zip((of_prompts, behind), masks, strict=True)
    ]
    outputs: Tensor = torch.cat(parts)
    return (outputs if row.is_even else outputs.index_select(0, row.back)).unsqueeze(0)


def _attend_packed(
    attend: Callable[..., Any],
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    row: PackedRow,
    options: dict[str, Any],
) -> Tensor:
    """Attend in two calls of flash attention with variable lengths: all prompts, then all completions, unpadded."""
    before, behind = slice(row.num_prompt_tokens), slice(row.num_prompt_tokens, None)
    keys, values = (tensor.index_select(2, row.packed_keys) for tensor in (key, value))
    parts = [(tensor[:, :, before] for tensor in (query, key, value)), (query[:, :, behind], keys, values)]
    bounds = (row.prompt_bounds, row.own_bounds)
    outputs = [
        attend(module, *inputs, None, **options, **of_part._asdict())[0]
        for inputs, of_part in zip(parts, bounds, strict=True)
    ]
    return torch.cat(outputs, dim=1)


def attend_by_sdpa(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attend by `sdpa` without copying keys and values for every query head.

    With a mask transformers repeats them on a GPU, and the backward pass keeps the copies: 219 MB a layer for
    Qwen2.5-VL-7B, P 1400, T 512, G 8. There the queries of a key head read a view; on a CPU the kernel does.

    Args:
        module: attention layer.
        query: (B, H, Q, D).
        key: (B, key heads, K, D).
        value: (B, key heads, K, D).
        mask: (B, 1, Q, K) bool; None: each of Q = K queries sees all earlier keys.
        scaling: softmax scale, 1 / sqrt(D) by default.

    Returns:
        (B, Q, H, D), and no weights.
    """
    attend, groups = nn.functional.scaled_dot_product_attention, query.size(1) // key.size(1)
    if mask is None or groups == 1 or query.device.type == "cpu":
        causal = {"is_causal": True} if mask is None else {"attn_mask": mask}
        outputs = attend(query, key, value, scale=scaling, enable_gqa=groups > 1, **causal)
        return outputs.transpose(1, 2), None
    if torch.is_autocast_enabled(query.device.type):  # it would cast keys and values again for every query head
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    *rows, columns = mask.shape  # kernels would keep an aligned copy of the mask for each key head
    bias = query.new_zeros(*rows, columns + -columns % 8)[..., :columns].masked_fill_(~mask, -torch.inf)
    heads = []
    for queries, *one_head in zip(query.split(groups, 1), key.split(1, 1), value.split(1, 1), strict=True):
        keys, values = (tensor.expand(-1, groups, -1, -1) for tensor in one_head)
        heads.append(attend(queries, keys, values, attn_mask=bias, scale=scaling))
    return torch.cat(heads, 1).transpose(1, 2), None


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
    """Compute transformers' `sdpa`; for one new token, all queries of a key head share its keys without copies.

    Args:
        module: attention layer.
        query: (B, H, Q, D).
        key: (B, key heads, K, D).
        value: (B, key heads, K, D).
        attention_mask: (B, 1, Q, K).
        dropout: probability.
        scaling: softmax scale, 1 / sqrt(D) by default.
        attend_within: function that computes the attention instead, (B, Q, H, D); a hook of the module passes it.
    """
    if attend_within is not None:
        return attend_within(module, query, key, value, dropout, scaling), None
    groups = getattr(module, "num_key_value_groups", 1)
    plain = dropout == 0 and not any(kwargs.get(name) is not None for name in ("softcap", "position_bias", "cache"))
    if query.size(2) == 1 and plain and groups > 1 and attention_mask is not None and attention_mask.size(1) == 1:
        # transformers repeats keys and values for every query head, in compiled code or before 5.20.
        queries = query.reshape(len(query), key.size(1), -1, query.size(-1))  # (B, key heads, H / key heads, D)
        attend = nn.functional.scaled_dot_product_attention
        outputs = attend(queries, key, value, attn_mask=attention_mask, scale=scaling)
        return outputs.reshape(len(query), 1, query.size(1), -1), None
    return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)


def keep_keys_unrepeated() -> None:
    """Register `sdpa_by_key_head` as `sdpa` for the whole process."""
    if AttentionInterface._global_mapping.get("sdpa") is sdpa_attention_forward:
        AttentionInterface.register("sdpa", sdpa_by_key_head)


def prefers_cudnn() -> bool:
    """Whether `sdpa` tries cuDNN's kernel first: torch 2.11 and later, on Hopper and later GPUs."""
    if not torch.cuda.is_available() or not torch.backends.cuda.cudnn_sdp_enabled():
        return False
    return Version(torch.__version__).release >= (2, 11) and torch.cuda.get_device_capability()[0] >= 9


_HAS_VARIABLE_LENGTHS = Version(torch.__version__).release >= (2, 10)  # as `torch.nn.attention.varlen` calls the kernel
_WIDEST_HEAD = 256


def can_merge(query: Tensor, seen: Visibility) -> bool:
    """Whether the kernels take `query`, (1, H, L, D): 16 bits on a GPU, and each token sees all earlier tokens."""
    device = query.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else query.dtype
    fits = dtype in (torch.bfloat16, torch.float16) and query.size(-1) % 8 == 0 and query.size(-1) <= _WIDEST_HEAD
    return device == "cuda" and _HAS_VARIABLE_LENGTHS and fits and seen == Visibility()


def attend_merged(query: Tensor, key: Tensor, value: Tensor, row: PackedRow, scaling: float | None) -> Tensor:
    """Compute the attention of a row whose tokens see all earlier tokens, (1, L, H, D).

    Args:
        query: (1, H, L, D).
        key: (1, key heads, L, D).
        value: (1, key heads, L, D).
        row: layout, in which the completions of a prompt stand together.
        scaling: softmax scale, 1 / sqrt(D) by default.
    """
    device = query.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else query.dtype
    tokens = (tensor[0].transpose(0, 1).to(dtype) for tensor in (query, key, value))  # (L, heads, D)
    scaling = query.size(-1) ** -0.5 if scaling is None else scaling
    outputs: Tensor = _Merged.apply(*tokens, row, scaling)
    return outputs.unsqueeze(0)


class _Merged(torch.autograd.Function):
    """Three calls of the kernel: prompts, completions over their prompts, completions over themselves."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, row: PackedRow, scaling: float) -> Tensor:
        kernel, first = _Kernel(scaling), row.num_prompt_tokens
        (prompts, completions), (keys, new_keys), (values, new_values) = (
            (tensor[:first], tensor[first:]) for tensor in (query, key, value)
        )
        before, lse_before = kernel.forward(prompts, keys, values, row.prompt_bounds, causal=True)
        over, lse_over = kernel.forward(completions, keys, values, row.bounds_over_prompts, causal=False)
        itself, lse_itself = kernel.forward(completions, new_keys, new_values, row.bounds_over_themselves, causal=True)
        lse = torch.logaddexp(lse_over, lse_itself)  # (H, completions' tokens)
        share = (lse_over - lse).exp().T.unsqueeze(-1)  # (completions' tokens, H, 1)
        behind = torch.lerp(itself.to(lse.dtype), over.to(lse.dtype), share).to(query.dtype)
        outputs = torch.cat([before, behind])
        ctx.save_for_backward(query, key, value, outputs, lse_before, lse)
        ctx.row, ctx.kernel = row, kernel
        return outputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, outputs, lse_before, lse = ctx.saved_tensors
        row, kernel, first = ctx.row, ctx.kernel, ctx.row.num_prompt_tokens
        before, behind = slice(first), slice(first, None)
        grads = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)

        def run(queries: slice, keys: slice, lse: Tensor, bounds: Bounds, causal: bool) -> tuple[Tensor, ...]:
            of_queries = grad[queries].contiguous(), query[queries], key[keys], value[keys], outputs[queries], lse
            gradients: tuple[Tensor, ...] = kernel.backward(*of_queries, bounds, causal=causal)
            return gradients

        of_prompts = run(before, before, lse_before, row.prompt_bounds, True)
        over = run(behind, before, lse, row.bounds_over_prompts, False)
        itself = run(behind, behind, lse, row.bounds_over_themselves, True)
        grads[0][before] = of_prompts[0]
        torch.add(over[0], itself[0], out=grads[0][behind])
        for index in (1, 2):  # keys, values
            torch.add(of_prompts[index], over[index], out=grads[index][before])
            grads[index][behind] = itself[index]
        return (*grads, None, None)


class _Kernel:
    """PyTorch's flash attention with variable lengths, on a GPU."""

    def __init__(self, scaling: float) -> None:
        self.scaling = scaling

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, bounds: Bounds, *, causal: bool
    ) -> tuple[Tensor, Tensor]:
        """Return outputs (tokens, H, D) and logsumexp (H, tokens)."""
        attend = torch.ops.aten._flash_attention_forward
        outputs, lse, self.random, *_ = attend(query, key, value, *bounds, 0.0, causal, False, scale=self.scaling)
        return outputs, lse

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, outputs: Tensor, lse: Tensor, bounds: Bounds, *,
        causal: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Return the gradients of queries, keys and values."""
        unused = torch.empty(0, device=query.device)
        arguments = grad, query, key, value, outputs, lse.contiguous(), *bounds, 0.0, causal, self.random, unused
        grads: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(*arguments, scale=self.scaling)
        return grads


KINDS = ("linear_attention", "conv")  # names of such layers in configurations
_CACHE_NAMES = ("cache_params", "cache", "past_key_values")
_split: set[type[nn.Module]] = set()


def split_state_mixers(base: Any) -> None:
    """Let a model's state mixers read row layouts, for the whole process, because checkpoints recompute later."""
    kinds = layer_types(base.config)
    if not {*KINDS}.intersection(kinds):
        return
    layers: list[Any] = DynamicCache(config=base.config).layers
    for module in indexed_modules(base):
        if isinstance(module, GradientCheckpointingLayer) or type(module) in _split:
            continue
        names = [name for name in _CACHE_NAMES if name in signature(module.forward).parameters]
        if names and kinds[module.layer_idx] in KINDS:
            kind: Any = type(module)
            kind.forward = _split_by_row(kind.forward, names[0], layers[module.layer_idx].number_of_states)
            _split.add(kind)


def _split_by_row(plain: Callable[..., Tensor], cache: str, number_of_states: int) -> Callable[..., Tensor]:
    @wraps(plain)
    def forward(module: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        row: PackedRow | None = kwargs.pop(ROW, None)
        if row is None:
            return plain(module, hidden_states, *args, **kwargs)
        row.read_by.add(module.layer_idx)

        def run(places: Tensor, mask: Tensor | None, state: Any) -> Tensor:
            states = Cache(layers=[state] * (module.layer_idx + 1))  # the module finds its state by layer number
            return plain(module, hidden_states[0, places], **{cache: states, "attention_mask": mask}).flatten(0, 1)

        stored, (places, mask, back) = _StoredState(number_of_states), row.left_padded
        before = run(places, mask, stored)[back]
        behind = run(row.own_places, None, _ExpandedState(stored, row.group_index))
        return torch.cat([before, behind[row.back[row.num_prompt_tokens :] - row.prompt_places.numel()]]).unsqueeze(0)

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
    """Read-only states after each completion's prompt."""

    def __init__(self, stored: _StoredState, index: Tensor) -> None:
        super().__init__(stored.number_of_states)
        for copy, states in ((self.conv_states, stored.conv_states), (self.recurrent_states, stored.recurrent_states)):
            copy |= {key: None if state is None else state.index_select(0, index) for key, state in states.items()}
        self.has_previous_state = dict.fromkeys(self.conv_states, True)

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        before: Any = self.conv_states[state_idx]
        return torch.cat([before, conv_states], dim=-1)

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        return recurrent_states


def prepare_mixers(base: Any) -> None:
    """Let the token mixers of a base model read the layout of rows, for the whole process."""
    keep_keys_unrepeated()
    read_rows()
    split_state_mixers(base)
