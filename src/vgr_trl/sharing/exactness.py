"""Probe whether a model computes a row of prompts and completions as it computes padded rows, by two short ones.

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
from vgr_trl.sharing.attention import prepare_mixers
from vgr_trl.sharing.model_support import (
    UnsupportedModel,
    base_of,
    causal_model,
    check_model,
    layer_types,
    why_no_pass_shares,
)
from vgr_trl.sharing.prefix_split import PrefixSplit
from vgr_trl.sharing.row import lay_out

_PADDING, _PROMPT, _COMPLETION = 8, 5, 3  # columns of the two rows
_LAYERS = 4  # layers the check runs, extended until every layer type is included
# Mean relative difference of hidden states up to which it counts as rounding. Tiny random models with two to four
# layers showed 5e-7 in float32 and 1e-2 in bfloat16. Accelerators multiply float32 with the 10 bits of TF32.
_ROUNDING = {torch.bfloat16: 5e-2, torch.float16: 1e-2}
_IN_FLOAT32, _ON_ACCELERATOR = 1e-5, 1e-2

_sharing: WeakKeyDictionary[nn.Module, str | None] = WeakKeyDictionary()  # base model -> why it cannot share


def why_not_share(model: nn.Module) -> str | None:
    """Return why a model, in its present state, cannot share prompts, or None if it can.

    The first call for a model runs its first layers on two short rows, under ZeRO-3 in all processes together.

    Args:
        model: transformers model, also wrapped.
    """
    if (reason := why_no_pass_shares(model)) is not None:
        return reason
    base = base_of(causal_model(model))
    try:
        check_model(base)
    except UnsupportedModel as error:
        return str(error)
    if base not in _sharing:
        _sharing[base] = _difference(base)
    return _sharing[base]


class _Enough(Exception):
    """The first layers have run."""


def _difference(base: Any) -> str | None:
    """Describe how a row of two prompts and completions changes their hidden states, or return None if it does not.

    Args:
        base: base model (without head) of a transformers model.
    """
    start = _PADDING + _PROMPT
    try:
        prepare_mixers(base)
        rows = _rows(base)
        row, call = lay_out(base, rows, PrefixSplit(start, groups=[0, 1], pixels={}), [_COMPLETION] * 2)
        with _first_layers(base) as run:
            shared, expected = run(**call)[..., 0, row.predicting_places(_COMPLETION), :], run(**rows)[..., start:, :]
    except Exception as error:  # such as a model that trains but reads no text without an image
        return f"its pass over two short rows fails: {error_text(error)}"
    if shared.shape != expected.shape:  # such as several streams per token
        return f"its hidden states of two short rows have shapes {tuple(shared.shape)} and {tuple(expected.shape)}"
    precise = _IN_FLOAT32 if expected.device.type == "cpu" else _ON_ACCELERATOR
    shared, expected, limit = shared.float(), expected.float(), _ROUNDING.get(expected.dtype, precise)
    difference = float(((shared - expected).norm(dim=-1) / expected.norm(dim=-1)).mean())
    changes = f"a row of prompts and completions changes its hidden states by {difference:.1g} of their size"
    return None if difference <= limit else changes


def _rows(base: Any) -> dict[str, Tensor]:
    """Return the inputs of two rows of words, padded on the left, (2, 8 + 5 + 3)."""
    config, device = base.config.get_text_config(decoder=True), base.get_input_embeddings().weight.device
    special = {value for name, value in base.config.to_dict().items() if "token" in name and isinstance(value, int)}
    words = (token for token in cycle(range(config.vocab_size // 4, config.vocab_size)) if token not in special)
    ids = torch.tensor(list(islice(words, 2 * (_PROMPT + _COMPLETION))), device=device).view(2, -1)
    inputs = {"input_ids": (ids, config.pad_token_id or 0), "attention_mask": (torch.ones_like(ids), 0)}
    return {name: nn.functional.pad(tokens, (_PADDING, 0), value=value) for name, (tokens, value) in inputs.items()}


@contextmanager
def _first_layers(base: Any) -> Iterator[Callable[..., Tensor]]:
    """Run the first layers of a base model without dropout, gradients and hooks in this block."""
    config = base.config.get_text_config(decoder=True)
    layers = [module for module in base.get_decoder().modules() if isinstance(module, GradientCheckpointingLayer)]
    kinds = layer_types(config)
    count = max([_LAYERS, *(1 + kinds.index(kind) for kind in kinds)])
    states: list[Tensor] = []

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        states.append(output if isinstance(output, Tensor) else output[0])
        raise _Enough

    def run(**inputs: Any) -> Tensor:
        with suppress(_Enough):
            keep(base, (), base.forward(**{**inputs, "use_cache": False, "return_dict": True}))
        return states.pop()

    changes: list[tuple[Any, str, Any]] = [(base, "rope_deltas", None)] if hasattr(base, "rope_deltas") else []
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
        if parts := [part for part in base.parameters() if hasattr(part, "ds_id") and part not in unused]:  # ZeRO-3's
            from deepspeed import zero

            stack.enter_context(zero.GatheredParameters(parts))
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.autocast(base.get_input_embeddings().weight.device.type, enabled=False))
        yield run
