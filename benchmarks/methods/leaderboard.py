"""The tables and plots of the runs there are."""

import json
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from machine import describe_machine

from methods.plots import plot_course, plot_doses
from methods.runs import Settings
from methods.seeds import interval, resampled, token_share
from methods.tasks import TASKS

RESULTS = Path(os.environ.get("RESULTS", Path(__file__).parents[1] / "results")) / "methods"
BASELINE = "plain"
TUNING = 100  # seeds from here on choose learning rates and measure nothing else
FINDINGS = Path(__file__).with_name("findings.md")
MEASURES = ("thoughts", "asked", "follows", "filler", "blanked", "late VGR", "dependency", "CPU seconds per step")


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


def write(runs: Sequence[Run], settings: Settings) -> None:
    """Write `methods.md`, a plot of every task, and one against the dose."""
    measured = [run for run in runs if run.seed < TUNING and run.learning_rate == best_rate(runs, run.task, run.method)]
    tasks = [task for task in TASKS if any(run.task == task for run in measured)]
    machine = describe_machine(1)
    values = asdict(settings)
    lines = [
        "# Methods side by side",
        "",
        "Command: `PYTHONPATH=src:benchmarks python -m methods --tasks "
        f"{' '.join(tasks)}`; runs that `methods.jsonl` holds are not repeated.",
        "",
        ", ".join(f"{name} {value}" for name, value in machine.items()) + ". Other work shared the cores; CPU seconds.",
        "",
        f"Models of a third of a million parameters, warm-started to a sampled accuracy of {values['start']}, then "
        f"{values['steps']} steps of {values['prompts']} prompts x {values['generations']} completions; accuracy 1 and "
        "format 0.2 are the rewards. Each method has the learning rate that did best on seeds that measure nothing "
        "else (`tuned on`: how many), out of the same few. Three words of every "
        "thought are read off the image; the thoughts that the start learned from name each of the three wrong two "
        "times in five, so that there is much to gain. Further words are filler, by which tasks are named, with their "
        "number. `style`: sampled, whatever is shown, before the words that are read off. `paraphrase`: every one of "
        "the three is said again behind it, in other words after a word of style each; where the start learned from, "
        "each is wrong two times in five of itself, so it takes another look. `arithmetic`: sums of the three words' "
        "numbers behind them, which follow from what was said, right or wrong. SGD: without momentum, with rates of "
        "its own to choose from.",
        "",
        "The filters keep as many tokens as the oracle, VPPO its published 40 %. `oracle` gives credit to the words "
        "whose value needs the image, in thought and answer: paraphrases are among them, sums, which the words before "
        "them settle, are not. `no filler` gives it to all but filler, paraphrases too, `random` to as many tokens as "
        "the oracle.",
        "",
        "Accuracy: over 320 held-out questions of 4 sampled answers, with the 95 % interval of a bootstrap over seeds; "
        "gain: over the start; against plain: the difference to plain DAPO of the same seeds. Tokens: after which the "
        "mean course over seeds reaches the accuracy with which plain DAPO's ends, in plain DAPO's tokens, with an "
        "interval over seeds; `never`: not within these steps. Thoughts: share of the words to be read off the "
        "image that a thought has; "
        "asked: thoughts that have the word asked for; follows: answers that repeat the thought's word; "
        "filler: paraphrases that are right of the image, or sums that are due after the thought's words.",
        "",
    ]
    for task in tasks:
        of_task = [run for run in measured if run.task == task]
        lines += [
            f"## {task}",
            "",
            *table(of_task, tuned_on(runs, task)),
            "",
            f"![accuracy against tokens](methods_{task}.png)",
            "",
        ]
        plot_course(courses_of(of_task), RESULTS.with_name(f"methods_{task}.png"))
    doses = dose_accuracies(measured)
    if len({dose for points in doses.values() for dose in points}) > 1:
        lines += ["## Dose and response", "", "![accuracy against words of style](methods_doses.png)", ""]
        plot_doses(doses, RESULTS.with_name("methods_doses.png"))
    RESULTS.with_suffix(".md").write_text("\n".join([*lines, FINDINGS.read_text()]).rstrip() + "\n")


def best_rate(runs: Sequence[Run], task: str, method: str) -> float | None:
    """Return the learning rate of largest mean accuracy on the tuning seeds; of equals the first. None: not tuned."""
    tried: dict[float, list[float]] = {}
    for run in runs:
        if (run.task, run.method) == (task, method) and run.seed >= TUNING:
            tried.setdefault(run.learning_rate, []).append(run.found["accuracy"])
    return max(tried, key=lambda rate: statistics.mean(tried[rate]), default=None)


def tuned_on(runs: Sequence[Run], task: str) -> dict[str, int]:
    """Return method -> number of seeds its learning rate was chosen on."""
    seeds: dict[str, set[int]] = {}
    for run in runs:
        if run.task == task and run.seed >= TUNING:
            seeds.setdefault(run.method, set()).add(run.seed)
    return {method: len(own) for method, own in seeds.items()}


def courses_of(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """Return the courses of every method."""
    return {
        name: [run.found["course"] for run in runs if run.method == name]
        for name in dict.fromkeys(run.method for run in runs)
    }


def dose_accuracies(runs: Sequence[Run]) -> dict[str, dict[int, list[float]]]:
    """Return method -> words of style -> accuracies of the seeds, of the methods that ran on more than one dose."""
    found: dict[str, dict[int, list[float]]] = {"start": {}}
    for run in sorted((run for run in runs if run.task.startswith("style-")), key=lambda run: int(run.task[6:])):
        dose = int(run.task[6:])
        found.setdefault(run.method, {}).setdefault(dose, []).append(run.found["accuracy"])
        if run.method == BASELINE:
            found["start"].setdefault(dose, []).append(run.found["course"][0][2])
    return {name: points for name, points in found.items() if len(points) > 1}


def table(runs: Sequence[Run], tuned: Mapping[str, int]) -> list[str]:
    """Return a row for every method, best first; `tuned`: method -> seeds its learning rate was chosen on."""
    methods = {name: [run for run in runs if run.method == name] for name in dict.fromkeys(run.method for run in runs)}
    measures = [name for name in MEASURES if all(name in run.found for run in runs)]
    heads = [
        "method",
        "rate",
        "tuned on",
        "seeds",
        "accuracy",
        "interval",
        "gain",
        f"against {BASELINE}",
        "tokens",
        *measures,
    ]
    lines = ["| " + " | ".join(heads) + " |", "|---|" + "---:|" * (len(heads) - 1)]
    plain = {run.seed: run for run in methods.get(BASELINE, [])}
    for name, own in sorted(methods.items(), key=lambda item: -mean(item[1], "accuracy")):
        low, high = interval([run.found["accuracy"] for run in own])
        gain = statistics.mean(run.found["accuracy"] - run.found["course"][0][2] for run in own)
        cells = [
            name,
            f"{own[0].learning_rate:g}",
            str(tuned.get(name, 0)),
            str(len(own)),
            f"{mean(own, 'accuracy'):.3f}",
        ]
        cells += [f"{low:.3f} to {high:.3f}", f"{gain:+.3f}", *against(own, plain)]
        cells += [f"{mean(own, measure):.3f}" for measure in measures]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def mean(runs: Sequence[Run], name: str) -> float:
    """Return the mean of a measure over runs."""
    return statistics.mean(run.found[name] for run in runs)


def against(runs: Sequence[Run], plain: dict[int, Run]) -> list[str]:
    """Return the gain over the baseline of the same seeds, and the tokens to its last accuracy, with intervals."""
    pairs = [(run.found, plain[run.seed].found) for run in runs if run.seed in plain]
    if not pairs:
        return ["–", "–"]
    gains = [own["accuracy"] - baseline["accuracy"] for own, baseline in pairs]

    def share(chosen: Sequence[int]) -> float:
        return token_share(*([pairs[index][side]["course"] for index in chosen] for side in (0, 1)))

    low, high = interval(gains)
    shares = [share(range(len(pairs))), *resampled(len(pairs), share, draws=2000)]
    middle, least, most = ("never" if each == float("inf") else f"{each:.2f}" for each in shares)
    reached = "never" if least == "never" else f"{middle} ({least} to {most})"
    return [f"{statistics.mean(gains):+.3f} ({low:+.3f} to {high:+.3f})", reached]
