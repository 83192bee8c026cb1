"""Models that can share prompts, the reasons why others cannot, and the parts of a model."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from inspect import Parameter, signature
from typing import Any

from peft import PeftMixedModel, PeftModel
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer
from transformers.modeling_flash_attention_utils import flash_attn_supports_top_left_mask, lazy_import_flash_attention

from vgr_trl.errors import ConfigError
from vgr_trl.pixels import drop_empty_images


class UnsupportedModel(Exception):
    """A call runs without sharing, for the reason in the message; raised and caught within this package."""


def require(condition: Any, otherwise: str) -> None:
    """Raise `UnsupportedModel` with the reason `otherwise` unless the condition holds."""
    if not condition:
        raise UnsupportedModel(otherwise)


@dataclass
class SharingReport:
    """Counts of the rows and prompts of all calls while sharing was on.

    Attributes:
        rows: rows of all forward passes and generations.
        prompts: prompts computed for these rows; as many as rows where nothing was shared.
        plain: reason -> number of calls that ran without sharing for this reason.
        in_training: (prompts, rows) of calls with the model in training mode.
    """

    rows: int = 0
    prompts: int = 0
    plain: Counter[str] = field(default_factory=Counter)
    in_training: tuple[int, int] = (0, 0)

    @property
    def prompts_per_row(self) -> float:
        """Prompts computed per row, in (0, 1]; 1 / G where each prompt was shared by its G completions.

        Evaluation is left out: if the model was in training mode in some calls, only these calls count.
        """
        prompts, rows = self.in_training if self.in_training[1] else (self.prompts, self.rows)
        return prompts / rows if rows else 1.0

    def metrics(self) -> dict[str, float]:
        """Return the prompts computed per row since the last call; empty without rows."""
        metrics = {"sharing/prompts_per_row": self.prompts_per_row} if self.rows else {}
        self.rows, self.prompts, self.in_training = 0, 0, (0, 0)
        return metrics

    def __str__(self) -> str:
        reasons = f" ({'; '.join(self.plain)})" if self.plain else ""
        return f"computed {self.prompts} prompts for {self.rows} rows{reasons}"

    def add(self, rows: int, prompts: int, plain: Iterable[str] = (), *, trains: bool = False) -> None:
        """Add the counts of a call.

        Args:
            rows: rows of the call.
            prompts: prompts computed for these rows.
            plain: reasons why the call ran without sharing.
            trains: whether the model is in training mode.
        """
        self.rows += rows
        self.prompts += prompts
        self.plain.update(plain)
        if trains:
            self.in_training = (self.in_training[0] + prompts, self.in_training[1] + rows)


@dataclass(frozen=True)
class Feature:
    """A feature of a run; printed as "on", or "off" with the reason.

    Attributes:
        reason: why the feature is off; None: it is on.
    """

    reason: str | None = None

    @property
    def enabled(self) -> bool:
        return self.reason is None

    def __str__(self) -> str:
        return "on" if self.reason is None else f"off ({self.reason})"


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
    """Return the modules of a language model that have a `layer_idx`, such as attention."""
    return [module for module in model.modules() if isinstance(getattr(module, "layer_idx", None), int)]


def attention_modules(model: nn.Module) -> list[Any]:
    """Return the attention layers of a language model."""
    return [module for module in indexed_modules(model) if hasattr(module, "is_causal")]


def is_compiled(model: nn.Module) -> bool:
    """Whether the model is compiled, or a module that contains attention layers."""
    compiled = (
        part for part in model.modules() if hasattr(part, "_orig_mod") or getattr(part, "_compiled_call_impl", None)
    )
    return any(attention_modules(part) for part in compiled)


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


def has_sharded_parameters(model: nn.Module) -> bool:
    """Whether this process holds shards of the parameters only, under FSDP or ZeRO-3."""
    if any(isinstance(module, FSDPModule | FullyShardedDataParallel) for module in model.modules()):
        return True
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


# Names of the cache argument: the second until transformers 5.24, the third in single layers of some families.
_CACHE_NAMES = ("cache", "past_key_values", "layer_past")


def cache_name(base: Any) -> str | None:
    """Return the name of a base model's argument for the cache; None: it has none."""
    names = signature(base.forward).parameters
    return next((name for name in _CACHE_NAMES if name in names), None)


def cache_of(inputs: Mapping[str, Any]) -> Any:
    """Return the cache among the inputs of a call, under any of its names; None: there is none."""
    return next((inputs[name] for name in _CACHE_NAMES if inputs.get(name) is not None), None)


def check_model(base: Any) -> None:
    """Raise `UnsupportedModel` if a base model, in its present state, cannot compute a prompt once.

    Args:
        base: base model (without head) of a transformers model.
    """
    config = base.config
    require(not config.is_encoder_decoder, "a model with an encoder")
    hands_on = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in signature(base.forward).parameters.values())
    require(hands_on, "a model that takes no further arguments for its attention")
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
    check_attention(base)
    shares_keys = any(is_stateless_layer(layer) for layer in layers)
    is_tested = text.model_type in _KEY_SHARING_FAMILIES
    require(not shares_keys or is_tested, "layers that take their keys and values from another")
    sees = getattr(text, "use_bidirectional_attention", None)
    require(not sees or (text.model_type, sees) in _IMAGES_SEE_THEMSELVES, "bidirectional attention over text")
    require(layers, "a cache without layers")  # transformers 5.9 makes none for a Gemma 3n whose layers share no keys


def check_attention(base: Any) -> None:
    """Raise `UnsupportedModel` if the attention function of a base model cannot compute the attention of a row."""
    attention = str(base.config.get_text_config(decoder=True)._attn_implementation)
    if "flash" not in attention:
        return require(attention in ("sdpa", "eager"), f"{attention} attention")
    try:
        kernel = lazy_import_flash_attention(attention)[0][1]
    except (ImportError, ValueError, AttributeError) as error:
        raise UnsupportedModel(f"the kernel of {attention} cannot be imported: {error}") from error
    takes_fewer = kernel is not None and not flash_attn_supports_top_left_mask()
    require(takes_fewer, f"the kernel of {attention} does not take fewer queries than keys")
    kinds = {*layer_types(base.config)} - {"full_attention", "sliding_attention"}
    require(not kinds, f"{attention} attention and layers of type {min(kinds, default='')}")


def is_stateless_layer(layer: Any) -> bool:
    """Whether a cache layer reads the keys and values of another layer; older releases have none of them."""
    return type(layer).__name__ == "DummyLayer"


def layer_types(config: Any) -> list[str]:
    """Return the type of each layer of a language model; empty where its config names none."""
    return list(getattr(config.get_text_config(decoder=True), "layer_types", None) or ())


def _is_shareable(layer: Any) -> bool:
    if isinstance(layer, LinearAttentionLayer):
        # In releases without these attributes linear attention continues a state by one token only.
        return hasattr(layer, "number_of_states") and hasattr(layer, "record_past")
    return type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) or is_stateless_layer(layer)


def check_rope(config: Any) -> None:
    """Raise `UnsupportedModel` if the rotary embedding of a prompt depends on later tokens."""
    parameters = getattr(config.get_text_config(decoder=True), "rope_parameters", None) or {}
    for options in [parameters, *(value for value in parameters.values() if isinstance(value, Mapping))]:
        kind = options.get("rope_type")
        require(kind not in _ROPE_BY_LENGTH, f"rotary embeddings of type {kind}")


def check_token_types(inputs: Mapping[str, Any], config: Any) -> None:
    """Raise `UnsupportedModel` if there are token types that may do more than mark images in this family."""
    has_types = isinstance(inputs.get("token_type_ids"), Tensor)
    require(not has_types or config.model_type in _TOKEN_TYPES_MARK_IMAGES, "token_type_ids")


@contextmanager
def ignore_empty_images(model: nn.Module, *, agree: Callable[[bool], bool] | None = None) -> Iterator[None]:
    """Drop pixel inputs without images in passes of this block; `share_prompts` does so by itself.

    Args:
        model: transformers model, also wrapped; a compiled model keeps its inputs.
        agree: returns whether an answer is True in all processes, where parameters are sharded.

    Raises:
        ConfigError: `model` is no transformers model.
    """
    base = base_of(causal_model(model))
    agree = agree if "pixel_values" in signature(base.forward).parameters else None
    drops = partial(_drop_from_call, agree)
    with nullcontext() if is_compiled(model) else base.register_forward_pre_hook(drops, with_kwargs=True):
        yield


def _drop_from_call(agree: Any, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return args, drop_empty_images(kwargs, agree)  # a function of this module, so that the model can be pickled
