"""Runs of the mosaics that are missing; then their page.

    PYTHONPATH=src:benchmarks python -m mosaics --seeds 0 1 2 3 4

A model of every seed is taught once; every method trains a copy of it. What `results/mosaics.jsonl` holds is not run
again. `--write` makes `results/mosaics.md` of what there is.
"""

import argparse
import json
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from machine import describe_machine, read_commit
from methods.seeds import interval

from mosaics.model import KNOWN
from mosaics.runs import METHODS, Settings, Start
from mosaics.task import SHOWN

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
    commit = read_commit()
    for seed in seeds:
        there = {line["method"] for line in read(settings) if line["seed"] == seed}
        start = None
        for method in methods:
            if method in there:
                continue
            start = start or Start(seed, settings)
            found = start.run(METHODS[method])
            line = {"method": method, "seed": seed, "settings": asdict(settings), "commit": commit, **found}
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
        "# Mosaics: learning where to zoom",
        "",
        FINDINGS.read_text().strip(),
        "",
        "| method | seeds | mosaics | against plain | by seed | calls | overlap | hits | singles | calls, singles "
        "| CPU seconds per step |",
        "|---|---:|---:|---|---|---:|---:|---:|---:|---:|---:|",
        *(table_row(name, lines) for name in ("start", *METHODS)),
        "",
        "Mosaics: accuracy on mosaics of held-out digits, one sampled answer each, mean and standard deviation over "
        "seeds. Against plain: difference to plain training of the same seeds, with the 95 % interval of a bootstrap "
        "over seeds. Calls: per answer to a mosaic. Overlap: intersection over union of a call's last box and the true "
        "cell, of the answers with a call; hits: share of them above 0.5. Singles: pictures of one digit, a quarter of "
        "all, which can be read without a call.",
        "",
        "## What is trained",
        "",
        f"A picture has 3 x 3 digits, or one. The processor scales it to {SHOWN} x {SHOWN} pixels (4 image tokens), "
        "and so the parts that `zoom` returns. The model is a Qwen2.5-VL of 0.3 million parameters. Supervised, in "
        f"{settings.reading_steps} steps it learns to read a digit in a part, in {settings.text_steps} the form of a "
        f"call, and in {settings.call_steps} whole conversations: half of them answer at once, the others call. "
        f"{KNOWN:.0%} of these calls look where the question asks to, the others anywhere, and a fifth of the boxes "
        "take in neighbours. A call is four tokens, its box one of them.",
        "",
        f"Then {settings.steps} steps of {settings.prompts} prompts x {settings.generations} completions, learning "
        f"rate {settings.learning_rate:g} for all methods (not tuned for any). A right answer earns 1, a call costs "
        f"{settings.cost:g}. Advantages are not divided by the deviation of the group, but in `plain, scaled`. `VPPO`: "
        "the filter that keeps 40 % of the tokens and the scale of trajectories of the recipe, by the dependence on "
        "all images. `VGR`: `token_weights`. `oracle` keeps the box and the tokens that begin a call or an answer, "
        "`oracle, digits` the digit of the answer too, `random` as many tokens as `oracle`.",
        "",
        f"Command: `PYTHONPATH=src:benchmarks python -m mosaics`, at commit {commits}; {len(lines)} trainings of "
        f"together {seconds:.0f} seconds, on shared cores. {machine}.",
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
    if name not in ("plain", "start") and gains:
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
