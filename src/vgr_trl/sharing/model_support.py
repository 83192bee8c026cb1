"""Models that can share prompts, the reasons why others cannot, and the parts of a model."""

from collections.abc import Callable, Mapping
from functools import partial
from inspect import signature
from typing import Any

from accelerate.state import AcceleratorState, DistributedType, is_initialized
from peft import PeftMixedModel, PeftModel
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer
from transformers.modeling_layers import GradientCheckpointingLayer

from vgr_trl.errors import ConfigError
from vgr_trl.sharing.prefix_cache import is_stateless_layer, layer_types
from vgr_trl.sharing.report import require

# Attributes of transformers' layers that hold a dropout rate, or the width of a router's noise.
_RATES = (
    *("attention_dropout", "dropout", "activation_dropout", "hidden_dropout", "residual_dropout", "resid_pdrop"),
    *("attn_dropout", "drop_prob", "layerdrop"),
    *("jitter_noise", "router_jitter_noise", "input_jitter_noise", "moe_jitter_eps"),
)


def causal_model(model: nn.Module) -> Any:
    """Return the transformers model inside wrappers of DDP, DeepSpeed, PEFT and `torch.compile`.

    Raises:
        ConfigError: the wrappers contain no transformers model.
    """
    inside: Any = model
    while not isinstance(inside, PreTrainedModel):
        is_peft = isinstance(inside, PeftModel | PeftMixedModel)
        inside = inside.get_base_model() if is_peft else getattr(inside, "_orig_mod", getattr(inside, "module", None))
        if not isinstance(inside, nn.Module):
            raise ConfigError(f"Prompts cannot be shared in a {type(model).__name__}: give a transformers model.")
    return inside


def base_of(causal: Any) -> Any:
    """Return the model below the head of a transformers model: its base, or the decoder where it is its own base."""
    base = causal.base_model
    if base is not causal:
        return base
    decoder = getattr(causal.get_decoder(), "model", None)
    return decoder if isinstance(decoder, PreTrainedModel) else base


def replace_hidden_states(base: nn.Module, change: Callable[[Tensor], Tensor]) -> RemovableHandle:
    """Change the last hidden states that a base model returns, until the handle is removed."""

    def replace_states(module: nn.Module, args: Any, outputs: Any) -> None:
        outputs.last_hidden_state = change(outputs.last_hidden_state)

    return base.register_forward_hook(replace_states)


def indexed_modules(model: nn.Module) -> list[Any]:
    """Return the modules of a language model that know the number of their layer, as attention does."""
    return [module for module in model.modules() if isinstance(getattr(module, "layer_idx", None), int)]


def attention_modules(model: nn.Module) -> list[Any]:
    """Return the attention layers of a language model."""
    return [module for module in indexed_modules(model) if hasattr(module, "is_causal")]


def is_compiled(model: nn.Module) -> bool:
    """Whether `torch.compile` has been applied to the model or to any of its modules."""
    return any(hasattr(each, "_orig_mod") or getattr(each, "_compiled_call_impl", None) for each in model.modules())


def checkpointed_modules(model: nn.Module, *, when_training: bool = False) -> list[nn.Module]:
    """Return the layers of a model in training mode that are recomputed in the backward pass.

    Args:
        model: any model.
        when_training: treat the model as in training mode, whatever its mode is.
    """
    parts = (module for module in model.modules() if when_training or module.training)
    return [module for module in parts if getattr(module, "gradient_checkpointing", False)]


def recomputes_without_graph(model: nn.Module, *, when_training: bool = False) -> bool:
    """Whether a gradient checkpoint of the model runs its layers without gradients first (`use_reentrant`).

    Args:
        model: any model.
        when_training: treat the model as in training mode, whatever its mode is.
    """
    return any(is_reentrant(module) for module in checkpointed_modules(model, when_training=when_training))


def is_reentrant(module: Any) -> bool:
    """Whether a module's gradient checkpoint runs its layers without gradients first."""
    function = getattr(module, "_gradient_checkpointing_func", None)
    if not isinstance(function, partial) or function.func is not checkpoint:
        return False
    return bool(function.keywords.get("use_reentrant", True))


NEEDS_REENTRANT = (
    "frozen weights under ZeRO-3, which this DeepSpeed releases during a recompute: install deepspeed>=0.19.3"
)


def releases_during_recompute() -> bool:
    """Whether the installed DeepSpeed needs `use_reentrant` for frozen weights under ZeRO-3 (DeepSpeed#8148)."""
    from deepspeed.runtime.zero import partitioned_param_coordinator  # which only its users have

    return not hasattr(partitioned_param_coordinator, "update_recompute_parameters")


def why_reentrant(base: nn.Module, sharded_by_deepspeed: bool) -> str | None:
    """Return why checkpoints have to be reentrant, so that training shares no prompts; None: they need not."""
    frozen = any(not parameter.requires_grad for parameter in base.parameters())
    return NEEDS_REENTRANT if sharded_by_deepspeed and frozen and releases_during_recompute() else None


DROPS_CACHES = "gradient checkpointing by a transformers whose layers then drop caches (5.23 keeps them)"


def checkpoints_drop_caches() -> bool:
    """Whether checkpointed layers drop their cache, as in transformers 5.9 and 5.10."""
    return not hasattr(GradientCheckpointingLayer, "_can_checkpoint_with_cache")


def has_active_dropout(model: nn.Module, *, when_training: bool = False) -> bool:
    """Whether dropout or router noise is active: completions then share the random numbers of their prompt.

    Args:
        model: any model.
        when_training: treat the model as in training mode, whatever its mode is.
    """
    for module in model.modules():
        rates = [getattr(module, name, None) for name in _RATES]
        rates.append(module.p if isinstance(module, _DropoutNd) else None)
        if (when_training or module.training) and any(isinstance(rate, int | float) and rate > 0 for rate in rates):
            return True
    return False


def distributed_type() -> DistributedType | None:
    """Return how accelerate distributes this run; None: accelerate is not in use."""
    return AcceleratorState().distributed_type if is_initialized() else None


def shards_layers(model: nn.Module) -> bool:
    """Whether FSDP2 shards the model: it gathers a layer's weights when a gradient reaches the layer's output."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def flattens_layers(model: nn.Module) -> bool:
    """Whether the first version of FSDP wraps parts of the model."""
    return any(isinstance(module, FullyShardedDataParallel) for module in model.modules())


def has_sharded_parameters(model: nn.Module) -> bool:
    """Whether this process holds shards of the parameters only, under FSDP or ZeRO-3."""
    return shards_layers(model) or flattens_layers(model) or is_partitioned(model)


def is_partitioned(model: nn.Module) -> bool:
    """Whether this process holds shards of the parameters only, under ZeRO-3."""
    return any(hasattr(value, "ds_numel") and value.numel() != value.ds_numel for value in model.parameters())


_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention", "linear_attention", "conv"}
# Families whose layers read the keys and values of another layer from the pass, not from the cache.
_KEY_SHARING_FAMILIES = {"gemma3n_text", "gemma4_text"}
# Families that limit bidirectional attention to the tokens of an image.
_IMAGES_SEE_THEMSELVES = {("gemma4_text", "vision")}
# Families whose token types only mark image tokens; in others a whole prompt may attend to itself (PaliGemma).
_TOKEN_TYPES_MARK_IMAGES = ("gemma3",)
# Rotary embeddings whose angles depend on the longest position of a pass.
_ROPE_BY_LENGTH = {"dynamic", "longrope"}


def why_no_pass_shares(model: nn.Module) -> str | None:
    """Return why no pass of a model shares prompts; None: it depends on the pass."""
    if is_compiled(model):
        return "torch.compile"
    if len(set(getattr(causal_model(model), "hf_device_map", {}).values())) > 1:
        return "a model spread over several devices"
    return why_adapter_reads_whole_rows(model)


def why_adapter_reads_whole_rows(model: nn.Module) -> str | None:
    """Return why the results of PEFT's active adapter depend on the rows and columns of a batch; None: they do not."""
    for module in model.modules():
        if isinstance(module, PeftModel):
            config = module.active_peft_config
            if config.is_prompt_learning:
                return "prompt learning, whose virtual tokens precede the padding"
            if getattr(config, "alora_invocation_tokens", None):
                return "aLoRA, which searches whole rows for the tokens at which it begins"
    return None


# Of the argument for the cache: the second until transformers 5.24, the third in single layers of some families.
_CACHE_NAMES = ("cache", "past_key_values", "layer_past")


def cache_name(base: Any) -> str | None:
    """Return the name of a base model's argument for the cache; None: it has none."""
    names = signature(base.forward).parameters
    return next((name for name in _CACHE_NAMES if name in names), None)


def cache_of(inputs: Mapping[str, Any]) -> Any:
    """Return the cache among the inputs of a call, under any of its names; None: there is none."""
    return next((inputs[name] for name in _CACHE_NAMES if inputs.get(name) is not None), None)


def check_model(base: Any, gradients: bool) -> None:
    """Raise `UnsupportedModel` if a base model, in its present state, cannot continue a cached prompt.

    Args:
        base: base model (without head) of a transformers model.
        gradients: whether the pass has gradients.
    """
    if gradients:
        why = why_reentrant(base, is_partitioned(base)) if recomputes_without_graph(base) else None
        require(why is None, str(why))
        require(not (checkpoints_drop_caches() and checkpointed_modules(base)), DROPS_CACHES)
        require(not flattens_layers(base), "the first version of FSDP")
    config = base.config
    keeps = cache_name(base) is not None and not config.is_encoder_decoder
    require(keeps, "a model without a cache of keys and values")
    hooks = (getattr(hook, "keywords", ()) for module in base.modules() for hook in module._forward_pre_hooks.values())
    require(not any("adapter_names" in keywords for keywords in hooks), "adapter_names, an adapter for each row")
    # Ovis2: its visual indicator tokens are text in a pass without images.
    by_pass = getattr(config, "visual_indicator_token_ids", None)
    require(not by_pass, "tokens whose embeddings depend on whether the pass has images")
    check_rope(config)
    text = config.get_text_config(decoder=True)
    layers = DynamicCache(config=config).layers
    unknown = set(layer_types(config)) - _LAYER_TYPES
    unknown = unknown or {type(layer).__name__ for layer in layers if not _is_shareable(layer)}
    require(not unknown, f"layers of type {min(unknown, default='')}")
    shares_keys = any(is_stateless_layer(layer) for layer in layers)
    known = text.model_type in _KEY_SHARING_FAMILIES
    require(not shares_keys or known, "layers that take their keys and values from another")
    sees = getattr(text, "use_bidirectional_attention", None)
    require(not sees or (text.model_type, sees) in _IMAGES_SEE_THEMSELVES, "bidirectional attention over text")
    require(layers, "a cache without layers")  # transformers 5.9 makes none for a Gemma 3n whose layers share no keys


def _is_shareable(layer: Any) -> bool:
    if isinstance(layer, LinearAttentionLayer):
        # In releases without these attributes linear attention continues a state by one token only.
        return hasattr(layer, "number_of_states") and hasattr(layer, "record_past")
    return type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) or is_stateless_layer(layer)


def rope_parameters(config: Any) -> Mapping[str, Any]:
    """Return the parameters of a language model's rotary embeddings; empty without rotary embeddings."""
    return getattr(config.get_text_config(decoder=True), "rope_parameters", None) or {}


def has_rope_deltas(base: Any) -> bool:
    """Whether a base model keeps the offset of positions behind images, as Qwen-VL does."""
    return hasattr(base, "rope_deltas")


def check_rope(config: Any) -> None:
    """Raise `UnsupportedModel` if the rotary embedding of a prompt depends on later tokens."""
    parameters = rope_parameters(config)
    for options in [parameters, *(value for value in parameters.values() if isinstance(value, Mapping))]:
        kind = options.get("rope_type")
        require(kind not in _ROPE_BY_LENGTH, f"rotary embeddings of type {kind}")


def check_token_types(inputs: Mapping[str, Any], config: Any) -> None:
    """Raise `UnsupportedModel` if token types are given that may do more than mark images in this family."""
    given = isinstance(inputs.get("token_type_ids"), Tensor)
    require(not given or config.model_type in _TOKEN_TYPES_MARK_IMAGES, "token_type_ids")
