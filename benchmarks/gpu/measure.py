"""Seconds and peak memory of runs that take turns, and what the device itself can do."""

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

DENSE_BFLOAT16 = {"H200": 989e12, "H100": 989e12, "H800": 989e12, "GH200": 989e12, "A100": 312e12, "A800": 312e12}


def interleaved(runs: Mapping[str, Callable[[], Any]], *, device: str, repeats: int) -> dict[str, dict[str, Any]]:
    """Time every run `repeats` times in turns, after one of each that warms up; the order changes from turn to turn.

    Returns:
        Per name `seconds` (all of them), and on a GPU `peak`: bytes of one run above what was allocated before it.
    """
    found: dict[str, dict[str, Any]] = {name: {"seconds": []} for name in runs}
    for run in runs.values():
        run()
    names = list(runs)
    for turn in range(repeats):
        for name in [*names[turn % len(names) :], *names[: turn % len(names)]]:
            before = _allocated(device) if turn == 0 else None
            synchronise(device)
            started = time.perf_counter()
            given = runs[name]()
            synchronise(device)
            seconds = given if isinstance(given, float) else time.perf_counter() - started
            found[name]["seconds"].append(round(seconds, 5))
            if before is not None:
                found[name]["peak"] = torch.cuda.max_memory_allocated() - before
    return found


def synchronise(device: str) -> None:
    """Wait for all that was started on the device."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def release() -> None:
    """Give back memory that is not in use any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _allocated(device: str) -> int | None:
    """Bytes that are allocated before a run whose peak counts from here; None where there is no GPU."""
    if not device.startswith("cuda"):
        return None
    release()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def peak_operations(name: str, measured: float) -> float:
    """Operations per second by the vendor's sheet, dense bfloat16; those measured for a device that is not listed."""
    return next((peak for model, peak in DENSE_BFLOAT16.items() if model in name), measured)


def device_rates(device: str, *, side: int, repeats: int = 10) -> dict[str, float]:
    """Operations per second of a square matrix product, and bytes read and written per second by a copy."""
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    some, others = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    copied = torch.empty_like(some)
    product = _median_seconds(lambda: some @ others, device, repeats)
    copy = _median_seconds(lambda: copied.copy_(some), device, repeats)
    return {"operations": 2 * side**3 / product, "bytes": 2 * some.nbytes / copy}


def _median_seconds(run: Callable[[], Any], device: str, repeats: int) -> float:
    return statistics.median(interleaved({"run": run}, device=device, repeats=repeats)["run"]["seconds"])


def kernels_of(run: Callable[[], Any], device: str, *, count: int = 15) -> dict[str, float]:
    """The kernels that take most of a run's time on the device, and their share of it."""
    from torch.profiler import ProfilerActivity, profile

    on_gpu = device.startswith("cuda")
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiler:
        run()
        synchronise(device)
    events = profiler.key_averages()
    times = {event.key: event.self_device_time_total if on_gpu else event.self_cpu_time_total for event in events}
    total = sum(times.values()) or 1.0
    largest = sorted(times.items(), key=lambda item: -item[1])[:count]
    return {name[:120]: round(value / total, 4) for name, value in largest}
