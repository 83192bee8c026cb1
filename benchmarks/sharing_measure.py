"""Seconds, operations and bytes of passes with and without shared prompts."""

import gc
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import Any

import torch
from sharing_models import Size
from sharing_passes import Run, Setting, make_run
from torch.utils.flop_counter import FlopCounterMode

# Without these the C library keeps freed memory, and the peak says nothing.
MEMORY_ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}


def measure_seconds(setting: Setting, size: Size, place: str, repeats: int) -> dict[str, list[float]]:
    """All timed passes, plain and shared in turns after one of each that warms up.

    The order within a turn alternates, so that a machine that slows down does not favour one of them. On a CPU a small
    pass warms up; on a GPU kernels are chosen by size.
    """
    if setting.device == "cpu":
        _both(make_run(setting, Size(max(size.prompt // 8, 24), 4 if size.vision else 0, 4, 2), place))
    run = make_run(setting, size, place)
    if setting.device != "cpu":
        _both(run)
    turns = [_both(run, first=bool(turn % 2)) for turn in range(repeats)]
    release_memory()
    return {name_of(shared): [round(turn[shared], 4) for turn in turns] for shared in (False, True)}


def _both(run: Run, *, first: bool = False) -> dict[bool, float]:
    """Seconds of a shared and a plain pass; `first` is whether the shared one comes first."""
    return {shared: run(shared) for shared in (first, not first)}


def release_memory() -> None:
    """Give back what is not in use any more, for whatever is measured next."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def count_operations(setting: Setting, size: Size, place: str) -> dict[str, int]:
    """Operations of matrix products and attention, as PyTorch counts them: over all keys, seen or not."""
    run = make_run(setting, size, place)
    counts = {}
    for shared in (False, True):
        with FlopCounterMode(display=False, custom_mapping=ATTENTION_ON_CPU) as counter:
            run(shared)
        counts[name_of(shared)] = counter.get_total_flops()
    return counts


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


def measure_bytes(setting: Setting, size: Size, place: str, threads: int) -> dict[str, int]:
    """Peak memory of one pass above that of libraries, model and batch, each in a process of its own."""
    idle, plain, shared = (_peak_elsewhere(setting, size, place, kind, threads) for kind in ("none", "plain", "shared"))
    return {"plain": plain - idle, "shared": shared - idle}


def _peak_elsewhere(setting: Setting, size: Size, place: str, kind: str, threads: int) -> int:
    task = {"setting": asdict(setting), "size": str(size), "place": place, "kind": kind, "threads": threads}
    output = subprocess.run(
        [sys.executable, __file__, json.dumps(task)],
        env={**os.environ, **MEMORY_ENVIRONMENT},
        check=True,
        capture_output=True,
        text=True,
    )
    return int(output.stdout.split()[-1])


def _report_peak(task: dict[str, Any]) -> None:
    """In the process of its own: print the peak after one pass, or after none."""
    torch.set_num_threads(task["threads"])
    setting = Setting(**task["setting"])
    run = make_run(setting, Size.parse(task["size"]), task["place"])
    run.prepare(task["kind"] == "shared")
    if task["kind"] != "none":
        run(task["kind"] == "shared")
    print(torch.cuda.max_memory_allocated() if setting.device.startswith("cuda") else resident_peak())


def resident_peak() -> int:
    """VmHWM of this process in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def name_of(shared: bool) -> str:
    """Of a column of the results."""
    return "shared" if shared else "plain"


def ratio(pair: dict[str, Any]) -> float:
    """Shared over plain, of medians where there are several values."""
    plain, shared = (
        statistics.median(pair[name]) if isinstance(pair[name], list) else pair[name] for name in ("plain", "shared")
    )
    return shared / plain


def largest_fitting(fits: Callable[[int], bool], limit: int) -> int:
    """The largest number in [1, limit] that fits, found by doubling and halving; 0 if not even 1 does."""
    good, bad = 0, 1
    while bad <= limit and fits(bad):
        good, bad = bad, 2 * bad
    bad = min(bad, limit + 1)
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good


if __name__ == "__main__":
    _report_peak(json.loads(sys.argv[1]))
