"""What the benchmarks of steps and on GPUs have in common: adapters, a reward, and memory that does not disturb."""

import os
import sys

# Memory that is freed stays with the process: else a third of a step on a CPU is page faults, and varies.
TIMING_ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": str(2**34),
    "MALLOC_TRIM_THRESHOLD_": str(2**34),
    "MALLOC_TOP_PAD_": str(2**26),
}
LORA = r".*language_model.*\.(q|k|v|o|gate|up|down)_proj"


def uneven_reward(completion_ids: list[list[int]], **kwargs: object) -> list[float]:
    """Another value for nearly every completion, so that there is something to learn."""
    return [sum(ids) % 17 / 17 for ids in completion_ids]


def run_again_for_timing() -> None:
    """Start this command anew with `TIMING_ENVIRONMENT`, unless it has it; for all that is compared alike."""
    if not os.environ.keys() >= TIMING_ENVIRONMENT.keys():
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **TIMING_ENVIRONMENT})
