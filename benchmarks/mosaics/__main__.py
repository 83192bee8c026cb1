"""Runs of the mosaics that are missing; then their page.

    PYTHONPATH=src:benchmarks python -m mosaics --seeds 0 1 2 3 4

A model of every seed is taught once; every method trains a copy of it. What `results/mosaics.jsonl` holds is not run
again. `--write` makes `results/mosaics.md` of what there is.
"""

import argparse
import json
import os
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from machine import describe_machine
from methods.seeds import interval

from mosaics.runs import METHODS, Settings, Start

ROOT = Path(__file__).parents[2]
RESULTS = Path(os.environ.get("RESULTS", ROOT / "benchmarks" / "results")) / "mosaics"
FINDINGS = Path(__file__).with_name("findings.md")
Line = dict[str, Any]  # of `mosaics.jsonl`: method, seed, settings, commit, and what `Start.run` returns


def main(arguments: list[str] | None = None) -> None:
    """Run, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(5)))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--write", action="store_true", help="write the page of what there is, run nothing")
    for part in fields(Settings):
        parser.add_argument(f"--{part.name}", type=type(part.default), default=part.default)
    flags = parser.parse_args(arguments)
    settings = Settings(**{part.name: getattr(flags, part.name) for part in fields(Settings)})
    if not flags.write:
        run_missing(flags.seeds, flags.methods, settings)
    write(read(settings), settings)


def run_missing(seeds: Sequence[int], methods: Sequence[str], settings: Settings) -> None:
    """Run what is missing, and append each run to the results."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    for seed in seeds:
        there = {line["method"] for line in read(settings) if line["seed"] == seed}
        start = None
        for method in methods:
            if method in there:
                continue
            start = start or Start(seed, settings)
            found = start.run(METHODS[method])
            line = {"method": method, "seed": seed, "settings": asdict(settings), "commit": commit.strip(), **found}
            with RESULTS.with_suffix(".jsonl").open("a") as lines:
                lines.write(json.dumps(line) + "\n")
            print(method, seed, found["mosaics"], found["calls"], found["overlap"], found["seconds"], flush=True)


def read(settings: Settings) -> list[Line]:
    """Return the runs of these settings."""
    file = RESULTS.with_suffix(".jsonl")
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [line for line in lines if line["settings"] == asdict(settings)]


def write(lines: Sequence[Line], settings: Settings) -> None:
    """Write the page."""
    machine = ", ".join(f"{name} {value}" for name, value in describe_machine(1).items())
    commits = ", ".join(sorted({line["commit"] for line in lines}))
    seconds = sum(line["seconds"] for line in lines)
    page = [
        "# Mosaics: learning where and when to zoom",
        "",
        f"Command: `PYTHONPATH=src:benchmarks python -m mosaics`, at commit {commits}; {len(lines)} trainings, "
        f"{seconds:.0f} seconds, {machine}. Other work shared the cores.",
        "",
        FINDINGS.read_text().strip(),
        "",
        "| method | seeds | mosaics | against plain | by seed | calls | overlap | hits | singles | calls, singles "
        "| CPU seconds per step |",
        "|---|---:|---:|---|---|---:|---:|---:|---:|---:|---:|",
        *(table_row(name, lines) for name in ("start", *METHODS)),
    ]
    RESULTS.with_suffix(".md").write_text("\n".join(page).rstrip() + "\n")


def table_row(name: str, lines: Sequence[Line]) -> str:
    """Return the row of a method, or of the start that all methods with the tool share."""
    plain = {line["seed"]: line for line in lines if line["method"] == "plain"}
    runs = {line["seed"]: line for line in lines if line["method"] == name}
    if name == "start":
        runs = {seed: line["before"] for seed, line in plain.items()}
    if not runs:
        return f"| {name} | 0 |" + " |" * 9
    gains = [run["mosaics"] - plain[seed]["mosaics"] for seed, run in sorted(runs.items()) if seed in plain]
    against = by_seed = ""
    if name != "plain" and gains:
        low, high = interval(gains)
        against = f"{statistics.mean(gains):+.3f} ({low:+.3f} to {high:+.3f})"
        by_seed = ", ".join(f"{gain:+.3f}" for gain in gains)

    def mean(measure: str) -> str:
        values = [run[measure] for run in runs.values() if measure in run]
        spread = f" ± {statistics.stdev(values):.3f}" if measure == "mosaics" and len(values) > 1 else ""
        return f"{statistics.mean(values):.3f}{spread}" if values else ""

    measures = ("calls", "overlap", "hits", "singles", "calls_singles", "CPU seconds per step")
    cells = [name, str(len(runs)), mean("mosaics"), against, by_seed, *map(mean, measures)]
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    main()
