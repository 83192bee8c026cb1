"""Which models can share prompts, and why the others cannot."""

from collections.abc import Mapping
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers import PretrainedConfig
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from vgr_trl.sharing.backbone import (
    DROPS_CACHES,
    base_of,
    causal_model,
    checkpoints_drop_caches,
    flattens_layers,
    is_attention,
    is_checkpointed,
    is_compiled,
    recomputes_without_graph,
)
from vgr_trl.sharing.caches.prefix_cache import keeps_nothing
from vgr_trl.sharing.counts import CannotShare

_SHAREABLE = (DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer)
_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention", "linear_attention", "conv"}
# Linear attention that goes on from a state with several tokens; elsewhere it starts anew, in silence (Jamba).
_LINEAR_FAMILIES = {"qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "lfm2"}
# Layers that take their keys and values from another one, out of the pass and not out of its cache.
_KEY_SHARING_FAMILIES = {"gemma3n_text", "gemma4_text"}
# Two-way attention that the family keeps to the tokens of each image.
_IMAGES_SEE_THEMSELVES = {("gemma4_text", "vision")}
# Families in which these ids only mark image tokens; elsewhere they may open a whole prompt to itself (PaliGemma).
_TOKEN_TYPES_MARK_IMAGES = ("gemma3",)
# Rotary embeddings whose angles depend on the longest position of a pass.
_ROPE_BY_LENGTH = {"dynamic", "longrope"}


def why_not_share(model: nn.Module, *, gradients: bool) -> str | None:
    """Why prompts cannot be shared by a model in its present state; None if they can.

    Args:
        gradients: whether for passes with gradients.
    """
    if (reason := "torch.compile" if is_compiled(model) else why_adapter_reads_whole_rows(model)) is not None:
        return reason
    try:
        refuse_unfit_model(base_of(causal_model(model)), gradients)
    except CannotShare as error:
        return str(error)
    return None


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


def refuse_unfit_model(base: Any, gradients: bool) -> None:
    """Raise `CannotShare` if a base model, in its present state, cannot go on from a prompt computed before."""
    if gradients and recomputes_without_graph(base):
        raise CannotShare("gradient checkpointing with use_reentrant=True")
    if gradients and checkpoints_drop_caches() and is_checkpointed(base):
        raise CannotShare(DROPS_CACHES)
    if gradients and flattens_layers(base):
        raise CannotShare("the first version of FSDP")
    if getattr(base.config, "is_encoder_decoder", False):
        raise CannotShare("a model without a cache of keys and values")
    if getattr(base.config, "visual_indicator_token_ids", None):  # Ovis2; they are text in a pass without images
        raise CannotShare("tokens whose embeddings depend on whether the pass has images")
    refuse_unknown_layers(base.config)
    refuse_rope_by_length(base.config)
    refuse_bidirectional_attention(base)


def refuse_unknown_layers(config: PretrainedConfig) -> None:
    """Raise `CannotShare` if a layer of the language model keeps something else than keys and values or states."""
    text_config = config.get_text_config(decoder=True)
    types = set(getattr(text_config, "layer_types", None) or ())
    if unknown := types - _LAYER_TYPES:
        raise CannotShare(f"layers of type {min(unknown)}")
    layers = DynamicCache(config=config).layers
    if unknown := {type(layer).__name__ for layer in layers if not _is_shareable(layer)}:
        raise CannotShare(f"layers of type {min(unknown)}")
    linear = [layer for layer in layers if isinstance(layer, LinearAttentionLayer)]
    if linear and (text_config.model_type not in _LINEAR_FAMILIES or len(linear) == len(layers)):
        raise CannotShare("layers of type linear_attention")
    if any(keeps_nothing(layer) for layer in layers) and text_config.model_type not in _KEY_SHARING_FAMILIES:
        raise CannotShare("layers that take their keys and values from another")
    sees_both_ways = getattr(text_config, "use_bidirectional_attention", None)
    if sees_both_ways and (text_config.model_type, sees_both_ways) not in _IMAGES_SEE_THEMSELVES:
        raise CannotShare("bidirectional attention over text")
    if not layers:  # transformers 5.9 makes none for a Gemma 3n whose layers share no keys
        raise CannotShare("a cache without layers")


def _is_shareable(layer: Any) -> bool:
    # Linear attention goes on from a state with several tokens only in releases whose layers have these attributes.
    if isinstance(layer, LinearAttentionLayer) and not (
        hasattr(layer, "number_of_states") and hasattr(layer, "record_past")
    ):
        return False
    return type(layer) in _SHAREABLE or keeps_nothing(layer)


def refuse_bidirectional_attention(base: Any) -> None:
    """Raise `CannotShare` if a token sees what comes after it, as in encoders that have a head for the next token."""
    decoder = base.get_decoder() if hasattr(base, "get_decoder") else base
    causal = {module.is_causal for module in decoder.modules() if is_attention(module)}
    is_decoder = getattr(base.config.get_text_config(decoder=True), "is_decoder", True)
    if False in causal or (not is_decoder and True not in causal):
        raise CannotShare("attention that is not causal")


def refuse_rope_by_length(config: Any) -> None:
    """Raise `CannotShare` if the rotary embedding of a prompt depends on what comes after it."""
    text_config = config.get_text_config(decoder=True)
    parameters = getattr(text_config, "rope_parameters", None) or {}
    for options in [parameters, *(value for value in parameters.values() if isinstance(value, Mapping))]:
        if options.get("rope_type") in _ROPE_BY_LENGTH:
            raise CannotShare(f"rotary embeddings of type {options['rope_type']}")


def refuse_token_types(inputs: Mapping[str, Any], config: Any) -> None:
    """Raise `CannotShare` if token types are given to a family in which they may do more than mark images."""
    types = inputs.get("token_type_ids")
    if isinstance(types, torch.Tensor) and config.model_type not in _TOKEN_TYPES_MARK_IMAGES:
        raise CannotShare("token_type_ids")
