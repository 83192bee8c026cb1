"""Trains the methods of the teacher study with a model that has a language; a line after every point of a course.

    make evidence-model
    PYTHONPATH=src:benchmarks python -m evidence --device cuda

A start of every seed is taught once and kept in `--starts`. What `--output` holds of these settings is not run again,
and nothing begins without `--seconds` left of GPU_SECONDS. `--write` writes the section of the page, `gpu.report` all.
"""

import argparse
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from gpu.measure import Budget, error_of
from gpu.results import FILE, Line, append, machine, read
from teacher.__main__ import HEADS, table_row
from teacher.runs import METHODS, Settings

from evidence.model import WordyStart

CHOSEN = ("plain", "divergence", "labels", "rlsd", "divergence, another part")
NAME = "evidence, seed {}"
ABOUT = """\
`make gpu-evidence`: SmolLM2-135M-Instruct behind an untrained vision tower of four layers, as in SmolVLM, on the
pictures of [the teacher study](teacher.md), with questions and answers in words. The start is taught to read crops.
What the columns mean stands on that page."""


def main(arguments: list[str] | None = None) -> None:
    """Run what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--methods", nargs="+", default=CHOSEN, choices=METHODS)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--warm_steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=64, help="examples of a step of the warm start")
    parser.add_argument("--questions", type=int, default=400, help="of which accuracy is measured; a course: half")
    parser.add_argument("--learning_rate", type=float, default=5e-5)
    parser.add_argument("--language", type=Path, default=Path(".gpu/smollm2"), help="folder of the GGUF file")
    parser.add_argument("--starts", type=Path, default=Path(".gpu/starts"))
    parser.add_argument("--seconds", type=float, default=180, help="without which no run begins")
    parser.add_argument("--output", type=Path, default=FILE)
    parser.add_argument("--write", type=Path, metavar="PAGE", help="write the section of what there is, run nothing")
    flags, budget = parser.parse_args(arguments), Budget()
    if flags.write:
        flags.write.write_text("\n".join(section(read(flags.output))) + "\n")
        return
    torch.set_float32_matmul_precision("high")
    settings = Settings(
        reading_steps=flags.warm_steps,
        test_rows=flags.questions,
        course_rows=flags.questions // 2,
        steps=flags.steps,
        prompts=flags.prompts,
        learning_rate=flags.learning_rate,
    )
    taught = asdict(settings) | {"batch": flags.batch}
    kept = flags.starts / f"words, {flags.learning_rate:g}, {flags.batch}"
    for seed in flags.seeds:
        lines = runs_in(read(flags.output)).get(key_of(taught, machine(flags.device)), [])
        there = {line["method"] for line in lines if line["seed"] == seed}
        start = None
        for method in (each for each in flags.methods if each not in there):
            if not budget.fits(f"{NAME.format(seed)}, {method}", flags.seconds):
                return
            try:
                start = start or WordyStart(seed, settings, kept, flags.language, flags.device, flags.batch)
                found = start.run(METHODS[method])
            except Exception as error:
                note(flags, seed, method, taught, error_of(error))
                raise
            note(flags, seed, method, taught, found)


def note(flags: argparse.Namespace, seed: int, method: str, settings: dict[str, Any], found: dict[str, Any]) -> None:
    """Write a line."""
    found = {"settings": settings, **found}
    append(flags.output, Line(NAME.format(seed), method, machine(flags.device), "python -m evidence", found))
    print(seed, method, found, flush=True)


def key_of(settings: dict[str, Any], place: dict[str, str]) -> str:
    """Return what runs that are compared share: settings and machine, in words."""
    return f"{place['device']}; " + ", ".join(f"{name} {value}" for name, value in settings.items())


def runs_in(lines: Iterable[Line]) -> dict[str, list[dict[str, Any]]]:
    """Return the runs that came to their end, as `table_row` takes them, by what they share."""
    runs = defaultdict(list)
    for line in lines:
        if line.name.startswith("evidence, ") and "accuracy" in line.found:
            found = {"method": line.run, "seed": int(line.name.split()[-1]), **line.found}
            runs[key_of(line.found["settings"], line.machine)].append(found)
    return dict(runs)


def section(lines: Iterable[Line]) -> list[str]:
    """Return the section of the page: a table for each machine and settings."""
    page = ["## A model with a language", "", ABOUT, ""]
    runs = runs_in(lines)
    for key, found in runs.items():
        page += [f"{key}:", "", "| " + " | ".join(HEADS) + " |", "|---|" + "---:|" * (len(HEADS) - 1)]
        page += [table_row(name, found) for name in METHODS if any(run["method"] == name for run in found)]
        page.append("")
    return page[:-1] if runs else [*page, "not run"]


if __name__ == "__main__":
    main()
