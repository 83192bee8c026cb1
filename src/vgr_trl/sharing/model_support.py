"""Models that can share prompts, the reasons why others cannot, and the parts of a model that sharing wraps."""

from collections.abc import Callable, Mapping
from functools import partial
from inspect import signature
from typing import Any

from peft import PeftModel
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer
from transformers.modeling_layers import GradientCheckpointingLayer

from vgr_trl.errors import ConfigError
from vgr_trl.sharing.prefix_cache import is_stateless_layer
from vgr_trl.sharing.report import require

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


def replace_hidden_states(base: Any, change: Callable[[Tensor], Tensor]) -> RemovableHandle:
    """Let a base model return other last hidden states within the block of the handle."""

    def replace_states(module: nn.Module, args: Any, outputs: Any) -> None:
        outputs.last_hidden_state = change(outputs.last_hidden_state)

    handle: RemovableHandle = base.register_forward_hook(replace_states)
    return handle


def indexed_modules(model: nn.Module) -> list[Any]:
    """Return the modules of a language model that carry the number of their layer, as attention does."""
    return [module for module in model.modules() if isinstance(getattr(module, "layer_idx", None), int)]


def attention_modules(model: nn.Module) -> list[Any]:
    """Return the attention layers of a language model."""
    return [module for module in indexed_modules(model) if hasattr(module, "is_causal")]


def is_compiled(model: nn.Module) -> bool:
    """Whether `torch.compile` has been applied to the model or to a module of it."""
    return any(hasattr(each, "_orig_mod") or getattr(each, "_compiled_call_impl", None) for each in model.modules())


def _checkpointed(model: nn.Module, when_training: bool = False) -> list[nn.Module]:
    parts = (module for module in model.modules() if when_training or module.training)
    return [module for module in parts if getattr(module, "gradient_checkpointing", False)]


def recomputes_without_graph(model: nn.Module, *, when_training: bool = False) -> bool:
    """Whether a gradient checkpoint of the model runs its layers without gradients first (`use_reentrant`).

    `when_training` asks for the model in training mode, whatever its mode is now.
    """
    return any(is_reentrant(module) for module in _checkpointed(model, when_training))


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
    """Return why reentrant checkpoints of a base model have to stay so, and no pass with gradients shares prompts."""
    frozen = any(not parameter.requires_grad for parameter in base.parameters())
    return NEEDS_REENTRANT if sharded_by_deepspeed and frozen and releases_during_recompute() else None


DROPS_CACHES = "gradient checkpointing by a transformers whose layers then drop caches (5.23 keeps them)"


def checkpoints_drop_caches() -> bool:
    """Whether checkpointed layers ignore the cache they are given, as those of transformers 5.9 and 5.10 do."""
    return not hasattr(GradientCheckpointingLayer, "_can_checkpoint_with_cache")


def is_checkpointed(model: nn.Module) -> bool:
    """Whether layers of a model that trains are computed again in the backward pass."""
    return bool(_checkpointed(model))


def has_active_dropout(model: nn.Module, *, when_training: bool = False) -> bool:
    """Whether dropout, or noise in the router of experts, is at work: completions then share it over their prompt.

    `when_training` asks for the model in training mode, whatever its mode is now.
    """
    for module in model.modules():
        rates = [getattr(module, name, None) for name in _RATES]
        rates.append(module.p if isinstance(module, _DropoutNd) else None)
        if (when_training or module.training) and any(isinstance(rate, int | float) and rate > 0 for rate in rates):
            return True
    return False


def shards_layers(model: nn.Module) -> bool:
    """Whether FSDP2 gathers the weights of a layer for its backward pass when a gradient reaches the layer's output."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def flattens_layers(model: nn.Module) -> bool:
    """Whether parts of the model are wrapped by the first version of FSDP."""
    return any(isinstance(module, FullyShardedDataParallel) for module in model.modules())


def has_sharded_parameters(model: nn.Module) -> bool:
    """Whether this process has parts of parameters only: FSDP, or ZeRO-3."""
    return shards_layers(model) or flattens_layers(model) or is_partitioned(model)


def is_partitioned(model: nn.Module) -> bool:
    """Whether this process has parts of parameters only, under ZeRO-3."""
    return any(hasattr(value, "ds_numel") and value.numel() != value.ds_numel for value in model.parameters())


_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention", "linear_attention", "conv"}
# Layers that take their keys and values from another one, out of the pass and not out of its cache.
_KEY_SHARING_FAMILIES = {"gemma3n_text", "gemma4_text"}
# Two-way attention that the family keeps to the tokens of each image.
_IMAGES_SEE_THEMSELVES = {("gemma4_text", "vision")}
# Families in which these ids only mark image tokens; elsewhere they may open a whole prompt to itself (PaliGemma).
_TOKEN_TYPES_MARK_IMAGES = ("gemma3",)
# Rotary embeddings whose angles depend on the longest position of a pass.
_ROPE_BY_LENGTH = {"dynamic", "longrope"}


def why_no_pass_shares(model: nn.Module) -> str | None:
    """Why every pass and `generate` run as they are; None if it depends on them."""
    if is_compiled(model):
        return "torch.compile"
    if len(set(getattr(causal_model(model), "hf_device_map", {}).values())) > 1:
        return "a model spread over several devices"
    return why_adapter_reads_whole_rows(model)


def why_adapter_reads_whole_rows(model: nn.Module) -> str | None:
    """Why PEFT's active adapter gives other results for other rows or columns of a batch; None if it does not."""
    for module in model.modules():
        if isinstance(module, PeftModel):
            config = module.active_peft_config
            if config.is_prompt_learning:
                return "prompt learning, whose virtual tokens stand before the padding"
            if getattr(config, "alora_invocation_tokens", None):
                return "aLoRA, which begins at tokens that it looks for in whole rows"
    return None


def cache_name(base: Any) -> str | None:
    """Return the argument by which a base model takes a cache, which transformers 5.24 has renamed; None: by none."""
    names = signature(base.forward).parameters
    return next((name for name in ("cache", "past_key_values") if name in names), None)


def check_model(base: Any, gradients: bool) -> None:
    """Raise `UnsupportedModel` if a base model, in its present state, cannot go on from a prompt computed before."""
    if gradients:
        why = why_reentrant(base, is_partitioned(base)) if recomputes_without_graph(base) else None
        require(why is None, str(why))
        require(not (checkpoints_drop_caches() and is_checkpointed(base)), DROPS_CACHES)
        require(not flattens_layers(base), "the first version of FSDP")
    config = base.config
    keeps = cache_name(base) is not None and not getattr(config, "is_encoder_decoder", False)
    require(keeps, "a model without a cache of keys and values")
    # Ovis2: its visual indicator tokens are text in a pass without images.
    by_pass = getattr(config, "visual_indicator_token_ids", None)
    require(not by_pass, "tokens whose embeddings depend on whether the pass has images")
    check_rope(config)
    text = config.get_text_config(decoder=True)
    layers = DynamicCache(config=config).layers
    unknown = set(getattr(text, "layer_types", None) or ()) - _LAYER_TYPES
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
        # Linear attention goes on from a state with several tokens only in releases whose layers have these attributes.
        return hasattr(layer, "number_of_states") and hasattr(layer, "record_past")
    return type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) or is_stateless_layer(layer)


def check_rope(config: Any) -> None:
    """Raise `UnsupportedModel` if the rotary embedding of a prompt depends on what comes after it."""
    parameters = getattr(config.get_text_config(decoder=True), "rope_parameters", None) or {}
    for options in [parameters, *(value for value in parameters.values() if isinstance(value, Mapping))]:
        kind = options.get("rope_type")
        require(kind not in _ROPE_BY_LENGTH, f"rotary embeddings of type {kind}")


def check_token_types(inputs: Mapping[str, Any], config: Any) -> None:
    """Raise `UnsupportedModel` if token types are given to a family in which they may do more than mark images."""
    given = isinstance(inputs.get("token_type_ids"), Tensor)
    require(not given or config.model_type in _TOKEN_TYPES_MARK_IMAGES, "token_type_ids")
