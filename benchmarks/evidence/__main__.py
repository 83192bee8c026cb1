"""Trains the methods of the teacher study with a model that has a language; a line after every point of a course.

    make evidence-model
    PYTHONPATH=src:benchmarks python -m evidence --device cuda

A start of every seed is taught once and kept in `--starts`. What `--output` holds is not run again.
"""

import argparse
from pathlib import Path
from typing import Any

from gpu.measure import error_of
from gpu.results import FILE, Line, append, machine, read, runs_of
from teacher.runs import METHODS, Settings

from evidence.model import WordyStart

CHOSEN = ("plain", "divergence", "labels", "rlsd", "divergence, another part")
NAME = "evidence, seed {}"


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
    parser.add_argument("--output", type=Path, default=FILE)
    flags = parser.parse_args(arguments)
    settings = Settings(
        reading_steps=flags.warm_steps,
        test_rows=flags.questions,
        course_rows=flags.questions // 2,
        steps=flags.steps,
        prompts=flags.prompts,
        learning_rate=flags.learning_rate,
    )
    for seed in flags.seeds:
        name, start = NAME.format(seed), None
        there = runs_of(read(flags.output), name, "accuracy")

        def note(method: str, found: dict[str, Any], name: str = name) -> None:
            append(flags.output, Line(name, method, machine(flags.device), "python -m evidence", found))
            print(name, method, found, flush=True)

        for method in (each for each in flags.methods if each not in there):
            try:
                start = start or WordyStart(
                    seed, settings, flags.starts / "words", flags.language, flags.device, flags.batch
                )
                note(method, start.run(METHODS[method]))
            except Exception as error:
                note(method, error_of(error))
                raise


if __name__ == "__main__":
    main()
