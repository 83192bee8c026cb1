"""Every recipe from the demo's warm-started model; writes `results/recipe_runs.md`.

    python benchmarks/recipe_runs.py --seeds 0 1 2 3 4 --steps 100
    python docs/recipes_table.py     # the pages of docs/methods take their rows from it

A run is a line of `results/recipe_runs.jsonl`; what is there is not run again.
"""

import argparse
import json
import shlex
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from machine import RESULTS, describe_machine
from methods.seeds import interval

from vgr_trl.cli.__main__ import main as vgr_trl
from vgr_trl.demo import Options
from vgr_trl.demo.demo import EVALUATION, draw_questions
from vgr_trl.demo.write_folder import write_warm_folder
from vgr_trl.evaluation import evaluate
from vgr_trl.recipes import load_recipe, recipe_names
from vgr_trl.trainer import DAPOTrainer
from vgr_trl.utils import patched_attribute

LINES, PAGE = RESULTS / "recipe_runs.jsonl", RESULTS / "recipe_runs.md"
FLAGS = (
    "--model_name_or_path WARM/model --data_files train=WARM/train.parquet "
    "--system_prompt_file WARM/no_system_prompt.txt --use_cpu true --bf16 false --dtype float32 "
    "--gradient_checkpointing false --num_generations 8 --per_device_train_batch_size 192 --max_completion_length 16 "
    "--learning_rate 3e-4 --lr_scheduler_type constant_with_warmup --warmup_ratio 0.03 --eval_strategy no "
    "--save_strategy no --rollout_log_steps 0 --compute_attention_metrics false --report_to none"
)
TEXT = """# Recipes on the demo

Command: `python benchmarks/recipe_runs.py --seeds {seeds} --steps {steps}`, at commit {commit}. {machine}.
Rewards and credit are the recipe's; sizes, learning rate and schedule are the demo's, the same for all. Accuracy is
of 4 sampled answers to each of 160 held-out questions; from three seeds on, the change has its 95 % interval, by
bootstrap over seeds. A run from the warm-started model in the folder `WARM`: `{command}`.

| recipe | seeds | accuracy before | after | change | CPU seconds a step |
|---|---:|---:|---:|---:|---:|
"""


def command(recipe: str, seed: int, steps: int) -> list[str]:
    """Return the words of a run; WARM and OUT stand for folders."""
    options = load_recipe(recipe)
    own = ["--soft_punish_cache", "4"] * ("length" in options["reward_funcs"])
    own += ["--noisy_generations", "4"] * ("noisy_generations" in options)
    own += ["--max_steps", str(steps), "--seed", str(seed), "--output_dir", "OUT"]
    return ["train", "--recipe", recipe, *shlex.split(FLAGS), *own]


def run(words: list[str], seed: int) -> dict[str, float]:
    """Train, and return accuracy before and after, and the CPU seconds of the steps without what comes around them."""
    warm, found, plain = Path("runs/recipe_runs", f"seed-{seed}"), dict[str, float](), DAPOTrainer.train
    write_warm_folder(warm, Options(seed=seed))

    def accuracy(trainer: Any) -> float:
        rows = draw_questions(160, seed=seed, split="test", multiple_choice=False)
        torch.manual_seed(seed)
        settings: Any = {**EVALUATION, "num_samples": 4, "batch_size": 64, "progress": False}
        return evaluate(trainer.model, trainer.processing_class, rows, **settings).mean_at_k or 0.0

    def measured(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        found["before"], began = accuracy(trainer), time.process_time()
        output = plain(trainer, *args, **kwargs)
        found["seconds"] = time.process_time() - began
        found["after"] = accuracy(trainer)
        return output

    with tempfile.TemporaryDirectory() as out, patched_attribute(DAPOTrainer, "train", measured):
        if vgr_trl([word.replace("WARM", str(warm)).replace("OUT", f"{out}/run") for word in words]):
            raise RuntimeError(f"This run failed: vgr-trl {shlex.join(words)}")
    return found


def row(recipe: str, runs: list[dict[str, Any]]) -> str:
    """Return the row of a recipe on the page."""
    before, after, seconds = (statistics.mean(each[name] for each in runs) for name in ("before", "after", "seconds"))
    low, high = interval([each["after"] - each["before"] for each in runs])
    change = f"{after - before:+.3f}" + f" ({low:+.3f} to {high:+.3f})" * (len(runs) > 2)
    return f"| `{recipe}` | {len(runs)} | {before:.3f} | {after:.3f} | {change} | {seconds / runs[0]['steps']:.2f} |\n"


def main() -> None:
    """Run what is missing, then write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", default=recipe_names(), choices=recipe_names())
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=100)
    flags, commit = parser.parse_args(), subprocess.getoutput("git rev-parse --short HEAD")
    runs = [json.loads(line) for line in LINES.read_text().splitlines()] if LINES.exists() else []
    runs = [each for each in runs if each["steps"] == flags.steps]
    there = {(each["recipe"], each["seed"]) for each in runs}
    for recipe, seed in ((name, seed) for seed in flags.seeds for name in flags.recipes if (name, seed) not in there):
        words = command(recipe, seed, flags.steps)
        known = {"recipe": recipe, "seed": seed, "steps": flags.steps, "commit": commit}
        runs.append(known | run(words, seed) | {"command": f"vgr-trl {shlex.join(words)}"})
        with LINES.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(runs[-1]) + "\n")
        print(f"{runs[-1]['command']}\n{row(recipe, runs[-1:])}", end="", flush=True)
    seeds, commits = (" ".join(sorted({str(each[name]) for each in runs})) for name in ("seed", "commit"))
    machine = ", ".join(f"{name} {value}" for name, value in describe_machine(1).items())
    text = TEXT.format(command=runs[0]["command"], seeds=seeds, steps=flags.steps, commit=commits, machine=machine)
    of = {name: [each for each in runs if each["recipe"] == name] for name in recipe_names()}
    PAGE.write_text(text + "".join(row(name, mine) for name, mine in of.items() if mine), encoding="utf-8")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
