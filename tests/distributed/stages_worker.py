"""Run by test_stages.py in one or two processes: three SGD steps of every stage, with completions that do not depend on
how they are dealt to processes."""

import json
import sys
from pathlib import Path

import torch
from datasets import Dataset, load_dataset
from dealt_completions import generate_by_prompt
from transformers import Qwen2_5_VLForConditionalGeneration

from vgr_trl import DAPOConfig, DAPOTrainer
from vgr_trl.data.rows.schema import prepare_rows
from vgr_trl.demo.tiny_vlm import load_processor
from vgr_trl.rewards import accuracy_reward, mdi_reward, vgr_hard_negative_reward, vgr_reward

model_folder, question_file, output, rows_per_process = sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])
GENERATIONS = 4


def coarse_reward(completions, **kwargs):
    """Equal within many groups."""
    return [float(len(completion[0]["content"]) % 2) for completion in completions]


def uneven_reward(completions, **kwargs):
    """Equal within about half of the groups."""
    return [float(len(completion[0]["content"]) % 3 == 0) for completion in completions]


def sparse_reward(completions, **kwargs):
    """Equal within most groups."""
    return [float(len(completion[0]["content"]) % 5 == 0) for completion in completions]


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
        "reward_funcs": [accuracy_reward],
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
}


def run(name, options, rows):
    options = dict(options)
    processor = load_processor(model_folder)
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(model_folder)
    defaults = {
        "output_dir": str(output / name.replace(" ", "_")),
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": rows_per_process,
        "num_generations": GENERATIONS,
        "gradient_accumulation_steps": 2,
        "max_completion_length": 64,
        "max_steps": 3,
        "learning_rate": 0.05,
        "optim": "sgd",
        "max_grad_norm": 1e9,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    rewards = options.pop("reward_funcs")
    trainer = DAPOTrainer(model, rewards, DAPOConfig(**defaults | options), rows, processing_class=processor)
    trainer.model.generate = generate_by_prompt(trainer, processor)
    trainer.train()
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    start = Qwen2_5_VLForConditionalGeneration.from_pretrained(model_folder)
    before = torch.cat([parameter.detach().flatten() for parameter in start.parameters()])
    table = {key: list(values) for key, values in trainer._logs["rewards"].items()}
    return (
        weights - before,
        {
            "history": [entry for entry in trainer.state.log_history if "reward" in entry],
            "rewards": table,
            "advantages": list(trainer._logs["advantages"]),
            "extra": {key: list(values) for key, values in trainer._logs["extra"].items()},
            "rows": len(trainer._logs["completion"]),
        },
        trainer.accelerator.is_main_process,
    )


rows, _ = prepare_rows(load_dataset("parquet", data_files=question_file, split="train"), system_prompt=None)
assert isinstance(rows, Dataset)
results, moves = {}, {}
for name, options in CASES.items():
    moves[name], results[name], is_main = run(name, options, rows)
if is_main:
    torch.save(moves, output / "moves.pt")
    (output / "results.json").write_text(json.dumps(results))
