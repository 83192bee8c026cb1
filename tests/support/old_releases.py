"""What the oldest releases that are taken cannot do, and what tests put in its place."""

import torch
import transformers
from packaging.version import Version
from transformers.integrations import moe

# Layers ignore the cache under gradient checkpoints, and keep states of linear attention that cannot be continued.
KEEPS_LESS = Version(transformers.__version__) < Version("5.17")


def replace_missing_products() -> None:
    """Compute experts one by one where torch has their grouped products on GPUs only (2.8)."""
    if Version(torch.__version__) < Version("2.9") and not torch.cuda.is_available():
        moe._can_use_grouped_mm = lambda *tensors: False
