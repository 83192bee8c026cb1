"""One rollout and update at real size on a CPU, TRL's trainer and ours: seconds, memory, gradients of the adapters.

    make real-size            # half an hour to an hour on two cores with 24 GB, by shape; nothing else may run
    python benchmarks/real_size.py --shapes tiny-qwen2.5-vl --size 40,16,8,4 --output /tmp/real_size

Models have the architecture of their shape and random weights in bfloat16, with LoRA on the language model and gradient
checkpointing. Each part runs in a process of its own and is kept in the output folder, so a command that was cut goes
on where it was: parts that are there are not run again. All parts train on the same drawn completions, so their
gradients compare: ours against TRL's with the same attention kernel, and TRL's with eager attention against that, which
is the spread that kernels alone give. The part with eager attention generates nothing, and `--parts` can leave it out.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import torch
from machine import describe_machine
from sharing_measure import MEMORY_ENVIRONMENT
from sharing_models import MODEL_SHAPES, Size
from sharing_passes import now
from step_cases import NONE, Case
from step_runs import Amounts, Place, StepRun
from transformers import TrainerCallback

PARTS = {"ours": ("ours", "sdpa"), "trl": ("trl", "sdpa"), "trl eager": ("trl", "eager")}  # variant, attention
OUTPUT = Path("runs/real_size")


class _KeepGradients(TrainerCallback):
    """Keeps the gradients of the trained parameters, as the optimizer gets them."""

    def __init__(self) -> None:
        self.found: dict[str, torch.Tensor] = {}

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        named = kwargs["model"].named_parameters()
        self.found = {name: value.grad.float().cpu().clone() for name, value in named if value.grad is not None}


def run_part(
    shape: str, size: Size, part: str, device: str, threads: int
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return seconds and peak bytes of the rollout and update of a part, and its gradients by parameter."""
    variant, attention = PARTS[part]
    place = Place(device, "bfloat16", attention, threads, checkpointing=True, shape=shape)
    unclipped = {"max_grad_norm": 1e9}
    case = Case(
        title=shape,
        size=size,
        prompts=1,
        dead=0,
        uneven=False,
        adapters=True,
        shape=MODEL_SHAPES[shape],
        variants={"trl": unclipped, "ours": {**NONE, **unclipped}},
    )
    run, gradients = StepRun(place, case, variant, partial(_read_clocks, device)), _KeepGradients()
    run.trainer.add_callback(gradients)
    _draw_completions(run.trainer, size, generates=part != "trl eager")
    found = run()
    rollout = Counter(found["step"])
    rollout.subtract(found["update"])
    amounts = {name: {"rollout": rollout[name], "update": found["update"][name]} for name in rollout}
    return {**amounts, "bytes": dict(run.meter.peaks)}, gradients.found


def _read_clocks(device: str) -> Amounts:
    """Return seconds, and those that processors have worked, which other programs on the machine hardly change."""
    return Amounts({"seconds": now(device), "processor_seconds": time.process_time()})


def _draw_completions(trainer: Any, size: Size, *, generates: bool) -> None:
    """Let a trainer train on the same drawn words, whatever it generates."""
    words = torch.randint(16, len(trainer._tokenizer) - 8, (size.generations, size.completion), generator=_generator())
    plain = trainer._generate_single_turn

    def generate(prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        rest = plain(prompt_ids, *args, **kwargs)[1:] if generates else (None,)
        return (words.tolist(), *rest)

    trainer._generate_single_turn = generate


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def compare_gradients(ours: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> float:
    """Return the norm of the difference of two sets of gradients over the norm of the second."""
    distance = sum(float((ours[name] - other).square().sum()) for name, other in others.items())
    return float((distance / sum(float(other.square().sum()) for other in others.values())) ** 0.5)


def describe_shape(shape: str, size: Size, parts: dict[str, Any], distances: dict[str, float]) -> list[str]:
    """Return the lines of a shape."""
    lines = [f"{shape}: P {size.prompt}, V {size.vision}, T {size.completion}, G {size.generations}, bf16, LoRA"]
    for part, found in parts.items():
        seconds, worked, peak = found["seconds"], found["processor_seconds"], max(found["bytes"].values())
        stages = ["update"] if part == "trl eager" else ["rollout", "update"]
        took = ", ".join(f"{stage} {seconds[stage]:.1f} s (processors {worked[stage]:.1f} s)" for stage in stages)
        lines.append(f"  {part}: {took}, peak {peak / 1e9:.2f} GB")
    for unit in ("seconds", "processor_seconds"):
        steps = [sum(parts[part][unit].values()) for part in ("ours", "trl")]
        lines.append(f"  step, ours / TRL's, {unit.replace('_', ' ')}: {steps[0] / steps[1]:.3f}")
    found = ", ".join(f"{part} {distance:.2g}" for part, distance in distances.items())
    lines.append(f"  gradients, distance from TRL's: {found}")
    return lines


def main() -> None:
    """Run the parts that are not there yet, each in a process of its own; print the lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=[*MODEL_SHAPES], default=["qwen3-vl-2b", "qwen2.5-vl-3b"])
    parser.add_argument("--size", type=Size.parse, default=Size(1088, 1024, 64, 8), help="P,V,T,G")
    parser.add_argument("--device", default="cpu", help="on a GPU, only the distances of gradients are of use")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--parts", nargs="+", choices=[*PARTS], default=[*PARTS], help="ours and trl are needed")
    parser.add_argument("--part", choices=[*PARTS], help="run this part of one shape in this process")
    flags = parser.parse_args()
    flags.output.mkdir(parents=True, exist_ok=True)
    for shape in flags.shapes:
        files = {part: flags.output / f"{shape} {flags.size} {part}.pt" for part in flags.parts}
        if flags.part is not None:
            found, gradients = run_part(shape, flags.size, flags.part, flags.device, flags.threads)
            unfinished = files[flags.part].with_suffix(".tmp")
            torch.save({"found": found, "gradients": gradients}, unfinished)
            unfinished.rename(files[flags.part])
            continue
        for part, file in files.items():
            if not file.exists():
                task = ["--shapes", shape, "--size", str(flags.size), "--threads", str(flags.threads), "--part", part]
                task += ["--device", flags.device, "--output", str(flags.output)]
                command = [sys.executable, "-W", "ignore", __file__, *task]
                subprocess.run(command, env={**os.environ, **MEMORY_ENVIRONMENT}, check=True)
            print(shape, part, json.dumps(torch.load(file)["found"]), flush=True)
        kept = {part: torch.load(file) for part, file in files.items()}
        of_trl = kept["trl"]["gradients"]
        distances = {part: compare_gradients(kept[part]["gradients"], of_trl) for part in kept if part != "trl"}
        print(describe_machine(flags.threads))
        print(
            "\n".join(
                describe_shape(shape, flags.size, {part: each["found"] for part, each in kept.items()}, distances)
            )
        )


if __name__ == "__main__":
    main()
