"""Probe whether outputs of a model depend on padding or prefix splitting, by two short rows.

No list of families, or of keys in their configs, stays complete. The few lists here cover what short rows do not show.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import cycle, islice
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from vgr_trl.errors import error_text
from vgr_trl.patching import patched_attribute
from vgr_trl.sharing.model_support import (
    base_of,
    cache_name,
    causal_model,
    check_model,
    check_rope,
    has_rope_deltas,
    rope_parameters,
    why_no_pass_shares,
)
from vgr_trl.sharing.prefix_cache import PromptsStored, ReadPrefix, WrittenPrefix, layer_types
from vgr_trl.sharing.prefix_forward import positions_behind
from vgr_trl.sharing.prefix_split import PrefixSplit
from vgr_trl.sharing.report import why_unsupported

_PADDING, _PROMPT, _COMPLETION = 8, 5, 3  # columns of the two rows
_LAYERS = 4  # that run; more if the first layer of some type comes later
# Mean relative difference of hidden states up to which it counts as rounding. Tiny random models with two to four
# layers showed 5e-7 in float32 and 1e-2 in bfloat16. Accelerators multiply float32 with the 10 bits of TF32.
_ROUNDING = {torch.bfloat16: 5e-2, torch.float16: 1e-2}
_IN_FLOAT32, _ON_ACCELERATOR = 1e-5, 1e-2

_sharing: WeakKeyDictionary[nn.Module, str | None] = WeakKeyDictionary()  # base model -> why it cannot share
_padding: WeakKeyDictionary[nn.Module, str | None] = WeakKeyDictionary()  # base model -> why padding counts


def why_padding_counts(base: Any) -> str | None:
    """Return why the results of a base model depend on the padding or width of a batch; None: they do not."""
    config = base.config.get_text_config(decoder=True)
    # Scaling that begins at thousands of tokens, and Beam's, which is below the rounding of bfloat16 in a short row.
    scaled = getattr(config, "attn_temperature_tuning", False) or config.model_type == "beam"
    if scaled or "llama_4_scaling_beta" in str(rope_parameters(base.config)):
        return "attention is scaled by the position"
    if "chunked_attention" in layer_types(base.config):
        return "attention within chunks"
    if (reason := why_unsupported(check_rope, base.config)) is not None:
        return reason
    if base not in _padding:
        _padding[base] = _difference(base, "padding around a prompt", _try_padding)
    return _padding[base]


def why_not_share(model: nn.Module, *, gradients: bool) -> str | None:
    """Return why a model, in its present state, cannot share prompts; None: it can.

    The first call for a model runs its first layers on two short rows, under ZeRO-3 in all processes together.

    Args:
        model: transformers model, also wrapped.
        gradients: whether the passes have gradients.
    """
    if (reason := why_no_pass_shares(model)) is not None:
        return reason
    base = base_of(causal_model(model))
    if (reason := why_unsupported(check_model, base, gradients)) is not None:
        return reason
    if base not in _sharing:
        _sharing[base] = _difference(base, "a prompt computed before its completion", _try_sharing)
    return _sharing[base]


Run = Callable[..., Tensor]  # inputs of a base model -> hidden states of its first layers, (2, S, D)


def _difference(base: Any, cause: str, attempt: Callable[..., Any]) -> str | None:
    """Return a sentence on how `cause` changes hidden states beyond rounding; None: it does not.

    Args:
        base: base model (without head) of a transformers model.
        cause: subject of the sentence.
        attempt: returns hidden states found and expected, (2, S, D) each, given base model, runner and rows.
    """
    try:
        with _first_layers(base) as run:
            found, expected = attempt(base, run, _rows(base))
    except Exception as error:  # for example a model that trains but reads no text without an image
        return f"its pass over two short rows fails: {error_text(error)}"
    if found.shape != expected.shape:  # for example several streams per token
        return f"its hidden states of two short rows have shapes {tuple(found.shape)} and {tuple(expected.shape)}"
    precise = _IN_FLOAT32 if expected.device.type == "cpu" else _ON_ACCELERATOR
    found, expected, limit = found.float(), expected.float(), _ROUNDING.get(expected.dtype, precise)
    difference = float(((found - expected).norm(dim=-1) / expected.norm(dim=-1)).mean())
    return None if difference <= limit else f"{cause} changes its hidden states by {difference:.1g} of their size"


def _try_padding(base: Any, run: Run, rows: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Compare padded and unpadded prompts."""
    cut = slice(_PADDING, _PADDING + _PROMPT)
    return run(**{name: value[:, cut] for name, value in rows.items()}), run(**rows)[..., cut, :]


def _try_sharing(base: Any, run: Run, rows: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Compare completions behind cached prompts with completions of whole rows."""
    ids, mask, prefix = rows["input_ids"], rows["attention_mask"], WrittenPrefix(base.config, [0, 1])
    start = _PADDING + _PROMPT
    cache = str(cache_name(base))
    run(input_ids=ids[:, :start], attention_mask=mask[:, :start], **{cache: prefix})
    positions = positions_behind(base, rows, PrefixSplit(start, ids.size(1), groups=[0, 1], pixels={}))
    behind = ReadPrefix(prefix, torch.arange(2, device=ids.device), [0, 1])
    inputs = {"input_ids": ids[:, start:], "attention_mask": mask, "position_ids": positions}
    return run(**inputs, **{cache: behind}), run(**rows)[..., start:, :]


def _rows(base: Any) -> dict[str, Tensor]:
    """Return the inputs of two rows of words, padded on the left, (2, 8 + 5 + 3)."""
    config, device = base.config.get_text_config(decoder=True), base.get_input_embeddings().weight.device
    special = {value for name, value in base.config.to_dict().items() if "token" in name and isinstance(value, int)}
    words = (token for token in cycle(range(config.vocab_size // 4, config.vocab_size)) if token not in special)
    ids = torch.tensor(list(islice(words, 2 * (_PROMPT + _COMPLETION))), device=device).view(2, -1)
    inputs = {"input_ids": (ids, config.pad_token_id or 0), "attention_mask": (torch.ones_like(ids), 0)}
    return {name: nn.functional.pad(one, (_PADDING, 0), value=value) for name, (one, value) in inputs.items()}


@contextmanager
def _first_layers(base: Any) -> Iterator[Run]:
    """Run the first layers of a base model without dropout, gradients and hooks in this block."""
    config = base.config.get_text_config(decoder=True)
    layers = [module for module in base.get_decoder().modules() if isinstance(module, GradientCheckpointingLayer)]
    kinds = layer_types(config)
    count = max([_LAYERS, *(1 + kinds.index(kind) for kind in kinds)])
    states: list[Tensor] = []

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        states.append(output if isinstance(output, Tensor) else output[0])
        raise PromptsStored

    def run(**inputs: Any) -> Tensor:
        with suppress(PromptsStored):
            keep(base, (), base.forward(**inputs, use_cache=False, return_dict=True))
        return states.pop()

    changes: list[tuple[Any, str, Any]] = [(base, "rope_deltas", None)] if has_rope_deltas(base) else []
    if config._attn_implementation not in ("eager", "sdpa"):  # other kernels want a GPU, or 16 bits
        changes += [(part, "_attn_implementation_internal", "eager") for part in (base.config, config)]
    for module in base.modules():
        changes.append((module, "training", False))
        changes += [(module, hooks, OrderedDict()) for hooks in ("_forward_pre_hooks", "_forward_hooks")]
    with ExitStack() as stack:
        for change in changes:
            stack.enter_context(patched_attribute(*change))
        if layers:
            layers[:count][-1].register_forward_hook(keep)
        unused = {parameter for layer in layers[count:] for parameter in layer.parameters()}
        if parts := [each for each in base.parameters() if hasattr(each, "ds_id") and each not in unused]:  # of ZeRO-3
            from deepspeed import zero

            stack.enter_context(zero.GatheredParameters(parts))
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.autocast(base.get_input_embeddings().weight.device.type, enabled=False))
        yield run
