"""What replay and resampling do on a demo whose start is weak; writes `results/demo_replay.md` and `.json`.

python benchmarks/demo_replay.py --seeds 0 1 2 3 4

Every seed warm-starts one model, less than the demo does, so that over a third of the groups carry no gradient. Each
variant trains on from it for the same number of steps, with accuracy as the only reward and four completions a prompt.
"""

import argparse
import copy
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from demo_seeds import describe_machine

from vgr_trl.demo.dataset import as_dataset, words_of
from vgr_trl.demo.options import Options
from vgr_trl.demo.reinforce import trainer_options
from vgr_trl.demo.run import draw, set_up_process, warm_up
from vgr_trl.demo.tiny_vlm import build_tiny_vlm
from vgr_trl.evaluation import evaluate
from vgr_trl.rewards import accuracy_reward
from vgr_trl.trainer import DAPOTrainer

RESULTS = Path(__file__).parent / "results"
VARIANTS: dict[str, dict[str, Any]] = {
    "none": {},
    "replay": {"replay_buffer_size": 64},
    "resample": {"dynamic_sampling": "resample", "dynamic_sampling_max_rounds": 3},
}
PROMPTS = Options.prompts_per_step
COLUMNS = ("accuracy before", "accuracy after", "dead as generated", "live in the batch", "million tokens", "seconds")


def main() -> None:
    """Run every seed and variant; write what there is after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(5)))
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--start", type=float, default=0.3, help="sampled accuracy at which the warm start ends")
    flags = parser.parse_args()
    runs: list[dict[str, Any]] = []
    for seed in flags.seeds:
        options = Options(seed=seed, steps=flags.steps, warm_start_accuracy=flags.start, num_generations=4)
        set_up_process(options)
        questions = draw(seed)
        model, processor = build_tiny_vlm(words_of(questions.train), seed=seed)
        warm_up(model, processor, questions, options)
        start, before = copy.deepcopy(model.state_dict()), accuracy(model, processor, questions.test)
        for variant in flags.variants:
            model.load_state_dict(start)
            torch.manual_seed(seed)
            found = reinforce(model, processor, questions, options, variant)
            after = accuracy(model, processor, questions.test)
            runs.append({"seed": seed, "variant": variant, "accuracy before": before, "accuracy after": after, **found})
            print(json.dumps(runs[-1]))
            write(runs, flags)


def accuracy(model: Any, processor: Any, rows: Any) -> float:
    """Mean of eight sampled answers to each held-out question."""
    result = evaluate(
        model, processor, rows, num_samples=8, max_completion_length=16, batch_size=64, system_prompt=None,
        progress=False,
    )  # fmt: skip
    return round(result.mean_at_k or 0.0, 4)


def reinforce(model: Any, processor: Any, questions: Any, options: Options, variant: str) -> dict[str, Any]:
    """Train `model` in place; the fractions of dead and live groups, and what it took."""
    with tempfile.TemporaryDirectory() as folder:
        config = trainer_options(
            options,
            Path(folder),
            reward_weights=[1.0],
            log_completions=False,
            disable_tqdm=True,
            compute_attention_metrics=False,
            **VARIANTS[variant],
        )
        trainer = DAPOTrainer(
            model=model,
            processing_class=processor,
            reward_funcs=[accuracy_reward],
            args=config,
            train_dataset=as_dataset(questions.train),
        )
        began = time.monotonic()
        trainer.train()
        history = [entry for entry in trainer.state.log_history if "reward" in entry]
    dead = [entry["frac_reward_zero_std"] for entry in history]
    live = [entry.get("sampling/live_fraction", 1 - entry["frac_reward_zero_std"]) for entry in history]
    return {
        "dead as generated": round(statistics.mean(dead), 3),
        "live in the batch": round(statistics.mean(live), 3),
        "million tokens": round(history[-1]["num_tokens"] / 1e6, 3),
        "seconds": round(time.monotonic() - began, 1),
    }


def write(runs: list[dict[str, Any]], flags: Any) -> None:
    """Write the numbers and the table."""
    machine = describe_machine(1)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "demo_replay.json").write_text(json.dumps({"machine": machine, "runs": runs}, indent=1) + "\n")
    seeds = list(dict.fromkeys(run["seed"] for run in runs))
    lines = [
        "# Replay and resampling on a weak start",
        "",
        f"Command: `python benchmarks/demo_replay.py --seeds {' '.join(map(str, seeds))} --steps {flags.steps} "
        f"--start {flags.start}`",
        "",
        ", ".join(f"{name} {value}" for name, value in machine.items()) + ". Other work shared the cores.",
        "",
        f"320 held-out questions, 8 sampled answers each; {PROMPTS} prompts of 4 completions per step. Tokens count "
        "prompts and completions of everything generated. `gain` is accuracy gained, per step and per million tokens.",
        "",
        "| variant | seed | " + " | ".join(COLUMNS) + " | live groups per step | gain per step | per million tokens |",
        "|---|---:|" + "---:|" * (len(COLUMNS) + 3),
    ]
    for variant in VARIANTS:
        chosen = [run for run in runs if run["variant"] == variant]
        for run in chosen:
            lines.append(f"| {variant} | {run['seed']} | {cells(run, flags.steps)} |")
        if len(chosen) > 1:
            mean = {name: statistics.mean(run[name] for run in chosen) for name in COLUMNS}
            lines.append(f"| **{variant}** | mean | {cells(mean, flags.steps)} |")
    (RESULTS / "demo_replay.md").write_text("\n".join(lines) + "\n")


def cells(run: dict[str, Any], steps: int) -> str:
    """The numbers of a row of the table."""
    gain = run["accuracy after"] - run["accuracy before"]
    derived = f"{PROMPTS * run['live in the batch']:.1f}", f"{gain / steps:.5f}", f"{gain / run['million tokens']:.3f}"
    return " | ".join([*(f"{run[name]:.3f}" for name in COLUMNS), *derived])


if __name__ == "__main__":
    main()
