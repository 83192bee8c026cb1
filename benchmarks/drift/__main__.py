"""Runs of the drift; `results/vgr_drift.md` after each.

    PYTHONPATH=src:benchmarks python -m drift --seeds 0 1 2 3 4

Every seed warm-starts one model of the demo, from which every variant trains on. Runs that are there are not repeated.
"""

import argparse
import copy
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import PrinterCallback

from drift.looks import parts, within_groups
from drift.report import FILE, read, write
from drift.variants import VARIANTS, Variant
from vgr_trl.demo.dataset import as_dataset, words_of
from vgr_trl.demo.options import Options
from vgr_trl.demo.reinforce import trainer_options
from vgr_trl.demo.run import draw, set_up_process, warm_up
from vgr_trl.demo.tiny_vlm import build_tiny_vlm
from vgr_trl.evaluation import evaluate
from vgr_trl.trainer import DAPOTrainer

COURSE = ("attention/late/vgr", "rewards/accuracy_reward/mean", "entropy")
LOOKED_AT = 160  # held-out questions


def main() -> None:
    """Run what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(5)))
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--prompts", type=int, default=12, help="per step, of 8 completions each")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no run after that")
    parser.add_argument("--write", action="store_true", help="write the tables of what there is, run nothing")
    flags = parser.parse_args()
    settings = {"steps": flags.steps, "prompts": flags.prompts}
    ends = time.monotonic() + 60 * flags.minutes
    for seed in [] if flags.write else flags.seeds:
        there = {run["variant"] for run in read(settings) if run["seed"] == seed}
        if missing := [name for name in flags.variants if name not in there]:
            run_seed(seed, missing, settings, ends, look="start" not in there)
    write(settings)


def run_seed(seed: int, names: list[str], settings: dict[str, int], ends: float, *, look: bool) -> None:
    """Warm-start a model and train it by each variant."""
    options = Options(seed=seed, steps=settings["steps"], prompts_per_step=settings["prompts"])
    set_up_process(options)
    questions = draw(seed)
    model, processor = build_tiny_vlm(words_of(questions.train), seed=seed)
    warm_up(model, processor, questions, options)
    start = copy.deepcopy(model.state_dict())
    looked_at = questions.test[:LOOKED_AT]
    if look:
        keep(
            {"seed": seed, "variant": "start", "within": within_groups(model, processor, looked_at)}
            | parts(model, processor, looked_at, start, start)
            | held_out(model, processor, questions.test),
            settings,
        )
    for name in names:
        if time.monotonic() > ends:
            return
        model.load_state_dict(start)
        torch.manual_seed(seed)
        began = time.process_time()
        course = train(model, processor, questions.train, options, VARIANTS[name])
        seconds = round(time.process_time() - began, 1)
        end = copy.deepcopy(model.state_dict())
        found = held_out(model, processor, questions.test) | parts(model, processor, looked_at, start, end)
        within = within_groups(model, processor, looked_at)
        keep({"seed": seed, "variant": name, "CPU s": seconds, "course": course, "within": within} | found, settings)
        write(settings)


def train(model: Any, processor: Any, rows: Any, options: Options, variant: Variant) -> dict[str, list[float]]:
    """Train a model in place; return what was logged of it."""
    quiet = {"log_completions": False, "disable_tqdm": True, "rollout_log_steps": 0, "compute_attention_metrics": True}
    with tempfile.TemporaryDirectory() as folder:
        trainer = DAPOTrainer(
            model=model,
            processing_class=processor,
            reward_funcs=variant.rewards,
            args=trainer_options(
                options, Path(folder), **quiet | {"reward_weights": variant.weights} | variant.options
            ),
            train_dataset=as_dataset(rows),
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    history = trainer.state.log_history
    return {name: [round(step[name], 4) for step in history if name in step] for name in COURSE}


def held_out(model: Any, processor: Any, rows: Any) -> dict[str, float]:
    """Sampled accuracy and format on held-out questions, and accuracy with blank images."""
    settings: dict[str, Any] = {"system_prompt": None, "max_completion_length": 16, "batch_size": 64, "num_samples": 4}
    seen, blanked = (
        evaluate(model, processor, rows, blank_images=blank, progress=False, **settings) for blank in (False, True)
    )
    return {
        "accuracy": round(seen.mean_at_k or 0.0, 4),
        "format": round(seen.format_sampled or 0.0, 4),
        "blanked": round(blanked.mean_at_k or 0.0, 4),
    }


def keep(run: dict[str, Any], settings: dict[str, int]) -> None:
    """Append a run to the results."""
    FILE.parent.mkdir(exist_ok=True)
    with FILE.open("a") as lines:
        lines.write(json.dumps(run | {"settings": settings}) + "\n")
    print(run["seed"], run["variant"], run["accuracy"], round(run["late VGR"], 4), run.get("CPU s"), flush=True)


if __name__ == "__main__":
    main()
