"""Does looking pay at 100 M parameters? One model from nothing, three methods, three starts, side by side on one GPU.

    PYTHONPATH=src:benchmarks python -m gpu.effect

The drawn questions of the demo, by `benchmarks/methods`: a start is warm-started in a process of its own and kept in
`--starts`; then every method trains it, each in a process, all at the same time. A line is written at every point of a
course; what has not come to its end is run again by the same command.
"""

import argparse
import time
from collections.abc import Callable, Iterable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from methods.contenders import METHODS
from methods.runs import Settings, Start
from methods.tasks import TASKS

from gpu.measure import Budget
from gpu.results import FILE, Line, append, machine, read, runs_of

CHOSEN = ("plain", "VGR reward, scaled", "VPPO")
NAME = "effect, seed {}"
SIZES = ("hidden_size", "num_layers", "num_heads", "vision_depth")
RATE = 3e-4  # of a model 64 wide


class Kept(Start):
    """A start whose warm-started weights are in a file, or come there; its course is written as it goes."""

    def __init__(self, flags: argparse.Namespace, seed: int, method: str = "") -> None:
        self.flags, self.method = flags, method
        torch.set_float32_matmul_precision("high")
        settings = Settings(steps=flags.steps, measure_every=max(flags.steps // 4, 1), questions=flags.questions)
        sizes = dict(zip(SIZES, flags.model, strict=True))
        super().__init__(TASKS["style-0"], seed, settings, device=flags.device, most=flags.most, **sizes)

    def _warm_up(self) -> None:
        file = self.flags.starts / f"{self.seed}-{'-'.join(map(str, self.flags.model))}.pt"
        if file.exists():
            self.model.load_state_dict(torch.load(file))
            return
        super()._warm_up()
        file.parent.mkdir(parents=True, exist_ok=True)
        weights = {name: value.cpu() for name, value in self.model.state_dict().items()}
        torch.save(weights, file.with_suffix(".part"))
        file.with_suffix(".part").rename(file)

    def measured(self, step: int, tokens: int, accuracy: float) -> None:
        """Write a point of the course."""
        self.note({"step": step, "tokens": tokens, "accuracy": accuracy})

    def note(self, found: dict[str, Any]) -> None:
        """Write a line."""
        where = machine(self.flags.device)
        append(self.flags.output, Line(NAME.format(self.seed), self.method, where, "python -m gpu.effect", found))
        print(NAME.format(self.seed), self.method, found, flush=True)


def run(flags: argparse.Namespace, seed: int, method: str) -> None:
    """Train a start by a method, to the end."""
    began, start = time.monotonic(), Kept(flags, seed, method)
    found = start.run(METHODS[method], RATE * start.pace, closely=False)
    start.note({"end": found["accuracy"], "thoughts": found["thoughts"], "seconds": round(time.monotonic() - began)})


def side_by_side(target: Callable[..., Any], tasks: Iterable[tuple[Any, ...]], ends: float) -> None:
    """A process for each, until the time is over."""
    context = get_context("spawn")
    processes = [context.Process(target=target, args=task) for task in tasks]
    for process in processes:
        process.start()
    for process in processes:
        process.join(max(0.0, ends - time.time()))
        process.terminate()
        process.join()


def main(arguments: list[str] | None = None) -> None:
    """Run what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--model", type=int, nargs=4, default=[768, 12, 12, 3], metavar=SIZES)
    parser.add_argument("--steps", type=int, default=40, help="of reinforcement")
    parser.add_argument("--most", type=int, default=400, help="steps of each part of the warm start")
    parser.add_argument("--questions", type=int, default=160, help="of which accuracy is measured in a course")
    parser.add_argument("--seconds", type=float, default=420, help="that all of it should take")
    parser.add_argument("--starts", type=Path, default=Path(".gpu/starts"))
    parser.add_argument("--output", type=Path, default=FILE)
    flags, budget = parser.parse_args(arguments), Budget()
    lines = read(flags.output)
    done = {(seed, method) for seed in flags.seeds for method in runs_of(lines, NAME.format(seed), "end")}
    missing = [(seed, method) for method in CHOSEN for seed in flags.seeds if (seed, method) not in done]
    if missing and budget.fits("effect", flags.seconds):
        side_by_side(Kept, [(flags, seed) for seed in dict.fromkeys(seed for seed, _ in missing)], budget.ends)
        side_by_side(run, [(flags, *one) for one in missing], budget.ends)


if __name__ == "__main__":
    main()
