"""GRPO beside generalised advantage estimation on the demo; writes `results/demo_critic.md` and `.json`.

python benchmarks/demo_critic.py --seeds 0 1 2 3 4

Every seed warm-starts one model. Each variant trains on from it for the same number of steps, on the same prompts, with
accuracy as the only reward.
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
from demo_replay import accuracy
from demo_seeds import describe_machine

from vgr_trl.demo.dataset import as_dataset, words_of
from vgr_trl.demo.options import Options
from vgr_trl.demo.reinforce import trainer_options
from vgr_trl.demo.run import draw, set_up_process, warm_up
from vgr_trl.demo.tiny_vlm import build_tiny_vlm
from vgr_trl.rewards import accuracy_reward
from vgr_trl.trainer import DAPOTrainer

RESULTS = Path(__file__).parent / "results"
GAE = {"advantage_estimator": "gae", "critic_warmup": 5}
VARIANTS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "gae, head": {**GAE, "critic": "head", "critic_learning_rate": 3e-3},
    "gae, model": {**GAE, "critic": "model", "critic_learning_rate": 3e-4},
}
COLUMNS = ("accuracy before", "accuracy after", "explained variance", "CPU seconds per step")


def main() -> None:
    """Run every seed and variant; write what there is after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(5)))
    parser.add_argument("--steps", type=int, default=60)
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
        for variant in VARIANTS:
            model.load_state_dict(start)
            torch.manual_seed(seed)
            found = reinforce(model, processor, questions, options, variant)
            after = accuracy(model, processor, questions.test)
            runs.append({"seed": seed, "variant": variant, "accuracy before": before, "accuracy after": after, **found})
            print(json.dumps(runs[-1]))
            write(runs, flags, options)


def reinforce(model: Any, processor: Any, questions: Any, options: Options, variant: str) -> dict[str, Any]:
    """Train `model` in place; what the critic explained over the last half, and what a step took."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = DAPOTrainer(
            model=model,
            processing_class=processor,
            reward_funcs=[accuracy_reward],
            args=trainer_options(
                options,
                Path(folder),
                reward_weights=[1.0],
                log_completions=False,
                disable_tqdm=True,
                compute_attention_metrics=False,
                **VARIANTS[variant],
            ),
            train_dataset=as_dataset(questions.train),
        )
        began = time.process_time()
        trainer.train()
        seconds = time.process_time() - began
    history = [entry for entry in trainer.state.log_history if "reward" in entry]
    explained = [entry.get("critic/explained_variance", float("nan")) for entry in history[len(history) // 2 :]]
    return {
        "explained variance": round(statistics.mean(explained), 3),
        "CPU seconds per step": round(seconds / options.steps, 3),
    }


def write(runs: list[dict[str, Any]], flags: Any, options: Options) -> None:
    """Write the numbers and the table."""
    machine = describe_machine(1)
    (RESULTS / "demo_critic.json").write_text(json.dumps({"machine": machine, "runs": runs}, indent=1) + "\n")
    seeds = list(dict.fromkeys(run["seed"] for run in runs))
    lines = [
        "# A critic beside GRPO",
        "",
        f"Command: `python benchmarks/demo_critic.py --seeds {' '.join(map(str, seeds))} --steps {flags.steps} "
        f"--start {flags.start}`",
        "",
        ", ".join(f"{name} {value}" for name, value in machine.items()) + ". Other work shared the cores, so CPU "
        "seconds of this process are given.",
        "",
        f"320 held-out questions, 8 sampled answers each; {options.prompts_per_step} prompts of 4 completions per "
        "step. `explained variance` is of the returns by the values, mean over the second half of the steps. The "
        f"critics are trained alone for {GAE['critic_warmup']} of the steps.",
        "",
        "| variant | seed | " + " | ".join(COLUMNS) + " | gain |",
        "|---|---:|" + "---:|" * (len(COLUMNS) + 1),
    ]
    for variant in VARIANTS:
        chosen = [run for run in runs if run["variant"] == variant]
        lines += [f"| {variant} | {run['seed']} | {cells(run)} |" for run in chosen]
        if len(chosen) > 1:
            mean = {name: statistics.mean(run[name] for run in chosen) for name in COLUMNS}
            lines.append(f"| **{variant}** | mean | {cells(mean)} |")
    (RESULTS / "demo_critic.md").write_text("\n".join(lines) + "\n")


def cells(run: dict[str, Any]) -> str:
    """The numbers of a row of the table."""
    gain = run["accuracy after"] - run["accuracy before"]
    return " | ".join([*(f"{run[name]:.3f}".replace("nan", "") for name in COLUMNS), f"{gain:+.3f}"])


if __name__ == "__main__":
    main()
