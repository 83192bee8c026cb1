"""What single releases that are taken cannot do, and what tests put in its place."""

import peft
import pytest
import torch
import transformers
from packaging.version import Version
from transformers.integrations import moe

# Layers ignore the cache under gradient checkpoints, and keep states of linear attention that cannot be continued.
installed = Version(transformers.__version__)
KEEPS_LESS = installed < Version("5.17")
reads_images = pytest.mark.skipif(installed == Version("5.24"), reason="Llama 4 with images fails in 5.24.0, plain too")
keeps_prefix = pytest.mark.skipif(
    installed >= Version("5.24") and Version(peft.__version__) <= Version("0.21.2"), reason="generates without it"
)


def replace_missing_products() -> None:
    """Compute experts one by one where torch has their grouped products on GPUs only (2.8)."""
    if Version(torch.__version__) < Version("2.9") and not torch.cuda.is_available():
        moe._can_use_grouped_mm = lambda *tensors: False
