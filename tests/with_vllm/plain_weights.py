"""Weights of vLLM on a CPU that stay where they are, so that new ones can be put in their place.

vLLM would repack those of linear layers and of the head, and go on with the repacked ones.
"""

import torch
from safetensors.torch import load_file
from vllm.model_executor.layers import utils


def keep_weights(layer: torch.nn.Module, remove_weight: bool) -> None:
    layer.cpu_linear = torch.nn.functional.linear


utils.dispatch_cpu_unquantized_gemm = keep_weights


class WeightsFromFile:
    """What a worker of a server has beside its own (`--worker-extension-cls`)."""

    def load_file(self, path: str) -> None:
        for named in load_file(path).items():
            self.model_runner.model.load_weights([named])
