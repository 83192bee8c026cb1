"""Run by test_stages.py in one or two processes: three SGD steps of every stage, with completions that do not depend on
how they are dealt to processes."""

import json
import sys
from pathlib import Path

import torch
from support.dealt_completions import generate_by_prompt
from support.trainers import BIG_STEPS, config, moves, prompts, vision_trainer

from vgr_trl.registries import declares
from vgr_trl.rewards import accuracy_reward, load_reward, mdi_reward, vgr_hard_negative_reward, vgr_reward


def coarse_reward(completions, **kwargs):
    """Equal within many groups."""
    return [float(len(completion[0]["content"]) % 2) for completion in completions]


def uneven_reward(completions, **kwargs):
    """Equal within about half of the groups."""
    return [float(len(completion[0]["content"]) % 3 == 0) for completion in completions]


def sparse_reward(completions, **kwargs):
    """Equal within most groups."""
    return [float(len(completion[0]["content"]) % 5 == 0) for completion in completions]


def partial_reward(completions, **kwargs):
    """None for the completions that answer A."""
    texts = [completion[0]["content"] for completion in completions]
    return [None if "<answer>A" in text else float(len(text) % 2) for text in texts]


@declares(needs=("similarity",))
def likeness_reward(completions, similarity, **kwargs):
    """The mean similarity of each completion's tokens to the image."""
    return similarity


CASES = {
    "signals": {
        "reward_funcs": [accuracy_reward, vgr_reward, vgr_hard_negative_reward, mdi_reward],
        "token_weights": True,
        "token_weights_smooth_sigma": 1.0,
        "enable_perception_filtering": True,
        "enable_entropy_filtering": True,
        "enable_trajectory_reweighting": True,
        "use_entropy_penalty": True,
    },
    "published credit": {
        "reward_funcs": [accuracy_reward, vgr_reward],
        "credit_rules": ["vgpo", "vepo"],
        "hidden_similarity_over": "centre",
        "hidden_similarity_layer": 1,
        "max_steps": 2,
    },
    "replay": {"reward_funcs": [coarse_reward], "replay_buffer_size": 4, "max_steps": 5},
    "replay without measuring": {
        "reward_funcs": [coarse_reward],
        "replay_buffer_size": 4,
        "max_steps": 5,
        "compute_attention_metrics": False,
    },
    "replay and resample": {
        "reward_funcs": [uneven_reward],
        "replay_buffer_size": 16,
        "dynamic_sampling": "resample",
        "dynamic_sampling_max_rounds": 1,
        "max_steps": 11,
        "compute_attention_metrics": False,
    },
    "resample": {"reward_funcs": [sparse_reward], "dynamic_sampling": "resample", "token_weights": True},
    "remax": {"reward_funcs": [accuracy_reward, vgr_reward], "advantage_estimator": "remax"},
    "kl in the loss": {
        "reward_funcs": [accuracy_reward],
        "kl_coef": 0.5,
        "kl_penalty": "mse",
        "kl_type": "adaptive",
        "kl_target": 1e-3,
        "kl_horizon": 50,
    },
    "kl among the rewards": {
        "reward_funcs": [sparse_reward],
        "kl_coef": 0.5,
        "use_kl_loss": False,
        "kl_type": "adaptive",
        "kl_target": 1e-3,
        "kl_horizon": 50,
        "dynamic_sampling": "resample",
    },
    "critic": {
        "reward_funcs": [partial_reward],
        "advantage_estimator": "gae",
        "lam": 0.9,
        "critic_learning_rate": 1e-2,
        "kl_coef": 0.5,
        "use_kl_loss": False,
        "token_weights": True,
    },
    "critic model": {
        "reward_funcs": [uneven_reward],
        "advantage_estimator": "gae",
        "critic": "model",
        "online_filtering": True,
        "filter_key": "overall",
        "dynamic_sampling": "resample",
    },
    "perception loss": {"reward_funcs": [accuracy_reward], "perception_loss_weight": 0.01, "der_loss_weight2": 0.03},
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
    options = {"gradient_accumulation_steps": 2, "max_steps": 3} | BIG_STEPS | CASES[name]
    rewards = options.pop("reward_funcs")
    if name == "critic":  # micro-batches of four rows: two in one process, or one in each of two
        options["gradient_accumulation_steps"], rows_per_process = rows_per_process // 2, 4
    options = config(output / name.replace(" ", "_"), per_device_train_batch_size=rows_per_process, **options)
    rows = prompts(question_file)
    if name == "regions, similarity and views":
        boxes = [[0.0, 0.0, 1.0, 0.25 * (1 + row % 3)] if row % 4 else None for row in range(len(rows))]
        rows = rows.add_column("bbox", boxes)
    trainer = vision_trainer(model_folder, rewards, options, rows)
    trainer.model.generate = generate_by_prompt(trainer)
    trainer.train()
    return moves(trainer, model_folder), {
        "history": [entry for entry in trainer.state.log_history if "reward" in entry],
        "rewards": {key: list(values) for key, values in trainer._logs["rewards"].items()},
        "advantages": list(trainer._logs["advantages"]),
        "extra": {key: list(values) for key, values in trainer._logs["extra"].items()},
    }


def run_all(*arguments):
    """How far weights moved in each case, and what was logged of it."""
    found = {name: run(name, *arguments) for name in CASES}
    return {name: moved for name, (moved, _) in found.items()}, {name: result for name, (_, result) in found.items()}


if __name__ == "__main__":
    output = Path(sys.argv[3])
    moved, results = run_all(sys.argv[1], sys.argv[2], output, int(sys.argv[4]))
    if torch.distributed.get_rank() == 0:
        torch.save(moved, output / "moves.pt")
        (output / "results.json").write_text(json.dumps(results))
