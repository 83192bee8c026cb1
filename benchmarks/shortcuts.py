"""Questions whose text often gives the answer away: which methods learn to trust it less?

    PYTHONPATH=src:benchmarks python benchmarks/shortcuts.py --seeds 0 1 2

A task `hinted` of the bench of methods, with one learning rate for all; writes `results/shortcuts.md` of all runs in
`results/shortcuts.jsonl`, and runs what is missing there.
"""

import argparse
import json
import os
import statistics
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from demo_seeds import describe_machine
from drift.report import spread
from methods.contenders import METHODS
from methods.runs import Settings, Start
from methods.tasks import HINTED, HINTED_IN_TEST, HINTED_IN_TRAINING, TASKS

FILE = Path(os.environ.get("RESULTS", Path(__file__).parent / "results")) / "shortcuts.jsonl"
FOUND = (
    "No shortcut is learned, so no method can take one back: where the word misleads, accuracy is not lower than where "
    "it is right by more than 0.05, before reinforcement and after it, by any method. What an image shows is learned, "
    "copying a word of the question is not. So these questions have no effect to give, and say nothing for or against "
    "the methods. (Blanked accuracy is 0.25 for a guess and for a copy of the word alike.) Also tried, plain DAPO with "
    "one seed: a warm start whose words are as good as a guess (`hinted`), 100 steps: 0.695 where right, 0.676 misled, "
    "0.231 blanked; one whose words are true in 70 % with every image its own, 60 steps: 0.664, 0.622 and 0.251."
)
TRIED = ("plain", "perception filter", "VGR reward", "VGR reward, scaled", "MDI reward", "noisy generations")
COLUMNS = {
    "accuracy": "accuracy",
    "hint true": "hint true",
    "hint false": "misled",
    "blanked": "blanked",
    "thoughts": "thoughts",
    "late VGR": "late VGR",
    "dependency": "dependency",
}


def main() -> None:
    """Run what is missing, write what there is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--task", default="hinted-start", choices=[task.name for task in HINTED])
    parser.add_argument("--methods", nargs="+", default=list(TRIED), choices=METHODS)
    parser.add_argument("--learning_rate", type=float, default=3e-4)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--prompts", type=int, default=12, help="per step, of 8 completions each")
    parser.add_argument("--write", action="store_true", help="write the table of what there is, run nothing")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no run after that")
    flags = parser.parse_args()
    settings = Settings(steps=flags.steps, prompts=flags.prompts, measure_every=flags.steps, start=0.4)
    used = asdict(settings) | {"learning_rate": flags.learning_rate, "task": flags.task}
    ends = time.monotonic() + 60 * flags.minutes
    for seed in [] if flags.write else flags.seeds:
        there = {run["method"] for run in read(used) if run["seed"] == seed}
        missing = [name for name in flags.methods if name not in there]
        if not missing or time.monotonic() > ends:
            continue
        start = Start(TASKS[flags.task], seed, settings)
        if "start" not in there:
            keep({"method": "start", "seed": seed, **start.outcome(closely=True)}, used)
        for name in missing:
            if time.monotonic() < ends:
                keep({"method": name, "seed": seed, **start.run(METHODS[name], flags.learning_rate)}, used)
    FILE.with_suffix(".md").write_text(report(read(used), used))


def read(used: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the runs of these settings."""
    lines = [json.loads(line) for line in FILE.read_text().splitlines()] if FILE.exists() else []
    return [line for line in lines if line.pop("settings") == used]


def keep(run: dict[str, Any], used: dict[str, Any]) -> None:
    """Append a run to the results."""
    with FILE.open("a") as lines:
        lines.write(json.dumps(run | {"settings": used}) + "\n")
    print({name: run[name] for name in ("seed", "method", *COLUMNS)}, flush=True)


def report(runs: list[dict[str, Any]], used: dict[str, Any]) -> str:
    """Return the tables: means over seeds, and differences to plain DAPO seed by seed."""
    methods = list(dict.fromkeys(run["method"] for run in runs))
    seeds = sorted({run["seed"] for run in runs})
    machine = describe_machine(1)
    lines = [
        "# Shortcuts",
        "",
        f"Command: `PYTHONPATH=src:benchmarks python benchmarks/shortcuts.py --seeds {' '.join(map(str, seeds))} "
        f"--task {used['task']} --steps {used['steps']} --prompts {used['prompts']} "
        f"--learning_rate {used['learning_rate']:g}`",
        "",
        ", ".join(f"{name} {value}" for name, value in machine.items()) + ".",
        "",
        FOUND,
        "",
        f"The question begins with a word that is the answer in {HINTED_IN_TRAINING:.0%} of training rows and in "
        f"{HINTED_IN_TEST:.0%} of test rows, as a guess is. Here (`{used['task']}`) the warm start too sees words that "
        f"are true in {HINTED_IN_TRAINING:.0%}, and half of its rows have the image of another. 320 held-out "
        "questions, 4 sampled answers each. `hint true`, `misled`: accuracy where the word is right, and wrong. "
        "`blanked`: with the image blanked. Means over seeds; in brackets the difference to plain DAPO of the same "
        "start, from three seeds on with the 95 % interval of a bootstrap over seeds.",
        "",
        "| method | seeds | " + " | ".join(COLUMNS.values()) + " |",
        "|---|" + "---:|" * (len(COLUMNS) + 1),
    ]
    plain = {run["seed"]: run for run in runs if run["method"] == "plain"}
    for method in methods:
        own = [run for run in runs if run["method"] == method]
        cells = [method, str(len(own))]
        for name in COLUMNS:
            cell = f"{statistics.mean(run[name] for run in own):.3f}"
            gains = [run[name] - plain[run["seed"]][name] for run in own if run["seed"] in plain]
            if method not in ("start", "plain") and name in ("accuracy", "hint false", "blanked") and gains:
                cell += f" ({statistics.mean(gains):+.3f}{spread(gains)})"
            cells.append(cell)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
