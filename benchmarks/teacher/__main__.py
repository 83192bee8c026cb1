"""Runs of the teacher study that are missing; then their page.

    PYTHONPATH=src:benchmarks python -m teacher --seeds 0 1 2 3 4

A model of every seed is taught once and kept in `runs/teacher`; every method trains a copy of it. What
`results/teacher.jsonl` holds is not run again. `--tune` runs the learning rates and group sizes of plain training on
the seed that measures nothing else. `--write` makes `results/teacher.md` of what there is.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

from machine import describe_machine, read_commit
from methods.seeds import interval

from teacher.degraded import (
    DESCRIBED_LOOKS,
    GROUND,
    LOOK_SWEEP,
    LOOKS,
    NEVER_TRAINED,
    SLOWER,
    TRAINED,
    DegradedDescribedStart,
    DegradedStart,
    look_row,
)
from teacher.degraded import HEADS as LOOK_HEADS
from teacher.described import CHOSEN, DescribedStart
from teacher.runs import LARGER, METHODS, NOISIER, SWEEP, TUNING, Method, Settings, Start
from teacher.task import DIGIT, NOISE, SIDE

ROOT = Path(__file__).parents[2]
RESULTS = Path(os.environ.get("RESULTS", ROOT / "benchmarks" / "results")) / "teacher"
FINDINGS, DESCRIBED, LOOKED = (Path(__file__).with_name(f"{name}.md") for name in ("findings", "described", "degraded"))
Line = dict[str, Any]  # of `teacher.jsonl`: method, seed, settings, commit, and what `Start.run` returns


def main(arguments: list[str] | None = None) -> None:
    """Run, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(5)))
    parser.add_argument("--methods", nargs="+", choices=[*{**METHODS, **CHOSEN, **LOOKS}])
    parser.add_argument("--described", action="store_true", help="answers with a description before the digit")
    parser.add_argument("--degraded", action="store_true", help="degraded pictures, whose originals a teacher sees")
    parser.add_argument("--tune", action="store_true", help="choose the options of plain training")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no run after that")
    parser.add_argument("--write", action="store_true", help="write the page of what there is, run nothing")
    for part in fields(Settings):
        parser.add_argument(f"--{part.name}", type=type(part.default), default=part.default)
    flags = parser.parse_args(arguments)
    settings = Settings(**{part.name: getattr(flags, part.name) for part in fields(Settings)})
    ends = time.monotonic() + 60 * flags.minutes
    methods, kind, sweep = METHODS, Start, SWEEP
    if flags.degraded and flags.described:
        methods, kind, sweep = DESCRIBED_LOOKS, DegradedDescribedStart, LOOK_SWEEP
    elif flags.described:
        methods, kind = CHOSEN, DescribedStart
    elif flags.degraded:
        methods, kind, sweep = LOOKS, DegradedStart, LOOK_SWEEP
    if flags.tune and not flags.write:
        run_missing([TUNING], sweep, settings, ends, kind)
    elif not flags.write:
        methods = {name: methods[name] for name in flags.methods or methods}
        run_missing(flags.seeds, methods, settings, ends, kind)
    write(read(settings), settings)


def run_missing(
    seeds: Sequence[int], methods: Mapping[str, Method], settings: Settings, ends: float, kind: type[Start] = Start
) -> None:
    """Run what is missing, and append each run to the results."""
    commit = read_commit()
    for seed in seeds:
        there = {line["method"] for line in read(settings, kind) if line["seed"] == seed}
        start = None
        for name, method in methods.items():
            if name in there or time.monotonic() > ends:
                continue
            start = start or kind(seed, settings, ROOT / "runs" / "teacher" / kind.task)
            found = start.run(method)
            line = {
                "task": kind.task,
                "method": name,
                "seed": seed,
                "settings": asdict(settings),
                "commit": commit,
                **found,
            }
            with RESULTS.with_suffix(".jsonl").open("a") as lines:
                lines.write(json.dumps(line) + "\n")
            print(name, seed, [point[2] for point in found["course"]], found["seconds"], flush=True)


def read(settings: Settings, kind: type[Start] = Start) -> list[Line]:
    """Return the runs of these settings and task."""
    file = RESULTS.with_suffix(".jsonl")
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [line for line in lines if (line.get("task", ""), line["settings"]) == (kind.task, asdict(settings))]


def accuracy_at(course: Sequence[Sequence[float]], positions: float) -> float | None:
    """Return the accuracy of a course after so many positions, between points on a line; None: it ends before."""
    for (_, before, low), (_, after, high) in pairwise(course):
        if before <= positions <= after:
            return low + (high - low) * (positions - before) / (after - before)
    return None


HEADS = (
    "method", "seeds", "accuracy after each quarter", "accuracy", "against plain", "by seed", "at plain's positions",
    "positions", "sampled", "crop", "larger", "noisier", "CPU seconds per step",
)  # fmt: skip


def table_row(name: str, lines: Sequence[Line]) -> str:
    """Return the row of a method."""
    plain = {line["seed"]: line for line in lines if line["method"] == "plain"}
    runs = {line["seed"]: line for line in lines if line["method"] == name}
    quarters = zip(*([point[2] for point in run["course"]] for run in runs.values()), strict=True)
    gains = [run["accuracy"] - plain[seed]["accuracy"] for seed, run in sorted(runs.items()) if seed in plain]
    against = by_seed = ""
    if name != "plain" and gains:
        ends = " to ".join(f"{end:+.3f}" for end in interval(gains))
        against = f"{statistics.mean(gains):+.3f}" + (f" ({ends})" if len(gains) >= 3 else "")
        by_seed = ", ".join(f"{gain:+.2f}" for gain in gains)
    equal = [accuracy_at(run["course"], plain[seed]["course"][-1][1]) for seed, run in runs.items() if seed in plain]
    reached = [value for value in equal if value is not None]

    def mean(measure: str) -> str:
        return f"{statistics.mean(run[measure] for run in runs.values()):.3f}"

    spread = f" ± {statistics.stdev(run['accuracy'] for run in runs.values()):.3f}" if len(runs) > 1 else ""
    cells = [
        name,
        str(len(runs)),
        " ".join(f"{statistics.mean(values):.2f}" for values in quarters),
        mean("accuracy") + spread,
        against,
        by_seed,
        f"{statistics.mean(reached):.3f}" if len(reached) == len(runs) else "",
        f"{statistics.mean(run['course'][-1][1] for run in runs.values()) / 1e6:.2f} M",
        *map(mean, ("sampled", "crop", "larger", "noisier", "CPU seconds per step")),
    ]
    return "| " + " | ".join(cells) + " |"


def tuning(lines: Sequence[Line], settings: Settings) -> list[str]:
    """Return the table of the options of plain training, or nothing before there is a run."""
    heads = ["| learning rate, completions of a prompt | accuracy after each quarter | positions |", "|---|---:|---:|"]
    about = f"On seed {TUNING}, which measures nothing else, for {settings.steps} steps of {settings.prompts} prompts:"
    rows = [
        f"| {line['method'].removeprefix('plain, ')} | {' '.join(f'{point[2]:.2f}' for point in line['course'])} "
        f"| {line['course'][-1][1] / 1e6:.2f} M |"
        for line in lines
    ]
    return ["## The options of plain training", "", about, "", *heads, *rows, ""] if rows else []


def described(lines: Sequence[Line], settings: Settings) -> list[str]:
    """Return the section of the task whose answers describe the digit first, or nothing before there is a run."""
    if not lines:
        return []
    measured, tuned = ([line for line in lines if (line["seed"] >= TUNING) == is_tuned] for is_tuned in (False, True))
    heads = ["| " + " | ".join(HEADS) + " |", "|---|" + "---:|" * (len(HEADS) - 1)]
    rows = [table_row(name, measured) for name in CHOSEN if any(line["method"] == name for line in measured)]
    about = (
        "The same pictures; an answer is `it has rings <answer>8</answer>` (rings: 0, 6, 8, 9; strokes: 1, 4, 7; bows: "
        "2, 3, 5). The start reads crops, and hints behind the question (`the answer is 8`), which the teacher of "
        "`answer` reads beside the whole picture."
    )
    tuned_table = [line.replace("## ", "### ") for line in tuning(tuned, settings)]
    return [
        "## With a description before the digit",
        "",
        about,
        "",
        DESCRIBED.read_text().strip(),
        "",
        *heads,
        *rows,
        "",
        *tuned_table,
    ]


def degraded(lines: Sequence[Line], described: Sequence[Line]) -> list[str]:
    """Return the section of the degraded pictures, of both tasks, or nothing before there is a run."""
    if not lines:
        return []
    kinds = [f"{name} ({kind} {min(numbers.values()):g})" for name, (kind, numbers) in NEVER_TRAINED.items()]
    about = (
        f"The same pictures with noise up to {GROUND}, from a start that reads them, one for all seeds: intervals "
        f"are over pictures, order and samples. The learning rate is {SLOWER['learning_rate']:g}. Rollout and loss see "
        f"{TRAINED[0]} of {TRAINED[1]['std']:g}; the teacher, with the weights of the start, sees the originals, and "
        "the policy writes one completion of each prompt (plain training, with reward, where named: eight). Never "
        f"trained: {', '.join(kinds)}. Behind an accuracy stands its difference to plain training on originals. "
        "Against plain training on degraded pictures: on degraded ones, after as many steps; at equal positions: after "
        "as many positions as the shorter course has, on 100 pictures, between points on a line."
    )
    own = ["## A better look without boxes", "", about, "", LOOKED.read_text().strip(), "", *look_tables(lines)]
    again = "### With a description before the digit", "", "The same, of the second task:", "", *look_tables(described)
    return [*own, *(again if described else ())]


def look_tables(lines: Sequence[Line]) -> list[str]:
    """Return the table of the methods on degraded pictures, and that of their learning rates."""
    measured, tuned = ([line for line in lines if (line["seed"] >= TUNING) == is_tuned] for is_tuned in (False, True))
    heads = ["| " + " | ".join(LOOK_HEADS) + " |", "|---|" + "---:|" * (len(LOOK_HEADS) - 1)]
    rows = [look_row(name, measured) for name in LOOKS if any(line["method"] == name for line in measured)]
    tuning_heads = ["| method, learning rate | originals after each 20 steps | degraded | originals | degraded |"]
    tuning_heads += ["|---|---:|---:|---:|---:|"]
    courses = [
        f"| {line['method']} | {' '.join(f'{point[2]:.2f}' for point in line['course'])} | "
        f"{' '.join(f'{point[3]:.2f}' for point in line['course'])} | {line['accuracy']:.3f} | {line['degraded']:.3f} |"
        for line in tuned
    ]
    tuning = [f"Learning rates, on seed {TUNING}:", "", *tuning_heads, *courses, ""]
    return [*heads, *rows, "", *(tuning if courses else ())]


def write(lines: Sequence[Line], settings: Settings) -> None:
    """Write the page."""
    machine = ", ".join(f"{name} {value}" for name, value in describe_machine(1).items())
    looked = [read(settings, kind) for kind in (DegradedStart, DegradedDescribedStart)]
    every = [*lines, *read(settings, DescribedStart), *looked[0], *looked[1]]
    commits = ", ".join(sorted({line["commit"] for line in every}))
    seconds = sum(line["seconds"] for line in every)
    measured = [line for line in lines if line["seed"] < TUNING]
    tuned = [line for line in lines if line["seed"] >= TUNING]
    page = [
        "# A teacher that sees more",
        "",
        FINDINGS.read_text().strip(),
        "",
        "| " + " | ".join(HEADS) + " |",
        "|---|" + "---:|" * (len(HEADS) - 1),
        *(table_row(name, measured) for name in METHODS if any(line["method"] == name for line in measured)),
        "",
        "Accuracy: of greedy answers to "
        f"{settings.test_rows} pictures of held-out digits, mean and standard deviation over seeds; its course begins "
        "with the start. Against plain: difference to plain training of the same seeds, with the 95 % interval of a "
        "bootstrap over seeds where there are three. A position is a token of a row, padding included, "
        "in one forward pass of the language "
        "model, generation and views included; in a pass with gradients it counts three times. At plain's positions: "
        "accuracy when as many positions were computed as plain training computes in all, between points of the course "
        "on a line; empty: the course ends before. Sampled: of answers sampled at temperature 1. Crop: of greedy "
        f"answers to the digit's part alone. Larger: on pictures of {LARGER} x {LARGER} pixels; noisier: with noise up "
        f"to {NOISIER} in place of {NOISE}; neither is ever trained.",
        "",
        *tuning(tuned, settings),
        *described(read(settings, DescribedStart), settings),
        *degraded(*looked),
        "## What is trained",
        "",
        f"A picture of {SIDE} x {SIDE} pixels (64 image tokens) is noise up to {NOISE} with one real digit of "
        f"{DIGIT} x {DIGIT} pixels (4 image tokens) somewhere. The question is which digit is shown; an answer is "
        "`<answer>7</answer>`. The model is a Qwen2.5-VL of 0.3 million parameters. Supervised, in "
        f"{settings.reading_steps} steps of 64 it learns to read crops; one example in sixteen is a whole picture, "
        "half of these with a digit at random, for the form of an answer. Then "
        f"{settings.steps} steps of {settings.prompts} prompts x {settings.generations} completions by `DAPOTrainer`, "
        f"learning rate {settings.learning_rate:g}, no picture twice.",
        "",
        f"Command: `PYTHONPATH=src:benchmarks python -m teacher`, also with `--described` and `--degraded`, "
        f"at commit {commits}; {len(every)} trainings of "
        f"together {seconds:.0f} seconds, on shared cores. {machine}.",
    ]
    RESULTS.with_suffix(".md").write_text("\n".join(page).rstrip() + "\n")


if __name__ == "__main__":
    main()
