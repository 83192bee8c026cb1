"""The demo's path on easy-VQA, open answers: warm start and RL on train images, accuracy on test images.

python benchmarks/easy_vqa.py --data ../shared/data/easy_vqa --seeds 0 1 2 --threads 1

Writes `results/easy_vqa.md` and `results/easy_vqa.json`.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from datasets import load_dataset
from demo_seeds import RESULTS, describe_machine
from easy_vqa_rows import (
    FAMILIES,
    balanced_rows,
    commonest_answer_accuracy,
    mismatch_images,
    text_rows,
    vocabulary,
)

from vgr_trl.demo.options import Options
from vgr_trl.demo.run import Questions
from vgr_trl.demo.run import run as run_questions

MISMATCHED = 0.5  # share of the warm start's rows that show the image of another row
VALIDATION_IMAGES = 500  # the last of the train images: they stop the warm start and do nothing else


def main() -> None:
    """Run every seed in a process of its own, or, with --run, one seed in this one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data/easy_vqa"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--jobs", type=int, default=1, help="seeds at a time")
    parser.add_argument("--run", type=Path, help="run one seed here and leave everything in this folder")
    flags = parser.parse_args()
    if flags.run:
        run_seed(flags.seeds[0], flags.threads, flags.steps, flags.data, flags.run)
        return
    with ThreadPoolExecutor(flags.jobs) as pool:
        runs = list(pool.map(lambda seed: run_in_process(seed, flags), flags.seeds))
    write_results(runs, flags.threads, flags.steps)


def run_in_process(seed: int, flags: argparse.Namespace) -> dict[str, Any]:
    """Run one seed in a process of its own and return its numbers."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = {"--data": flags.data, "--seeds": seed, "--threads": flags.threads, "--steps": flags.steps}
        command = [sys.executable, __file__, *(str(part) for pair in arguments.items() for part in pair)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(flags.threads)}
        subprocess.run([*command, "--run", folder], env=environment, check=True)
        return json.loads((Path(folder) / "easy_vqa.json").read_text())


def write_results(runs: list[dict[str, Any]], threads: int, steps: int) -> None:
    """Write the numbers of all runs and their tables."""
    RESULTS.mkdir(exist_ok=True)
    machine = describe_machine(threads)
    (RESULTS / "easy_vqa.json").write_text(json.dumps({"machine": machine, "runs": runs}, indent=2) + "\n")
    (RESULTS / "easy_vqa.md").write_text(report(runs, machine, steps))


def run_seed(seed: int, threads: int, steps: int, data: Path, folder: Path) -> None:
    """Run one seed and write its numbers to `easy_vqa.json` in `folder`."""
    questions = load_questions(data, seed)
    options = Options(
        seed=seed,
        threads=threads,
        steps=steps,
        text_learning_rate=2e-3,
        text_batch_size=64,
        text_steps=1000,
        text_loss=0.11,
        caption_loss=0.585,
        warm_start_accuracy=0.49,
        learning_rate=4e-4,
        lr_scheduler_type="linear",
        num_samples=4,
    )
    run_questions(questions, options, folder)
    numbers = {
        **json.loads((folder / "metrics.json").read_text()),
        "seed": seed,
        "commonest_answer": commonest_answer_accuracy(questions.train, questions.test),
        "commonest_answer_to_the_question": commonest_answer_accuracy(questions.train, questions.test, by="problem"),
        "peak_memory_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
    }
    (folder / "easy_vqa.json").write_text(json.dumps(numbers))


def load_questions(data: Path, seed: int) -> Questions:
    """Return questions drawn evenly from the three answer families; the words come from the train images alone."""
    train = list(load_dataset("parquet", data_files=str(data / "train.parquet"), split="train"))
    test = list(load_dataset("parquet", data_files=str(data / "test.parquet"), split="train"))
    words = vocabulary(train)
    learned, watched = train[:-VALIDATION_IMAGES], train[-VALIDATION_IMAGES:]
    rows = balanced_rows(learned, 9000, words=words, seed=seed, split="train")
    return Questions(
        train=rows,
        shown=mismatch_images(rows, MISMATCHED, seed=seed),
        validation=balanced_rows(watched, 192, words=words, seed=seed, split="validation"),
        test=balanced_rows(test, 600, words=words, seed=seed, split="test"),
        text=text_rows(learned, words=words),
    )


def report(runs: list[dict[str, Any]], machine: dict[str, Any], steps: int) -> str:
    """Return the tables of all runs as Markdown."""
    first, names = runs[0]["before"], " ".join(str(run["seed"]) for run in runs)
    gains = [run["after"]["mean_at_k"] - run["before"]["mean_at_k"] for run in runs]
    lines = [
        "# easy-VQA, open answers",
        "",
        f"Held-out sampled accuracy after RL is {', '.join(f'{gain:.3f}' for gain in gains)} above that of the warm "
        f"start (seeds {names}). {first['questions']} questions about test images, as many of each answer family (in "
        f"the data, six in seven are yes or no), {first['k']} samples each at temperature 1. Commonest: the share that "
        "the family's commonest train answer gets right; to the question: the commonest to that very question, the "
        "most that can be had without looking (most colours that are asked for are absent). Half of the warm start's "
        "rows show the image of another row, so that what the model samples stays diverse enough to reinforce; it "
        "stops at 0.49 on validation questions about other train images.",
        "",
        "Data: easy-VQA, MIT, © 2019 Victor Zhou (vzhou842/easy-VQA).",
        "",
        f"Command: `python benchmarks/easy_vqa.py --data ../shared/data/easy_vqa --seeds "
        f"{names} --threads {machine['threads']} --steps {steps}`",
        "",
        ", ".join(f"{name} {value}" for name, value in machine.items())
        + ". Other work shared the two cores, so the seconds vary.",
        "",
        "| seed | questions | commonest | to the question | sampled before | sampled after | gain "
        "| greedy before | greedy after | blanked before | blanked after | format before | format after "
        "| seconds | peak GB |",
        "|---:|---|" + "---:|" * 13,
    ]
    for run in runs:
        lines += [row(run, name) for name in ("all", *FAMILIES)]
    return "\n".join(lines) + "\n"


def row(run: dict[str, Any], name: str) -> str:
    """Return the table row of one run and family; `all` has seconds and memory too."""

    def scores(measured: str) -> dict[str, Any]:
        return run[measured] if name == "all" else run[measured]["groups"][name]

    before, after = scores("before"), scores("after")
    rates = [
        run["commonest_answer"][name], run["commonest_answer_to_the_question"][name],
        before["mean_at_k"], after["mean_at_k"], after["mean_at_k"] - before["mean_at_k"],
        before["accuracy"], after["accuracy"], scores("blank_before")["mean_at_k"], scores("blank_after")["mean_at_k"],
        before["format_sampled"], after["format_sampled"],
    ]  # fmt: skip
    cells = [str(run["seed"]), name, *(f"{rate:.3f}" for rate in rates)]
    cells += [f"{run['seconds']['total']:.0f}", f"{run['peak_memory_gb']:.2f}"] if name == "all" else ["", ""]
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    main()
