"""TRL's scripts grpo_vlm, gspo_vlm and rloo_vlm with the flags of their commands, under ZeRO-3 with an adapter.

`DAPOTrainer` takes the place of TRL's, or `share_prompts` is around it. Shorter completions, no vLLM, and float32.
"""

import json
from pathlib import Path

import engines
import pytest
import torch
from support.launching import launch
from support.trainers import train_file

WORKER = Path(__file__).with_name("trl_script_worker.py")
ENGINE = engines.VARIABLES["zero3"] | {"ACCELERATE_DEEPSPEED_ZERO3_INIT": "true"}  # as TRL's deepspeed_zero3.yaml
OURS = "--dtype float32 --max_completion_length 8 --optim sgd --max_grad_norm 0"
EVERY = f"--learning_rate 0.1 {OURS} --use_peft --lora_dropout 0 --lora_target_modules q_proj v_proj --log_completions"
FLAGS = {
    "qwen": EVERY,
    "smolvlm": f"{EVERY} --per_device_train_batch_size 1 --gradient_accumulation_steps 2 --num_generations 2",
    "whole": f"{EVERY} --per_device_train_batch_size 2 --gradient_accumulation_steps 1 --num_generations 2",
    "gspo": f"{EVERY} --per_device_train_batch_size 8 --num_generations 8 --importance_sampling_level sequence "
    "--epsilon 3e-4 --epsilon_high 4e-4 --beta 0.0 --loss_type grpo --gradient_accumulation_steps 2 "
    "--steps_per_generation 8",
}
RLOO = "--advantage_estimator rloo"
RUNS = {  # name: trainer, flags of, more flags
    "DAPO qwen": ("DAPO", "qwen", ""),
    "DAPO gspo": ("DAPO", "gspo", ""),
    "DAPO rloo": ("DAPO", "qwen", RLOO),
    "GRPO qwen": ("GRPO", "qwen", ""),
    "GRPO gspo": ("GRPO", "gspo", ""),
    "GRPO smolvlm": ("GRPO", "smolvlm", ""),
    "GRPO whole": ("GRPO", "whole", ""),
    "RLOO qwen": ("RLOO", "qwen", ""),
}
WHOLE = {"generation": 1 / 8, "training": 1 / 8}
SHARED = {  # prompts computed per row, by kind of pass
    "DAPO qwen": WHOLE,
    "DAPO gspo": WHOLE | {"scoring": 1 / 8, "training": 0.7},  # micro-batches are shuffled
    "DAPO rloo": WHOLE | {"scoring": 1 / 8},
    "GRPO qwen": WHOLE,
    "GRPO gspo": WHOLE | {"scoring": 1 / 8, "training": 0.7},
    "GRPO smolvlm": {"generation": 1 / 2, "training": 1},
    "GRPO whole": {"generation": 1 / 2, "training": 1 / 2},
    "RLOO qwen": WHOLE | {"scoring": 1 / 8},
}


@pytest.fixture(scope="module")
def folder(model_folder, question_files, tmp_path_factory):
    """Every run, shared and plain."""
    folder = tmp_path_factory.mktemp("scripts")
    runs = {}
    for name, (trainer, flags, more) in RUNS.items():
        words = f"{FLAGS[flags]} {more}".split()
        runs[name] = trainer, True, words
        runs[f"{name} plain"] = trainer, False, [*words, *["--share_prompts", "off"] * (trainer == "DAPO")]
    launch(WORKER, model_folder, train_file(question_files), folder, json.dumps(runs), processes=2, engine=ENGINE)
    return folder


@pytest.mark.minutes
@pytest.mark.parametrize("name", RUNS)
def test_scripts_of_trl(name, folder):
    found, plain = (torch.load(folder / f"{each}.pt") for each in (name, f"{name} plain"))
    for kind, most in SHARED[name].items():
        assert found["counted"][kind] <= most, kind
        assert plain["counted"].get(kind, 1) == 1
    largest = max(float(value.abs().max()) for value in plain["moved"].values())
    assert largest > 1e-6
    assert (
        max(float((plain["moved"][each] - value).abs().max()) for each, value in found["moved"].items())
        < 1e-4 * largest
    )
