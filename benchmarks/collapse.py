"""How the README's recipe collapses at a high learning rate, and which part of it the VGR reward is.

python benchmarks/collapse.py --seeds 0 1 2 3 4 --learning_rate 1e-3 --steps 60

Every seed warm-starts one tiny model of the demo, from which each variant trains on. A floor lets the VGR reward divide
by max(Q3 - Q1, floor · median) of the group instead of Q3 - Q1, so that differences within noise earn little.
Writes `results/collapse.md` and `.json` after each run.
"""

import argparse
import copy
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from demo_seeds import describe_machine
from demo_signals import add

from vgr_trl.demo.dataset import as_dataset, words_of
from vgr_trl.demo.options import Options
from vgr_trl.demo.reinforce import trainer_options
from vgr_trl.demo.run import draw, set_up_process, warm_up
from vgr_trl.demo.tiny_vlm import build_tiny_vlm
from vgr_trl.evaluation import evaluate
from vgr_trl.rewards import accuracy_reward, get_soft_overlong_punishment, think_format_reward, vgr_reward
from vgr_trl.rewards.whole_groups import needs_whole_groups
from vgr_trl.trainer import DAPOTrainer
from vgr_trl.training.metrics.collapse_watch import Course, find_signs

RESULTS = Path(os.environ.get("RESULTS", Path(__file__).parent / "results"))
README: dict[str, Any] = {
    "reward_weights": [2.5, 1.0, 0.5, 1.0],  # accuracy, VGR, format, length
    "early_reward_weights": [1.0, 1.0, 2.0, 1.0],
    "token_weights": True,
    "replay_buffer_size": 64,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "recipe": {},
    "no VGR reward": {"reward_weights": [2.5, 0.0, 0.5, 1.0], "early_reward_weights": [1.0, 0.0, 2.0, 1.0]},
    "floor 0.2": {"floor": 0.2},
    "not divided": {"scale_rewards": "none"},
    "floor 0.2, not divided": {"floor": 0.2, "scale_rewards": "none"},
    "no token weights": {"token_weights": False},
}
CURVES = ("rewards/accuracy_reward/mean", "rewards/think_format_reward/mean", "completions/mean_length", "entropy")


def main() -> None:
    """Run every seed and variant; write what there is after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(5)))
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--prompts", type=int, default=12, help="per step, with 8 completions each")
    parser.add_argument("--add_to", action="store_true", help="keep the seeds that the results hold already")
    flags = parser.parse_args()
    found = RESULTS / "collapse.json"
    runs: list[dict[str, Any]] = json.loads(found.read_text())["runs"] if flags.add_to and found.exists() else []
    for seed in flags.seeds:
        options = Options(
            seed=seed, steps=flags.steps, learning_rate=flags.learning_rate, prompts_per_step=flags.prompts
        )
        set_up_process(options)
        questions = draw(seed)
        model, processor = build_tiny_vlm(words_of(questions.train), seed=seed)
        warm_up(model, processor, questions, options)
        add(runs, {"seed": seed, "variant": "start", **held_out(model, processor, questions.test)})
        start = copy.deepcopy(model.state_dict())
        for variant in flags.variants:
            model.load_state_dict(start)
            torch.manual_seed(seed)
            began = time.monotonic()
            history = reinforce(model, processor, questions.train, options, README | VARIANTS[variant])
            run = {"seed": seed, "variant": variant, "seconds": round(time.monotonic() - began, 1)}
            add(runs, run | held_out(model, processor, questions.test) | {"curves": curves(history)})
            print(json.dumps({name: value for name, value in runs[-1].items() if name != "curves"}), flush=True)
            write(runs, flags)


def reinforce(model: Any, processor: Any, rows: Any, options: Options, changed: dict[str, Any]) -> list[dict[str, Any]]:
    """Train `model` in place; return the log."""
    changed = dict(changed)
    looks = floored(changed.pop("floor", 0.0))
    with tempfile.TemporaryDirectory() as folder:
        quiet = {"log_completions": False, "disable_tqdm": True, "rollout_log_steps": 0}
        trainer = DAPOTrainer(
            model=model,
            processing_class=processor,
            reward_funcs=[accuracy_reward, looks, think_format_reward, get_soft_overlong_punishment(16, 4)],
            args=trainer_options(options, Path(folder), **quiet | changed),
            train_dataset=as_dataset(rows),
        )
        trainer.train()
    return trainer.state.log_history


def floored(floor: float) -> Callable[..., Any]:
    """Return `vgr_reward` with the distance of the quartiles at least `floor` times the median of the group."""
    if floor == 0:
        return vgr_reward

    @needs_whole_groups("vgr")
    def floored_vgr_reward(completions: Any, vgr: Any, num_generations: int, **kwargs: Any) -> list[float | None]:
        rewards: list[float | None] = []
        for first in range(0, len(vgr), num_generations):
            group = vgr[first : first + num_generations]
            finite = [value for value in group if value is not None and math.isfinite(value)]
            if len(finite) < 2:
                rewards += [None if value is None else 0.5 for value in group]
                continue
            low, middle, high = statistics.quantiles(finite, n=4, method="inclusive")
            distance = max(high - low, floor * middle)
            rewards += [
                None if value is None or math.isnan(value) else min(max((high - value) / distance, 0.0), 1.0)
                for value in group
            ]
        return rewards

    return floored_vgr_reward


def held_out(model: Any, processor: Any, rows: Any) -> dict[str, float]:
    """Sampled accuracy and format on held-out questions."""
    settings: dict[str, Any] = {"system_prompt": None, "max_completion_length": 16, "batch_size": 64}
    result = evaluate(model, processor, rows, num_samples=4, **settings, progress=False)
    return {"accuracy": round(result.mean_at_k or 0.0, 4), "format": round(result.format_sampled or 0.0, 4)}


def curves(history: list[dict[str, Any]]) -> dict[str, list[float]]:
    """What was logged at every step, of the metrics that show a collapse."""
    return {name: [round(step[name], 4) for step in history if name in step] for name in CURVES}


def warned(run: dict[str, Any]) -> str:
    """The step at which the curves show a sign of collapse, – if they do not."""
    courses = {name: Course() for name in CURVES}
    weights = dict(zip(("accuracy_reward", "vgr_reward", "think_format_reward"), (2.5, 1.0, 0.5), strict=True))
    for step in range(len(run["curves"][CURVES[0]])):
        for name, course in courses.items():
            course.add(run["curves"][name][step])
        if find_signs(courses, weights):
            return str(step + 1)
    return "–"


def write(runs: list[dict[str, Any]], flags: Any) -> None:
    """Write the numbers and the tables."""
    machine = describe_machine(1)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "collapse.json").write_text(json.dumps({"machine": machine, "runs": runs}) + "\n")
    (RESULTS / "collapse.md").write_text(report(runs, machine, flags))


def report(runs: list[dict[str, Any]], machine: dict[str, Any], flags: Any) -> str:
    """One table per measure: variants by seeds."""
    variants = [name for name in ("start", *VARIANTS) if any(run["variant"] == name for run in runs)]
    seeds = sorted({run["seed"] for run in runs})
    lines = [
        "# Collapse at a high learning rate",
        "",
        f"Command: `python benchmarks/collapse.py --seeds {' '.join(map(str, seeds))} "
        f"--learning_rate {flags.learning_rate:g} --steps {flags.steps} --prompts {flags.prompts}`",
        "",
        ", ".join(f"{name} {value}" for name, value in machine.items()) + ".",
        "",
        "The recipe of the README (rewards accuracy 2.5, VGR 1, format 0.5, length 1, other weights early on, token "
        "weights, replay) on the tiny model of the demo. `no VGR reward` gives that reward the weight 0; `floor 0.2` "
        "divides by max(Q3 - Q1, 0.2 · median) of the group's VGR instead of Q3 - Q1; `not divided` is `scale_rewards` "
        "none; `no token weights` is the recipe without them. The last column is the steps at which the curves of "
        "accuracy, format, length and entropy show a sign of collapse, in the order of the seeds; – where they do not.",
        "",
    ]
    for name, title in (
        ("accuracy", "Accuracy of sampled answers to 320 held-out questions"),
        ("format", "Their format"),
    ):
        head = " | ".join(["variant", *(f"seed {seed}" for seed in seeds), "mean", "warned of"])
        lines += [f"## {title}", "", f"| {head} |", "|---|" + "---:|" * (len(seeds) + 1) + "---|"]
        for variant in variants:
            values = {run["seed"]: run[name] for run in runs if run["variant"] == variant}
            cells = [f"{values[seed]:.3f}" if seed in values else "" for seed in seeds]
            told = [warned(run) for run in runs if run["variant"] == variant and "curves" in run]
            lines.append(
                f"| {variant} | {' | '.join(cells)} | {statistics.mean(values.values()):.3f} | {', '.join(told)} |"
            )
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
