"""Questions whose text often gives the answer away: which methods learn to trust it less?

    PYTHONPATH=src:benchmarks python benchmarks/shortcuts.py --task hinted-doubted --seeds 0 1 2 3 4

Tasks of the bench of methods (`methods/hints.py`, `methods/given.py`), with one learning rate for all; writes
`results/shortcuts.md` of all runs in `results/shortcuts.jsonl`, and runs what is missing there. `other hints` is a
control: plain DAPO on the same rows with hints that are as good as a guess, so that nothing pays but the image.
"""

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from demo_seeds import describe_machine
from drift.report import spread
from methods.contenders import METHODS
from methods.given import EASY_VQA
from methods.hints import HINTED, HINTED_IN_TEST, with_hints
from methods.runs import Settings, Start

FILE = Path(os.environ.get("RESULTS", Path(__file__).parent / "results")) / "shortcuts.jsonl"
FINDINGS = Path(__file__).parent / "methods" / "findings_shortcuts.md"
TASKS = {task.name: task for task in (*HINTED, EASY_VQA)}
CONTROL = "other hints"
REWARDED = ("VGR reward", "VGR reward, scaled", "MDI reward")
TRIED = ("plain", "perception filter", "VPPO", *REWARDED, "noisy generations", CONTROL)
COLUMNS = {
    "accuracy": "accuracy",
    "hint true": "hint true",
    "hint false": "misled",
    "copied": "copied",
    "blanked": "blanked",
    "blanked, hint true": "blanked, hint true",
    "thoughts": "thoughts",
    "late VGR": "late VGR",
    "dependency": "dependency",
}
COMPARED = ("accuracy", "hint false", "copied", "blanked", "blanked, hint true")


def main() -> None:
    """Run what is missing, write what there is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--task", default="hinted-doubted", choices=TASKS)
    parser.add_argument("--methods", nargs="+", default=list(TRIED), choices=[*METHODS, CONTROL])
    parser.add_argument("--learning_rate", type=float, default=3e-4)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--prompts", type=int, default=12, help="per step, of 8 completions each")
    parser.add_argument("--start", type=float, default=0.4, help="ends the warm start: see Task.until")
    parser.add_argument("--write", action="store_true", help="write the table of what there is, run nothing")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no run after that")
    flags = parser.parse_args()
    if not flags.write:
        run_missing(flags)
    FILE.with_suffix(".md").write_text(report(read()))


def run_missing(flags: argparse.Namespace) -> None:
    """Run the methods that have not run on a seed; all start from the same model."""
    settings = Settings(steps=flags.steps, prompts=flags.prompts, measure_every=flags.steps, start=flags.start)
    used = asdict(settings) | {"learning_rate": flags.learning_rate, "task": flags.task}
    ends = time.monotonic() + 60 * flags.minutes
    for seed in flags.seeds:
        there = {run["method"] for run in read() if run["seed"] == seed and run["settings"] == used}
        missing = [name for name in flags.methods if name not in there]
        if not missing or time.monotonic() > ends:
            continue
        start = Start(TASKS[flags.task], seed, settings)
        if "start" not in there:
            keep({"method": "start", "seed": seed, **start.outcome(closely=True)}, used)
        for name in missing:
            if time.monotonic() < ends:
                keep({"method": name, "seed": seed, **run_one(start, name, flags.learning_rate)}, used)


def run_one(start: Start, name: str, learning_rate: float) -> dict[str, Any]:
    """Train by one method; return what it came to."""
    if name != CONTROL:
        return start.run(METHODS[name], learning_rate)
    rng = random.Random(f"other hints {start.seed}")
    rows = with_hints(start.questions.train, HINTED_IN_TEST, rng, start.task.families)
    return start.run(METHODS["plain"], learning_rate, train=rows)


def read() -> list[dict[str, Any]]:
    """Return all runs, each with its settings."""
    return [json.loads(line) for line in FILE.read_text().splitlines()] if FILE.exists() else []


def keep(run: dict[str, Any], used: dict[str, Any]) -> None:
    """Append a run to the results."""
    with FILE.open("a") as lines:
        lines.write(json.dumps(run | {"settings": used}) + "\n")
    print({name: run.get(name) for name in ("seed", "method", *COLUMNS)}, flush=True)


def report(runs: list[dict[str, Any]]) -> str:
    """Return what was found, and a table for every task and its settings."""
    machine = describe_machine(1)
    lines = [
        "# Shortcuts",
        "",
        ", ".join(f"{name} {value}" for name, value in machine.items()) + ".",
        "",
        FINDINGS.read_text(),
    ]
    kinds: dict[str, list[dict[str, Any]]] = {}
    for run in sorted(runs, key=lambda run: list(TASKS).index(run["settings"]["task"]), reverse=True):
        kinds.setdefault(json.dumps(run["settings"]), []).append(run)
    for own in kinds.values():
        lines += section(own)
    return "\n".join(lines)


def section(runs: Sequence[dict[str, Any]]) -> list[str]:
    """Return the command and the table of runs of the same settings."""
    used = runs[0]["settings"]
    seeds = sorted({run["seed"] for run in runs})
    return [
        f"## {used['task']}",
        "",
        f"Command: `PYTHONPATH=src:benchmarks python benchmarks/shortcuts.py --seeds {' '.join(map(str, seeds))} "
        f"--task {used['task']} --steps {used['steps']} --prompts {used['prompts']} "
        f"--learning_rate {used['learning_rate']:g}`",
        "",
        *table(runs),
        "",
    ]


def table(runs: Sequence[dict[str, Any]]) -> list[str]:
    """Return a row for every method: means over seeds, and differences to plain DAPO seed by seed."""
    columns = {name: head for name, head in COLUMNS.items() if all(name in run for run in runs)}
    lines = ["| method | seeds | " + " | ".join(columns.values()) + " |", "|---|" + "---:|" * (len(columns) + 1)]
    plain = {run["seed"]: run for run in runs if run["method"] == "plain"}
    for method in ("start", *TRIED):
        own = [run for run in runs if run["method"] == method]
        if not own:
            continue
        cells = [method, str(len(own))]
        for name in columns:
            cell = f"{statistics.mean(run[name] for run in own):.3f}"
            gains = [run[name] - plain[run["seed"]][name] for run in own if run["seed"] in plain]
            if method not in ("start", "plain") and name in COMPARED and gains:
                cell += f" ({statistics.mean(gains):+.3f}{spread(gains)})"
            cells.append(cell)
        lines.append("| " + " | ".join(cells) + " |")
    return lines


if __name__ == "__main__":
    main()
