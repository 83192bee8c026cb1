"""Runs of the bench that are missing; then its leaderboard.

    PYTHONPATH=src:benchmarks python -m methods --tasks style-0 style-32 --methods plain oracle random

Every method gets the same warm-started models. Its learning rate is that which does best on the tuning seeds, of the
same few for every method of an optimizer; the other seeds measure. What `results/methods.jsonl` holds is not run again,
so a method is added by adding its runs. `--write` makes `results/methods.md` of what there is.
"""

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, fields
from typing import Any

from methods.contenders import METHODS
from methods.leaderboard import RESULTS, TUNING, Run, best_rate, read, write
from methods.runs import Settings, Start
from methods.tasks import TASKS


def main(arguments: list[str] | None = None) -> None:
    """Tune, measure, write."""
    flags = parse_flags(arguments)
    settings = Settings(**{part.name: getattr(flags, part.name) for part in fields(Settings)})
    if not flags.write:
        run_missing(flags, settings)
    write(read(settings), settings)


def parse_flags(arguments: list[str] | None) -> argparse.Namespace:
    """Return the flags; those of `Settings` belong to what is compared."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(5)))
    parser.add_argument("--tuning_seeds", type=int, nargs="+", default=[TUNING])
    parser.add_argument("--learning_rates", type=float, nargs="+", help="instead of the method's")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no run after that")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--write", action="store_true", help="write the leaderboard of what there is, run nothing")
    for part in fields(Settings):
        parser.add_argument(f"--{part.name}", type=type(part.default), default=part.default)
    return parser.parse_args(arguments)


def run_missing(flags: argparse.Namespace, settings: Settings) -> None:
    """Run what is missing, the tuning first; a model is warm-started once for all methods of a task and seed."""
    ends = time.monotonic() + 60 * flags.minutes
    for task in flags.tasks:
        for seeds, rates in ((flags.tuning_seeds, rates_to_try), (flags.seeds, chosen_rate)):
            for seed in seeds:
                start = None
                for method, rate in missing(flags, settings, task, seed, rates):
                    if time.monotonic() > ends:
                        return
                    start = start or Start(TASKS[task], seed, settings, device=flags.device)
                    found = start.run(METHODS[method], rate, closely=seed < TUNING)
                    keep(Run(task, method, seed, rate, found), settings)


def missing(
    flags: argparse.Namespace, settings: Settings, task: str, seed: int, rates: Any
) -> Iterator[tuple[str, float]]:
    """Yield the methods, with learning rates, that have not run on a task and seed."""
    runs = read(settings)
    there = {(run.task, run.method, run.seed, run.learning_rate) for run in runs}
    for method in flags.methods:
        for rate in rates(flags, runs, task, method):
            if (task, method, seed, rate) not in there:
                yield method, rate


def rates_to_try(flags: argparse.Namespace, runs: list[Run], task: str, method: str) -> list[float]:
    """Return every learning rate."""
    return list(flags.learning_rates or METHODS[method].learning_rates)


def chosen_rate(flags: argparse.Namespace, runs: list[Run], task: str, method: str) -> list[float]:
    """Return the learning rate that did best on the tuning seeds; the first where there are none."""
    return [best_rate(runs, task, method) or rates_to_try(flags, runs, task, method)[0]]


def keep(run: Run, settings: Settings) -> None:
    """Append a run to the results."""
    with RESULTS.with_suffix(".jsonl").open("a") as lines:
        lines.write(json.dumps(asdict(run) | {"settings": asdict(settings)}) + "\n")
    print(run.task, run.method, run.seed, run.learning_rate, run.found["accuracy"], flush=True)


if __name__ == "__main__":
    main()
