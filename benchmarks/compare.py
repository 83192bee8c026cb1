"""Runs of a grid file, over seeds, and one table and one plot of what they came to.

    PYTHONPATH=src:benchmarks python -m compare experiments/ablations.yaml --output_dir runs/ablations

A grid file names `flags` of every run, `evaluate`'s, `seeds`, and `runs`: a name, and the flags that make it. A run is
`vgr-trl train` with these flags, or the script that its `script` names. What has run with the same flags, by the lines
of JSON in the output folder, is not repeated, so that an interrupted comparison continues where it ended. `{model}` in
a value is a folder with the model of the demo after its warm start under the run's seed, and its questions.
"""

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from looks import looks
from machine import describe_machine, read_commit
from methods.seeds import interval

from vgr_trl.cli.arguments import DataArguments, EvaluationArguments, load_rows, parse
from vgr_trl.cli.evaluate import evaluate_models as evaluate
from vgr_trl.cli.evaluate import load_for_inference
from vgr_trl.demo import Options
from vgr_trl.demo.write_folder import write_warm_folder

START = "start"
MEASURES = ("accuracy", "greedy", "blanked", "late VGR", "dependency", "steps to 90 %", "tokens", "CPU seconds")
LOOKED_AT = 160  # questions
ACCURACY = "rewards/accuracy_reward/mean"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is missing, then write the table and the plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("grid", type=Path, help="YAML file")
    parser.add_argument("--output_dir", type=Path, help="of models and results (default: runs/ and the grid's name)")
    parser.add_argument("--runs", nargs="+", help="some of the grid's (default: all)")
    parser.add_argument("--seeds", type=int, nargs="+", help="instead of the grid's")
    parser.add_argument("--write", action="store_true", help="write table and plot of what there is, run nothing")
    chosen = parser.parse_args(arguments)
    grid = yaml.safe_load(chosen.grid.read_text("utf-8"))
    folder: Path = chosen.output_dir or Path("runs") / chosen.grid.stem
    folder.mkdir(parents=True, exist_ok=True)
    results = folder / f"{chosen.grid.stem}.jsonl"
    for seed in [] if chosen.write else chosen.seeds or grid["seeds"]:
        for name, flags in cells(grid, chosen.runs):
            if (name, seed) not in finished(grid, results):
                found = {"commit": read_commit(), **run(name, seed, flags, grid, folder)}
                with results.open("a") as lines:
                    lines.write(json.dumps({"run": name, "seed": seed, "flags": flags, **found}) + "\n")
                print(name, seed, found, flush=True)
    write(grid, finished(grid, results), results, chosen.grid)


def cells(grid: Mapping[str, Any], names: Sequence[str] | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the runs, the untrained model first, with all flags that make them."""
    yield START, {name: grid["flags"][name] for name in ("model_name_or_path", "data_files")}
    for name, own in grid["runs"].items():
        if names is None or name in names:
            yield name, grid["flags"] | (own or {})


def finished(grid: Mapping[str, Any], file: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """Return what the runs of a grid came to, by name and seed; runs with other flags are left out."""
    wanted = dict(cells(grid))
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return {(line["run"], line["seed"]): line for line in lines if wanted.get(line["run"]) == line["flags"]}


def run(name: str, seed: int, flags: Mapping[str, Any], grid: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Train one model, and return what is measured of it."""
    warm = folder / f"seed-{seed}" / "embedded"
    if "{model}" in str(grid["flags"]):
        write_warm_folder(warm, Options(seed=seed))
    given = [str(flag).format(model=warm) for flag in as_flags({"seed": seed, **flags})]
    model, trained = flags["model_name_or_path"].format(model=warm), {}
    if name != START:
        output = folder / f"seed-{seed}" / name.replace(" ", "-")
        shutil.rmtree(output, ignore_errors=True)  # of a run that was interrupted
        trained, model = train(flags.get("script"), given, output, warm.parent), str(output)
    asked = [str(flag).format(model=warm) for flag in as_flags(grid["evaluate"] | {"model_name_or_path": model})]
    data, options = parse((DataArguments, EvaluationArguments), "evaluate", asked)
    (scores,) = evaluate(data, options).values()
    rows, _ = load_rows(data, data.dataset_test_split, limit=LOOKED_AT, needs_solution=True)
    vgr, dependency = looks(*load_for_inference(model), list(rows), options.max_completion_length)
    measured = {"accuracy": scores.mean_at_k, "greedy": scores.accuracy, "blanked": scores.blind}
    return measured | {"late VGR": vgr, "dependency": dependency} | trained


def as_flags(values: Mapping[str, Any]) -> Iterator[Any]:
    """Yield a command line."""
    for name, value in values.items():
        if name != "script":
            yield f"--{name}"
            yield from value if isinstance(value, list) else [str(value).lower() if isinstance(value, bool) else value]


def train(script: str | None, flags: Sequence[str], output: Path, tiny: Path) -> dict[str, float]:
    """Train in a process of its own; return tokens, CPU seconds with the start, and the speed of convergence."""
    command = ["bash", script] if script else [sys.executable, "-m", "vgr_trl.cli", "train"]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    variables = {"PATH": path, "TINY": "1", "TINY_FOLDER": str(tiny.absolute()), "OMP_NUM_THREADS": "1"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    output.mkdir(parents=True)
    with output.with_suffix(".log").open("w") as log:
        subprocess.run(
            [*command, *flags, "--output_dir", str(output)],
            env=os.environ | variables,
            check=True,
            stdout=log,
            stderr=log,
        )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    history = json.loads((output / "trainer_state.json").read_text())["log_history"]
    tokens = max(entry.get("num_tokens", 0) for entry in history)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    rewards = [entry[ACCURACY] for entry in history if ACCURACY in entry]
    return {"tokens": tokens, "CPU seconds": seconds, "steps to 90 %": steps_to_best(rewards)}


def steps_to_best(rewards: Sequence[float], share: float = 0.9, window: int = 5) -> int:
    """Return the step at which the mean reward of the last `window` steps reaches `share` of its best."""
    means = [statistics.mean(rewards[stop - window : stop]) for stop in range(window, len(rewards) + 1)]
    return window + next(place for place, mean in enumerate(means) if mean >= share * max(means))


Finished = Mapping[tuple[str, int], Mapping[str, Any]]


def write(grid: Mapping[str, Any], runs: Finished, results: Path, file: Path) -> None:
    """Write the table and the plot: means over seeds, with 95 % intervals of a bootstrap over them."""
    names = [name for name, _ in cells(grid) if any(run == name for run, _ in runs)]
    machine = ", ".join(f"{key} {value}" for key, value in describe_machine(1).items())
    measures = [measure for measure in MEASURES[1:] if any(measure in found for found in runs.values())]
    heads = ["run", "seeds", "accuracy", "interval", f"against {grid['baseline']}", *measures]
    commits = ", ".join(sorted({found.get("commit", "not recorded") for found in runs.values()}))
    command = f"`PYTHONPATH=src:benchmarks python -m compare {file}`, commit {commits}"
    lines = [f"# {grid['title']}", "", f"Command: {command}; {machine}.", ""]
    lines += [grid["about"].strip(), "", f"| {' | '.join(heads)} |", f"|---|{'---:|' * (len(heads) - 1)}"]
    lines += [f"| {' | '.join(row(name, runs, grid['baseline'], measures))} |" for name in names]
    lines += ["", f"![accuracy and its interval]({results.stem}.png)"]
    lines += ["", grid["findings"].strip()] if "findings" in grid else []
    results.with_suffix(".md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    plot(names, runs, results.with_suffix(".png"))


def row(name: str, runs: Finished, baseline: str, measures: Sequence[str]) -> list[str]:
    """Return the cells of a line of the table."""
    own = {seed: found for (run, seed), found in runs.items() if run == name}
    accuracy = [found["accuracy"] for found in own.values()]
    gained = [
        found["accuracy"] - runs[baseline, seed]["accuracy"] for seed, found in own.items() if (baseline, seed) in runs
    ]
    line = [name, str(len(own)), f"{statistics.mean(accuracy):.3f}", between(accuracy, ".3f")]
    against = f"{statistics.mean(gained):+.3f} ({between(gained, '+.3f')})" if gained and name != baseline else ""
    line.append(against.replace(" ()", ""))
    for measure in measures:
        values = [found[measure] for found in own.values() if measure in found]
        line.append(f"{statistics.mean(values):.{0 if measure in MEASURES[-3:] else 3}f}" if values else "")
    return line


def between(values: Sequence[float], form: str) -> str:
    """Return a 95 % interval of the mean by bootstrap; nothing for fewer than three values."""
    return " to ".join(f"{end:{form}}" for end in interval(values)) if len(values) >= 3 else ""


def plot(names: Sequence[str], runs: Finished, file: Path) -> None:
    """Draw accuracy with its interval, every seed, and accuracy on blanked images, a line for each run."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 0.8 + 0.3 * len(names)), layout="constrained")
    for place, name in enumerate(reversed(names)):
        own = [found for (run, _), found in runs.items() if run == name]
        accuracy = [found["accuracy"] for found in own]
        axes.plot(interval(accuracy), [place, place], color="C0", linewidth=2)
        axes.plot(accuracy, [place] * len(own), ".", color="C0", alpha=0.4)
        axes.plot(statistics.mean(accuracy), place, "o", color="C0")
        axes.plot(statistics.mean(found["blanked"] for found in own), place, "x", color="C1")
    axes.set_yticks(range(len(names)), list(reversed(names)))
    axes.set_xlabel("accuracy: seeds, mean and 95 % interval; crosses: images blanked")
    axes.grid(alpha=0.3)
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
