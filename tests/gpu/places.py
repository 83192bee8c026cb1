"""Where a test runs: a device, an attention, a number format."""

from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

KERNELS = {
    "flash": [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH],  # where a mask is read, flash attention cannot run
    "efficient": [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
    "math": [SDPBackend.MATH],
}
MISSING = {"flash_attention_2": is_flash_attn_2_available, "flash_attention_3": is_flash_attn_3_available}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def on_both(*names, cpu):
    """Cases `(device, name)`: all of them on a GPU, those in `cpu` on a CPU too."""
    here = [pytest.param(("cpu", name), id=f"cpu-{name}") for name in cpu]
    return [*here, *(pytest.param(("cuda", name), id=f"cuda-{name}", marks=pytest.mark.gpu) for name in names)]


@contextmanager
def attention(model, name):
    """The model with the attention called `name`: an implementation of transformers, or a back end of sdpa."""
    if name in MISSING and not MISSING[name]():
        pytest.skip(f"{name} is not installed")
    chosen = "sdpa" if name in KERNELS else name
    if name == "flex_attention" and hasattr(model.config, "text_config"):  # its kernels want heads of 16 or wider
        chosen = {"text_config": name}  # and those of the tiny towers are 12
    try:
        model.set_attn_implementation(chosen)
    except ValueError as error:
        if "does not support" not in str(error):
            raise
        pytest.skip(str(error).split(". ")[0])
    with sdpa_kernel(KERNELS[name]) if name in KERNELS else nullcontext():
        yield model


def to(batch, device, dtype):
    batch.inputs = {
        name: value.to(device, dtype if value.is_floating_point() else None) for name, value in batch.inputs.items()
    }
    return batch
