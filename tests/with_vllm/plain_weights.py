"""Weights of vLLM on a CPU that stay where they are, so that new ones can be put in their place.

vLLM would repack those of linear layers, of convolutions and of the head, and go on with the repacked ones.
"""

from collections.abc import Callable
from typing import Any

import torch
from safetensors.torch import load_file
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention


def keep_weights(layer: torch.nn.Module, remove_weight: bool) -> None:
    layer.cpu_linear = torch.nn.functional.linear


def with_plain_weights(convolve: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def changed(*, weight: torch.Tensor, is_weight_packed: bool, **given: Any) -> torch.Tensor:
        return convolve(weight=weight.squeeze(1), is_weight_packed=False, **given)  # (channels, width)

    return changed


utils.dispatch_cpu_unquantized_gemm = keep_weights
for name in ("_causal_conv1d_fwd_cpu", "_causal_conv1d_update_cpu"):
    setattr(gdn_attention, name, with_plain_weights(getattr(gdn_attention, name)))


class WeightsFromFile:
    """What a worker of a server has beside its own (`--worker-extension-cls`)."""

    def load_file(self, path: str) -> None:
        for named in load_file(path).items():
            self.model_runner.model.load_weights([named])
