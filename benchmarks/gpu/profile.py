"""Where a step with LoRA spends its time on a GPU: kernels, and the gaps between them, of decoding and of the update.

    PYTHONPATH=src:benchmarks python -m gpu.profile --variant ours

Two groups, a static cache. The first two steps compile and warm up, the next two are timed, the last is profiled.
"""

import argparse
import json
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from sharing_models import MODEL_SHAPES
from sharing_passes import now
from step_cases import NONE, cases
from step_runs import Amounts, Place, StepRun
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import TrainerCallback

from gpu.plan import SHAPES, TINY, plan
from gpu.results import FILE, Line, append, machine

STEPS, TIMED = 5, (3, 4)
TOP = 20


class _Profiled(TrainerCallback):
    """Times some steps, and profiles the last."""

    def __init__(self, run: StepRun, device: str) -> None:
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.startswith("cuda") else [])]
        self.run, self.profiler = run, profile(activities=activities)
        self.times: list[dict[str, float]] = []
        self.trace: dict[str, Any] = {}

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == STEPS - 1:
            self.profiler.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step in TIMED:
            self.times.append({part: taken["seconds"] for part, taken in self.run.meter.found.items()})
        if state.global_step == STEPS:
            self.profiler.stop()
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / "trace.json"
                self.profiler.export_chrome_trace(str(file))
                self.trace = json.loads(file.read_text())


def annotate(trainer: Any, device: str) -> None:
    """Mark generation and the passes of the update in the trace."""
    for name, method in (("generation", "_generate_single_turn"), ("pass", "training_step")):
        plain = getattr(trainer, method)

        def marked(*args: Any, plain: Any = plain, name: str = name, **kwargs: Any) -> Any:
            now(device)
            with record_function(f"part {name}"):
                found = plain(*args, **kwargs)
                now(device)
            return found

        setattr(trainer, method, marked)


def found_in(events: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """What the second half of generation and the update consist of: kernels, gaps, waits."""
    events = [event for event in events if event.get("ph") == "X"]
    parts = {event["name"]: event for event in events if event.get("cat") == "user_annotation"}
    generation, update = parts["part generation"], parts["part pass"]  # the last pass, which holds the rollout
    ends = generation["ts"] + generation["dur"]
    windows = {
        "decoding": (generation["ts"] + generation["dur"] / 2, ends),
        "update": (ends, update["ts"] + update["dur"]),
    }
    return {name: _window(events, *window) for name, window in windows.items()}


def _window(events: list[dict[str, Any]], start: float, end: float) -> dict[str, Any]:
    inside = [event for event in events if start <= event["ts"] < end]
    kernels = sorted(
        (event for event in inside if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")),
        key=lambda event: event["ts"],
    )
    by_name: defaultdict[str, list[float]] = defaultdict(list)
    for event in kernels:
        by_name[event["name"]].append(event["dur"])
    gaps, covered, busy = [], start, 0.0
    for event in kernels:
        stop = event["ts"] + event["dur"]
        if event["ts"] > covered:
            gaps.append((event["ts"] - covered, event["name"]))
        busy += max(0.0, stop - max(covered, event["ts"]))
        covered = max(covered, stop)
    before: defaultdict[str, list[float]] = defaultdict(list)
    for gap, name in gaps:
        before[name].append(gap)

    def table(groups: dict[str, list[float]]) -> list[list[Any]]:
        rows = [[round(sum(each) / 1e3, 3), len(each), name[:160]] for name, each in groups.items()]
        return sorted(rows, reverse=True)[:TOP]

    runtime: defaultdict[str, list[float]] = defaultdict(list)
    host: defaultdict[str, list[float]] = defaultdict(list)
    for event in inside:
        if event.get("cat") in ("cuda_runtime", "cuda_driver"):
            runtime[event["name"]].append(event["dur"])
        if event.get("cat") in ("cpu_op", "user_annotation"):
            host[event["name"]].append(event["dur"])
    return {
        "ms": round((end - start) / 1e3, 2),
        "busy_ms": round(busy / 1e3, 2),
        "kernels": len(kernels),
        "graph_launches": len(runtime.get("cudaGraphLaunch", ())),
        "longest": table(by_name),
        "gaps": [sum(1 for gap, _ in gaps if gap > limit) for limit in (10, 100, 1000)],
        "gaps_before": table(before),
        "runtime": table(runtime),
        "host": table(host),
    }


def main(arguments: list[str] | None = None) -> None:
    """Profile one variant."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default=SHAPES[0], choices=[*SHAPES, *TINY])
    parser.add_argument("--variant", default="ours")
    parser.add_argument("--all_weights", action="store_true")
    parser.add_argument("--completion", type=int, default=64)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--output", type=Path, default=FILE)
    flags = parser.parse_args(arguments)
    (one,) = plan("generation", flags.shape)
    size = replace(one.size, completion=flags.completion)
    static = {} if flags.device == "cpu" else {"cache_implementation": "static"}
    case = replace(
        cases()["signals"],
        size=size,
        prompts=2 * STEPS,
        steps=STEPS,
        adapters=not flags.all_weights,
        uneven=False,
        shape=MODEL_SHAPES[flags.shape],
        variants={"none": {**NONE, **static}},
    )
    place = Place(flags.device, flags.dtype, "sdpa", torch.get_num_threads(), checkpointing=True)
    run = StepRun(place, case, "none", lambda: Amounts({"seconds": now(flags.device)}))
    annotate(run.trainer, flags.device)
    profiled = _Profiled(run, flags.device)
    run.trainer.add_callback(profiled)
    run()
    times = {part: statistics.median(each[part] for each in profiled.times) for part in profiled.times[0]}
    found = {"times": times, "tokens": flags.completion, **found_in(profiled.trace["traceEvents"])}
    append(
        flags.output,
        Line(f"{flags.shape} profile {size}", flags.variant, machine(flags.device), "python -m gpu.profile", found),
    )
    summary = {
        name: {k: v for k, v in part.items() if k in ("ms", "busy_ms", "kernels", "graph_launches", "gaps")}
        for name, part in found.items()
        if isinstance(part, dict) and "busy_ms" in part
    }
    print("PROFILE", flags.variant, {k: round(v, 3) for k, v in times.items()}, summary, flush=True)


if __name__ == "__main__":
    main()
