"""Does looking pay at 100 M parameters? One model from nothing, three methods, three starts, side by side on one GPU.

    PYTHONPATH=src:benchmarks python -m gpu.effect

The drawn questions of the demo and, where `--easy_vqa` has them, those of easy-VQA, by `benchmarks/methods`: a start is
warm-started in a process of its own and kept in `--starts`; then every method trains it, each in a process, all at the
same time. A line is written at every point of a course; what has not come to its end is run again by the same command.
"""

import argparse
import time
from collections.abc import Iterable
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from methods.contenders import METHODS
from methods.runs import Settings, Start
from methods.tasks import TASKS, easy_vqa

from gpu.measure import Budget, error_of
from gpu.results import FILE, Line, append, machine, read, runs_of

CHOSEN = ("plain", "VGR reward, scaled", "VPPO")
DRAWN, EASY = "drawn", "easy-VQA"
NAME = "effect, {}, seed {}"
SIZES = ("hidden_size", "num_layers", "num_heads", "vision_depth")
RATE = 3e-4  # of a model 64 wide


class Kept(Start):
    """A start whose warm-started weights are in a file, or come there; its course is written as it goes."""

    def __init__(self, flags: argparse.Namespace, task: str, seed: int, method: str = "") -> None:
        self.flags, self.method, self.name = flags, method, NAME.format(task, seed)
        torch.set_float32_matmul_precision("high")
        settings = Settings(steps=flags.steps, measure_every=max(flags.steps // 4, 1), questions=flags.questions)
        sizes = dict(zip(SIZES, flags.model, strict=True))
        asked = TASKS["style-0"] if task == DRAWN else easy_vqa(flags.easy_vqa)
        super().__init__(asked, seed, settings, device=flags.device, most=flags.most, **sizes)

    def _warm_up(self) -> None:
        file = self.flags.starts / f"{self.name}, {'-'.join(map(str, self.flags.model))}.pt"
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
        note(self.flags, self.name, self.method, found)


def run(flags: argparse.Namespace, task: str, seed: int, method: str = "") -> None:
    """Train a start by a method, to the end; without a method, make the start. What fails leaves a line."""
    began = time.monotonic()
    try:
        start = Kept(flags, task, seed, method)
        if method:
            end = start.run(METHODS[method], RATE * start.pace, closely=False)
            seconds = round(time.monotonic() - began)
            start.note({"end": end["accuracy"], "thoughts": end["thoughts"], "seconds": seconds})
    except Exception as error:
        note(flags, NAME.format(task, seed), method, error_of(error))
        raise


def note(flags: argparse.Namespace, name: str, method: str, found: dict[str, Any]) -> None:
    """Write a line."""
    append(flags.output, Line(name, method, machine(flags.device), "python -m gpu.effect", found))
    print(name, method, found, flush=True)


def side_by_side(tasks: Iterable[tuple[Any, ...]], ends: float) -> None:
    """A process that runs each, until the time is over."""
    context = get_context("spawn")
    processes = [context.Process(target=run, args=task) for task in tasks]
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
    parser.add_argument("--seconds", type=float, default=240, help="without which nothing of it begins")
    parser.add_argument("--easy_vqa", type=Path, default=Path(".gpu/easy_vqa"), help="train.parquet and test.parquet")
    parser.add_argument("--starts", type=Path, default=Path(".gpu/starts"))
    parser.add_argument("--output", type=Path, default=FILE)
    flags, budget = parser.parse_args(arguments), Budget()
    lines, tasks = read(flags.output), [DRAWN, *([EASY] if flags.easy_vqa.is_dir() else [])]
    missing = [
        (task, seed, method)
        for task, seed, method in product(tasks, flags.seeds, CHOSEN)
        if method not in runs_of(lines, NAME.format(task, seed), "end")
    ]
    if missing and budget.fits("effect", flags.seconds):
        starts = dict.fromkeys((task, seed) for task, seed, _ in missing)
        side_by_side([(flags, *start) for start in starts], budget.ends - budget.left / 2)
        side_by_side([(flags, *one) for one in missing], budget.ends)


if __name__ == "__main__":
    main()
