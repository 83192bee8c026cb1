"""Counted operations of attention on a CPU, and peak memory of a process."""

from math import prod
from pathlib import Path
from typing import Any

import torch

# Without these the C library keeps freed memory, and the peak says nothing.
MEMORY_ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}


def _attention(query: Any, key: Any, *rest: Any, **options: Any) -> int:
    """Scores and sums of values; shapes (N, H, queries or keys, D)."""
    return 4 * prod(query) * key[-2]


def _attention_backward(gradient: Any, query: Any, key: Any, *rest: Any, **options: Any) -> int:
    """Scores again, and the gradients of scores, values, queries and keys."""
    return 10 * prod(query) * key[-2]


# PyTorch counts those of its other kernels.
ATTENTION_ON_CPU = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}


def resident_peak() -> int:
    """VmHWM of this process in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
