"""Passes with shared prompts against plain ones: time, operations and memory; writes `results/sharing.json` and `.md`.

On a CPU, with nothing else running (operations and memory do not mind company: `--only operations memory`):

    python benchmarks/sharing.py --sizes 768,512,128,8 32,0,256,8 --repeats 3 --threads 1

On a GPU, with speeds and the largest G that fits:

    python benchmarks/sharing.py --device cuda --shape qwen2.5-vl-3b --attention sdpa flash_attention_2 --largest 256

A size is P,V,T,G: prompt tokens, vision tokens among them, completion tokens, completions per prompt. The model is a
Qwen2.5-VL with random weights and TRL's head. Every measurement is written when it is done; measured again, it replaces
the one before, and the others stay. The grid of the heat map:

    python benchmarks/sharing.py --grid --hidden 256 --layers 4 --places training generation --only operations seconds \
        --output benchmarks/results/sharing_grid.json
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from sharing_measure import (
    count_operations,
    largest_fitting,
    measure_bytes,
    measure_seconds,
    name_of,
    release_memory,
)
from sharing_models import MODEL_SHAPES, Size
from sharing_operations import operations_of
from sharing_passes import PLACES, Setting, make_run
from sharing_results import Results

RESULTS = Path(__file__).parent / "results" / "sharing.json"
H200 = 989e12  # dense bfloat16 operations per second
ON_GPU: dict[str, Any] = {
    "sizes": ["1536,1280,384,8"],
    "dtype": "bfloat16",
    "places": [PLACES[0], PLACES[2], PLACES[3], PLACES[5]],
}
ON_CPU: dict[str, Any] = {"sizes": ["768,512,128,8", "32,0,256,8"], "dtype": "float32", "places": list(PLACES)}
GRID = [
    f"{prompt},{completion},{generations}"
    for prompt, completion, generations in product(["64,32", "256,160", "768,512"], [32, 128, 256], [2, 4, 8])
]


def main() -> None:
    """Measure every size in every place."""
    flags = parse_flags()
    torch.set_num_threads(flags.threads)
    results = Results(flags.output)
    for attention in flags.attention:
        setting = Setting(flags.shape, flags.hidden, flags.layers, flags.device, flags.dtype, attention, flags.prompts)
        for text, place in product(flags.sizes, flags.places):
            size = Size.parse(text)
            key = {**asdict(setting), "threads": flags.threads, "size": text, "place": place}
            for name, measure in measurements(flags, setting, size, place).items():
                try:
                    found = measure()
                except (ImportError, torch.OutOfMemoryError) as error:
                    found = None
                    print(f"{text}, {place}, {attention}: no {name} ({str(error).splitlines()[0]})", file=sys.stderr)
                if found is not None:
                    results.add(key, **{name: found})
                    print(text, place, attention, name, found, flush=True)
                    if name == "seconds" and flags.peak:
                        results.add(key, speed=speeds(flags.peak, setting, size, place, found))


def measurements(flags: Any, setting: Setting, size: Size, place: str) -> dict[str, Callable[[], dict[str, Any]]]:
    """What is to be measured, by the name in the results."""
    everything: dict[str, Callable[[], dict[str, Any]]] = {
        "operations": partial(count_operations, setting, size, place),
        "seconds": partial(measure_seconds, setting, size, place, flags.repeats),
        "bytes": partial(measure_bytes, setting, size, place, flags.threads),
    }
    wanted = {name: measure for name, measure in everything.items() if name in flags.only}
    if flags.largest and place.startswith("training"):
        wanted["largest"] = partial(largest, setting, size, place, flags.largest)
    return wanted


def speeds(
    peak: float, setting: Setting, size: Size, place: str, seconds: dict[str, list[float]]
) -> dict[str, dict[str, float]]:
    """Images and tokens that were dealt with per second, and the share of the peak that the needed operations are."""
    found = {}
    rows = setting.prompts * size.generations
    for shared in (False, True):
        time = median(seconds[name_of(shared)])
        needed = operations_of(setting.model_shape, size, place, prompts=setting.prompts, shared=shared)
        found[name_of(shared)] = {
            "images per second": rows / time if size.vision else 0.0,
            "tokens per second": rows * (size.prompt + size.completion) / time,
            "fraction of peak": needed / time / peak,
        }
    return found


def largest(setting: Setting, size: Size, place: str, limit: int) -> dict[str, int]:
    """The largest G in [1, limit] of which one pass fits into the memory of the device."""

    def fits(shared: bool, generations: int) -> bool:
        try:
            make_run(setting, Size(size.prompt, size.vision, size.completion, generations), place)(shared)
        except torch.OutOfMemoryError:
            return False
        finally:
            release_memory()
        return True

    return {name_of(shared): largest_fitting(partial(fits, shared), limit) for shared in (False, True)}


def parse_flags() -> Any:
    """Of the command line; sizes, places and dtype depend on the device unless given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", metavar="P,V,T,G")
    parser.add_argument("--grid", action="store_true", help="the sizes of the heat map")
    parser.add_argument("--places", nargs="+", choices=PLACES)
    parser.add_argument("--shape", default="square", choices=["square", *MODEL_SHAPES])
    parser.add_argument("--hidden", type=int, default=512, help="of the shape square")
    parser.add_argument("--layers", type=int, default=8, help="of the shape square")
    parser.add_argument("--prompts", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"])
    parser.add_argument("--attention", nargs="+", default=["sdpa"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", nargs="*", choices=["operations", "seconds", "bytes"])
    parser.add_argument("--largest", type=int, default=0, metavar="G", help="look for the largest G up to this one")
    parser.add_argument("--peak", type=float, help="operations per second of the device; on a GPU those of an H200")
    parser.add_argument("--output", type=Path, default=RESULTS)
    flags = parser.parse_args()
    on_gpu = flags.device != "cpu"
    defaults = ON_GPU if on_gpu else ON_CPU
    flags.sizes = flags.sizes or (GRID if flags.grid else defaults["sizes"])
    flags.places = flags.places or defaults["places"]
    flags.dtype = flags.dtype or defaults["dtype"]
    flags.peak = flags.peak or (H200 if on_gpu else None)
    if flags.only is None:
        flags.only = ["seconds", "bytes"] if on_gpu else ["operations", "seconds", "bytes"]
    return flags


if __name__ == "__main__":
    main()
