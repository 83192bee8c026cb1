"""The language model inside a model, and whether its attention can be measured."""

from typing import Any

from torch import nn

from vgr_trl.errors import ConfigError
from vgr_trl.sharing.backbone import causal_model, is_attention, is_compiled, layer_index
from vgr_trl.sharing.fitness import why_adapter_reads_whole_rows

SUPPORTED = ("sdpa", "eager", "flash_attention_2", "flash_attention_3")


def find_decoder(model: nn.Module) -> nn.Module:
    """Return the language model of a transformers model, also a wrapped one (DDP, DeepSpeed, PEFT)."""
    inside: Any = causal_model(model)
    decoder = inside.get_decoder() if hasattr(inside, "get_decoder") else None
    found: nn.Module = inside if decoder is None else decoder
    return found


def count_attention_layers(model: nn.Module) -> int:
    """Return L, the layers of the language model that have attention; layers of another kind are not measured."""
    modules = find_decoder(model).modules()
    return len({layer_index(module) for module in modules if is_attention(module)})


def why_not_measurable(model: nn.Module) -> str | None:
    """Return why the attention of `model` cannot be measured, None if it can."""
    if is_compiled(model):
        return "the model is compiled, and a compiled pass calls no other attention; switch torch.compile off."
    if (adapter := why_adapter_reads_whole_rows(model)) is not None:
        return f"the model has an adapter by {adapter}; use another method."
    if getattr(causal_model(model).config, "is_encoder_decoder", False):
        return f"{type(causal_model(model)).__name__} reads prompts in an encoder; use a model of a decoder alone."
    decoder = find_decoder(model)
    used = getattr(getattr(decoder, "config", None), "_attn_implementation", None)
    if used not in SUPPORTED:
        return f"the attention implementation is {used!r}; load the model with one of {', '.join(SUPPORTED)}."
    can_look_up: Any = getattr(decoder, "_can_set_attn_implementation", None)
    if used != "eager" and can_look_up is not None and not can_look_up():
        return (
            f"{type(decoder).__name__} looks its attention up nowhere; load it with attn_implementation='eager', "
            "where it returns its weights."
        )
    if not count_attention_layers(model):
        return f"{type(decoder).__name__} has no attention layers with a layer_idx."
    return None


def refuse_unmeasurable(model: nn.Module) -> None:
    """Raise `ConfigError` unless the attention of `model` can be measured."""
    if (why := why_not_measurable(model)) is not None:
        raise ConfigError(f"Attention cannot be measured: {why}")
