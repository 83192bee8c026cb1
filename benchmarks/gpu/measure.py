"""Seconds and peak memory of runs that take turns within the time that is left, and what the device itself can do."""

import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

Run = Callable[[], Any]
Note = Callable[[str, dict[str, Any]], None]  # (run, found) -> a line of the results
DENSE_BFLOAT16 = {"H200": 989e12, "H100": 989e12, "H800": 989e12, "GH200": 989e12, "A100": 312e12, "A800": 312e12}


class Budget:
    """The seconds that are left of a command: `make` sets when they end; without it, GPU_SECONDS from now on."""

    def __init__(self) -> None:
        self.ends = float(os.environ.get("GPU_DEADLINE") or time.time() + float(os.environ.get("GPU_SECONDS", 540)))

    @property
    def left(self) -> float:
        """Seconds, also below 0."""
        return self.ends - time.time()

    def fits(self, name: str, seconds: float) -> bool:
        """Whether so many seconds are left; a line says so where they are not."""
        if seconds > self.left:
            print(f"{name}: left out, takes about {seconds:.0f} s and {self.left:.0f} are left", flush=True)
        return seconds <= self.left


def take_turns(
    runs: Mapping[str, Run], note: Note, budget: Budget, *, device: str, repeats: int, had: Mapping[str, int]
) -> None:
    """Time every run in turns until it has its repeats; one of each warms up, and says whether the next one fits.

    Args:
        runs: what is compared; one that fails is left out.
        note: takes seconds, and on a GPU `peak`, the bytes of one run above what was allocated before it; of what warms
            up, seconds as `first`.
        repeats: of each run.
        had: repeats that are there already, by run.
    """
    missing = {name: repeats - had.get(name, 0) for name in runs if had.get(name, 0) < repeats}
    warm: dict[str, float] = {}
    for name in missing:
        if not budget.fits(f"{name}, to warm up", max(warm.values(), default=0.0)):
            break
        try:
            warm[name] = timed(runs[name], device)["seconds"]
            note(name, {"first": warm[name]})
        except Exception as error:
            note(name, error_of(error))
        release()
    names = list(warm)
    for turn in range(max(missing.values(), default=0)):
        for name in [*names[turn % len(names) :], *names[: turn % len(names)]] if names else ():
            if missing[name] > turn:
                if not budget.fits(f"{name}, a repeat", warm[name]):
                    return
                note(name, timed(runs[name], device))


def timed(run: Run, device: str) -> dict[str, Any]:
    """What one run takes."""
    on_gpu = device.startswith("cuda")
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if on_gpu else 0
    synchronise(device)
    started = time.perf_counter()
    run()
    synchronise(device)
    found: dict[str, Any] = {"seconds": round(time.perf_counter() - started, 5)}
    return found | ({"peak": torch.cuda.max_memory_allocated() - before} if on_gpu else {})


def error_of(error: Exception) -> dict[str, str]:
    """What is written of a failure."""
    return {"error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]}


@contextmanager
def cudnn(on: bool) -> Iterator[None]:
    """Let sdpa take cuDNN's attention, which it takes first where it may, or not."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(on)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def synchronise(device: str) -> None:
    """Wait for all that was started on the device."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def release() -> None:
    """Give back memory that is not in use any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def peak_operations(name: str, measured: float) -> float:
    """Operations per second by the vendor's sheet, dense bfloat16; those measured for a device that is not listed."""
    return next((peak for model, peak in DENSE_BFLOAT16.items() if model in name), measured)


def device_rates(device: str, *, side: int, repeats: int = 10) -> dict[str, float]:
    """Operations per second of a square matrix product, and bytes read and written per second by a copy."""
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    some, others = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    copied = torch.empty_like(some)

    def median(run: Run) -> float:
        return statistics.median([timed(run, device)["seconds"] for _ in range(repeats)][1:])

    operations = 2 * side**3 / median(lambda: some @ others)
    return {"operations": operations, "bytes": 2 * some.nbytes / median(lambda: copied.copy_(some))}
