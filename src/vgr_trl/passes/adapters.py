"""Cast the weights of LoRA adapters once per micro-batch, where autocast would cast them in every layer and pass."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from peft.tuners.lora import Linear
from torch import nn
from torch.nn import functional


def has_whole_weights(accelerator: Accelerator) -> bool:
    """Whether each process has all weights, and no engine steps in their place."""
    whole = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
    return accelerator.distributed_type in whole


def adapter_dtype(accelerator: Accelerator) -> torch.dtype | None:
    """Return the type in which autocast computes with adapters; None without it, or with sharded weights."""
    precision = accelerator.mixed_precision if has_whole_weights(accelerator) else "no"
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)


@contextmanager
def cast_adapters(model: nn.Module, dtype: torch.dtype | None) -> Iterator[None]:
    """Compute with adapter weights cast once, with gradients to the weights, until the end of this block.

    PEFT casts activations to float32 in front of float32 adapters, and autocast casts them and the weights back, in
    each of their layers, and again where a checkpoint recomputes them. The numbers are the same. Adapters with dropout,
    with a variant such as DoRA, or with weights of another type than float32 stay as they are.

    Args:
        model: with or without adapters, also wrapped.
        dtype: type in which autocast computes (`adapter_dtype`); None: nothing is cast.
    """
    layers = [module for module in model.modules() if type(module) is Linear] if dtype is not None else []
    changed: list[Any] = []
    try:
        for layer in layers:
            names = [name for name in layer.active_adapters if name in layer.lora_A]
            pairs = [(layer.lora_A[name], layer.lora_B[name]) for name in names]
            plain = all(isinstance(layer.lora_dropout[name], nn.Identity) for name in names) and not layer.lora_variant
            if not plain or any(linear.weight.dtype != torch.float32 for pair in pairs for linear in pair):
                continue
            layer.cast_input_dtype_enabled = False
            changed.append((layer, "cast_input_dtype_enabled"))
            linear: Any
            for linear in (linear for pair in pairs for linear in pair):
                linear.forward = partial(functional.linear, weight=linear.weight.to(dtype), bias=linear.bias)
                changed.append((linear, "forward"))
        yield
    finally:
        for module, name in changed:
            delattr(module, name)
