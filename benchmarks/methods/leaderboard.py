"""The tables and plots of the runs there are."""

import json
import os
import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from demo_seeds import describe_machine

from methods.runs import Settings

RESULTS = Path(os.environ.get("RESULTS", Path(__file__).parents[1] / "results")) / "methods"
BASELINE = "plain"
TUNING = 100  # seeds from here on choose learning rates and measure nothing else
MEASURES = ("accuracy", "thoughts", "blanked", "late VGR", "dependency", "CPU seconds per step")


@dataclass(frozen=True)
class Run:
    """A method on a task, from one warm-started model; `found` as `runs.Start.run` returns it."""

    task: str
    method: str
    seed: int
    learning_rate: float
    found: dict[str, Any]


def read(settings: Settings) -> list[Run]:
    """Return the runs of these settings."""
    file = RESULTS.with_suffix(".jsonl")
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    chosen = [line for line in lines if line.pop("settings") == asdict(settings)]
    return [Run(**line) for line in chosen]


def interval(values: Sequence[float], draws: int = 10_000) -> tuple[float, float]:
    """Return the 95 % interval of the mean by bootstrap over seeds (percentiles of the means of resamples)."""
    rng = random.Random(0)
    means = sorted(statistics.mean(rng.choices(values, k=len(values))) for _ in range(draws))
    return means[int(0.025 * draws)], means[int(0.975 * draws) - 1]


def tokens_to(course: Sequence[Sequence[float]], accuracy: float) -> float | None:
    """Return after how many generated tokens a course reaches an accuracy, between points on a line; None: never."""
    before: Sequence[float] | None = None
    for point in course:
        if point[2] >= accuracy:
            if before is None or point[2] == before[2]:
                return point[1]
            share = (accuracy - before[2]) / (point[2] - before[2])
            return before[1] + share * (point[1] - before[1])
        before = point
    return None


def write(runs: Sequence[Run], settings: Settings) -> None:
    """Write `methods.md` and a plot of every task."""
    measured = [run for run in runs if run.seed < TUNING]
    tasks = list(dict.fromkeys(run.task for run in measured))
    machine = describe_machine(1)
    values = asdict(settings)
    lines = [
        "# Methods side by side",
        "",
        "Command: `PYTHONPATH=src:benchmarks python -m methods --tasks "
        f"{' '.join(tasks)}`; runs that are there are not repeated.",
        "",
        ", ".join(f"{name} {value}" for name, value in machine.items()) + ". Other work shared the cores; CPU seconds.",
        "",
        f"Models of a third of a million parameters, warm-started to a sampled accuracy of {values['start']}, then "
        f"{values['steps']} steps of {values['prompts']} prompts x {values['generations']} completions; accuracy 1 and "
        "format 0.2 are the rewards. Each method has the learning rate that did best on seeds of its own, out of the "
        "same few. `style-K`: K words of every thought are sampled style, three are read off the image. `hinted`: the "
        "question begins with a word that is the answer in 70 % of training rows and 25 % of test rows. The filters "
        "keep as many tokens as the oracle, VPPO its published 40 %. `oracle` gives credit to the words that are read "
        "off the image alone, `random` to as many others. Accuracy, over 320 held-out questions of 4 sampled answers, "
        "with the 95 % interval of a bootstrap over seeds; gain is over the same start. `thoughts`: share of the words "
        "of sampled thoughts that are right. `tokens`: generated until the accuracy of plain DAPO's end is reached, in "
        "plain DAPO's; seeds that never reach it are counted behind.",
        "",
    ]
    for task in tasks:
        of_task = [run for run in measured if run.task == task]
        lines += [f"## {task}", "", *table(of_task), "", f"![accuracy against tokens](methods_{task}.png)", ""]
        plot(of_task, RESULTS.with_name(f"methods_{task}.png"))
    RESULTS.with_suffix(".md").write_text("\n".join(lines).rstrip() + "\n")


def table(runs: Sequence[Run]) -> list[str]:
    """Return a row for every method, best first."""
    methods = {name: [run for run in runs if run.method == name] for name in dict.fromkeys(run.method for run in runs)}
    hints = sorted({name for run in runs for name in run.found if name.startswith("hint ")})
    heads = ["method", "rate", "seeds", "accuracy", "interval", "gain", "tokens", *MEASURES[1:], *hints]
    lines = ["| " + " | ".join(heads) + " |", "|---|" + "---:|" * (len(heads) - 1)]
    plain = {run.seed: run for run in methods.get(BASELINE, [])}
    for name, own in sorted(methods.items(), key=lambda item: -mean(item[1], "accuracy")):
        low, high = interval([run.found["accuracy"] for run in own])
        gain = statistics.mean(run.found["accuracy"] - run.found["course"][0][2] for run in own)
        cells = [name, f"{own[0].learning_rate:g}", str(len(own)), f"{mean(own, 'accuracy'):.3f}"]
        cells += [f"{low:.3f} to {high:.3f}", f"{gain:+.3f}", tokens(own, plain)]
        cells += [f"{mean(own, measure):.3f}" for measure in (*MEASURES[1:], *hints)]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def mean(runs: Sequence[Run], name: str) -> float:
    """Return the mean of a measure over runs."""
    return statistics.mean(run.found[name] for run in runs)


def tokens(runs: Sequence[Run], plain: dict[int, Run]) -> str:
    """Return the median over seeds of the tokens to the baseline's accuracy, and how many seeds never reach it."""
    shares = []
    for run in runs:
        if run.seed in plain:
            course = plain[run.seed].found["course"]
            needed = tokens_to(run.found["course"], course[-1][2])
            shares.append(float("inf") if needed is None else needed / course[-1][1])
    if not shares:
        return "–"
    never = sum(share == float("inf") for share in shares)
    middle = statistics.median_low(shares)
    return ("–" if middle == float("inf") else f"{middle:.2f}") + (f" ({never} never)" if never else "")


def plot(runs: Sequence[Run], file: Path) -> None:
    """Draw mean accuracy against generated tokens, one line per method."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    for method in dict.fromkeys(run.method for run in runs):
        courses = [run.found["course"] for run in runs if run.method == method]
        points = [
            [statistics.mean(course[index][part] for course in courses) for index in range(len(courses[0]))]
            for part in (1, 2)
        ]
        axes.plot([count / 1000 for count in points[0]], points[1], marker="o", markersize=3, label=method)
    axes.set_xlabel("generated tokens, thousands")
    axes.set_ylabel("accuracy of sampled answers")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(file, dpi=110)
    pyplot.close(figure)
