"""Run by test_seams_of_methods.py in one or two processes: three SGD steps of what methods of others need."""

import json
import sys
from pathlib import Path

import torch
from dealt_completions import generate_by_prompt
from support.trainers import BIG_STEPS, config, moves, prompts, vision_trainer

from vgr_trl.registries import declares
from vgr_trl.rewards import accuracy_reward, load_reward


@declares(needs=("similarity",))
def likeness_reward(completions, similarity, **kwargs):
    """The mean similarity of each completion's tokens to the image."""
    return similarity


CASES = {
    "regions, similarity and views": {
        "reward_funcs": [load_reward("region"), likeness_reward],
        "hidden_similarity_layer": 1,
        "signals": ["region_focus", "stability"],
        "perturbation": "remove_image",
        "further_perturbations": ["blacken_patches"],
        "enable_perception_filtering": True,
        "enable_trajectory_reweighting": True,
    },
    "noise": {
        "reward_funcs": [accuracy_reward],
        "noisy_generations": 2,
        "noisy_importance": "perturbed",
        "noisy_decay": "sigmoid",
        "noisy_decay_coef": 3.0,
        "noisy_decay_midpoint": 2.0,
        "noisy_decay_of": "both",
    },
    "blind answers": {
        "reward_funcs": [load_reward("blind_accuracy"), accuracy_reward],
        "blind_without_tag": "completion",
    },
}


def run(name, model_folder, question_file, output, rows_per_process):
    """How far weights moved, what was logged, and the table of completions."""
    options = {"gradient_accumulation_steps": 2, "max_steps": 3} | BIG_STEPS | CASES[name]
    rewards = options.pop("reward_funcs")
    options = config(output / name.replace(" ", "_"), per_device_train_batch_size=rows_per_process, **options)
    rows = prompts(question_file)
    boxes = [[0.0, 0.0, 1.0, 0.25 * (1 + row % 3)] if row % 4 else None for row in range(len(rows))]
    trainer = vision_trainer(model_folder, rewards, options, rows.add_column("bbox", boxes))
    trainer.model.generate = generate_by_prompt(trainer)
    trainer.train()
    return moves(trainer, model_folder), {
        "history": [entry for entry in trainer.state.log_history if "reward" in entry],
        "rewards": {key: list(values) for key, values in trainer._logs["rewards"].items()},
        "extra": {key: list(values) for key, values in trainer._logs["extra"].items()},
    }


def run_all(*arguments):
    """Name of the case -> weights, and what was logged."""
    found = {name: run(name, *arguments) for name in CASES}
    return {name: moved for name, (moved, _) in found.items()}, {name: result for name, (_, result) in found.items()}


if __name__ == "__main__":
    output = Path(sys.argv[3])
    moved, results = run_all(sys.argv[1], sys.argv[2], output, int(sys.argv[4]))
    if torch.distributed.get_rank() == 0:
        torch.save(moved, output / "moves.pt")
        (output / "results.json").write_text(json.dumps(results))
