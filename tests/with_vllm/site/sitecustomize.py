"""Lets torchvision be imported beside a CPU build of torch, for which there is none.

Its compiled part does not load there, and importing it fails at two operators that nobody calls here. They are declared
when torchvision is about to be imported, in this process and in those that vLLM starts: put this folder on PYTHONPATH.
"""

import sys
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


sys.meta_path.insert(0, _BeforeTorchvision())
