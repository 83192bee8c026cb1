"""The parts of a possibly wrapped model at which prompts are shared."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from threading import get_ident
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.modules.dropout import _DropoutNd
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import AttentionInterface

from vgr_trl.errors import ConfigError
from vgr_trl.replacing import replaced

# Attributes by which layers of transformers hold the rate of a dropout, or the width of the noise of a router.
_RATES = (
    *("attention_dropout", "dropout", "activation_dropout", "hidden_dropout", "residual_dropout", "resid_pdrop"),
    *("attn_dropout", "drop_prob", "layerdrop"),
    *("jitter_noise", "router_jitter_noise", "input_jitter_noise", "moe_jitter_eps"),
)


def causal_model(model: nn.Module) -> Any:
    """The transformers model inside wrappers of DDP, DeepSpeed, PEFT and `torch.compile`.

    Raises:
        ConfigError: there is none.
    """
    inside: Any = model
    while not isinstance(inside, PreTrainedModel):
        if hasattr(inside, "_orig_mod"):
            inside = inside._orig_mod
        elif hasattr(inside, "get_base_model"):
            inside = inside.get_base_model()
        elif isinstance(getattr(inside, "module", None), nn.Module):
            inside = inside.module
        else:
            raise ConfigError(f"Prompts cannot be shared in a {type(model).__name__}: give a transformers model.")
    return inside


def base_of(causal: Any) -> Any:
    """The model below the head of a transformers model: its base, or its decoder if it is its own base (Llama 4)."""
    base = causal.base_model
    if base is not causal:
        return base
    decoder = getattr(causal.get_decoder(), "model", None)
    return decoder if isinstance(decoder, PreTrainedModel) else base


@contextmanager
def changed_hidden_states(base: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Let a base model return other last hidden states in this block, to this thread."""
    plain, mine = base.forward, get_ident()

    @wraps(plain)
    def forward(*args: Any, **kwargs: Any) -> Any:
        outputs = plain(*args, **kwargs)
        if get_ident() == mine:
            outputs.last_hidden_state = change(outputs.last_hidden_state)
        return outputs

    with replaced(base, "forward", forward):
        yield


def layer_index(module: nn.Module) -> int | None:
    """Return the number of the decoder layer that an attention module belongs to; None for vision towers."""
    index = getattr(module, "layer_idx", None)
    return index if isinstance(index, int) else None


def is_attention(module: nn.Module) -> bool:
    """Whether a module is an attention layer of a language model."""
    return layer_index(module) is not None and hasattr(module, "is_causal")


def is_compiled(model: nn.Module) -> bool:
    """Whether `torch.compile` has been applied to the model or to a module of it."""
    return any(
        hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
        for module in model.modules()
    )


def recomputes_without_graph(model: nn.Module, *, when_training: bool = False) -> bool:
    """Whether a gradient checkpoint of the model runs its layers without gradients first (`use_reentrant`).

    `when_training` asks for the model in training mode, whatever its mode is now.
    """
    for module in model.modules():
        if (when_training or module.training) and getattr(module, "gradient_checkpointing", False):
            function = getattr(module, "_gradient_checkpointing_func", None)
            if function is not None and getattr(function, "keywords", {}).get("use_reentrant", True):
                return True
    return False


DROPS_CACHES = "gradient checkpointing by a transformers whose layers then drop caches (5.23 keeps them)"


def checkpoints_drop_caches() -> bool:
    """Whether checkpointed layers ignore the cache they are given, as those of transformers 5.9 and 5.10 do."""
    return not hasattr(GradientCheckpointingLayer, "_can_checkpoint_with_cache")


def is_checkpointed(model: nn.Module) -> bool:
    """Whether layers of a model that trains are computed again in the backward pass."""
    return any(module.training and getattr(module, "gradient_checkpointing", False) for module in model.modules())


def has_active_dropout(model: nn.Module, *, when_training: bool = False) -> bool:
    """Whether dropout, or noise in the router of experts, is at work: completions then share it over their prompt.

    `when_training` asks for the model in training mode, whatever its mode is now.
    """
    return any((when_training or module.training) and _draws(module) for module in model.modules())


def _draws(module: nn.Module) -> bool:
    rates = (getattr(module, name, None) for name in _RATES)
    draws = any(isinstance(rate, int | float) and rate > 0 for rate in rates)
    return draws or (isinstance(module, _DropoutNd) and module.p > 0)


def shards_layers(model: nn.Module) -> bool:
    """Whether FSDP2 gathers the weights of a layer for its backward pass when a gradient reaches the layer's output."""
    if not distributed.is_available():
        return False
    from torch.distributed.fsdp import FSDPModule

    return any(isinstance(module, FSDPModule) for module in model.modules())


def flattens_layers(model: nn.Module) -> bool:
    """Whether parts of the model are wrapped by the first version of FSDP."""
    if not distributed.is_available():
        return False
    from torch.distributed.fsdp import FullyShardedDataParallel

    return any(isinstance(module, FullyShardedDataParallel) for module in model.modules())


def has_sharded_parameters(model: nn.Module) -> bool:
    """Whether this process has parts of parameters only: FSDP, or ZeRO-3."""
    partitioned = (hasattr(value, "ds_numel") and value.numel() != value.ds_numel for value in model.parameters())
    return shards_layers(model) or flattens_layers(model) or any(partitioned)


def is_tracing() -> bool:
    """Whether this call is being traced by `torch.compile` or exported."""
    return torch.compiler.is_compiling()


@contextmanager
def attention_wrapped(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Wrap what models get when they look up their attention function, eager ones and local overrides included."""
    look_up = AttentionInterface.get_interface

    def get_interface(interface: Any, name: str, default: Callable[..., Any]) -> Callable[..., Any]:
        return wrap(look_up(interface, name, default))

    with replaced(AttentionInterface, "get_interface", get_interface):
        yield
