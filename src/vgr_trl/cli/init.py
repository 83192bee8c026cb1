"""`vgr-trl init [FILE]`: a commented YAML file to start from, for a GPU or for a laptop."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from vgr_trl.errors import ConfigError

GPU = """\
# vgr-trl train --config {name}        (several GPUs: accelerate launch -m vgr_trl.cli train --config {name})
model_name_or_path: Qwen/Qwen2.5-VL-3B-Instruct
dtype: bfloat16
output_dir: runs/first

# Data: data_files, dataset_path (a folder) or dataset_name (a hub name). vgr-trl data inspect shows what is in them.
data_files: train=train.parquet,test=test.parquet
max_prompt_length: 1024        # image tokens included; longer rows are left out
max_completion_length: 512

# Rewards, and their weights in the same order. accuracy: is it right? vgr: does it look at the image?
reward_funcs: [accuracy, vgr, format, length]
reward_weights: [2.5, 1.0, 0.5, 1.0]
early_reward_weights: [1.0, 1.0, 2.0, 1.0]    # while the learning rate warms up
token_weights: true            # tokens that look at the image get more of the credit
replay_buffer_size: 64         # groups without a gradient give way to stored ones

# One step: per_device_train_batch_size * gradient_accumulation_steps * GPUs completions, num_generations per prompt.
num_generations: 8
per_device_train_batch_size: 8
gradient_accumulation_steps: 4
learning_rate: 1.0e-5
warmup_ratio: 0.05
num_train_epochs: 1
use_peft: true                 # low-rank adapters; without these two lines all weights are trained
lora_target_modules: [q_proj, v_proj]

logging_steps: 1
save_steps: 50
eval_strategy: steps
eval_steps: 50
"""

LAPTOP = """\
# vgr-trl train --config {name}        (a small model on a CPU: about a second a step, to see everything work)
model_name_or_path: runs/tiny/model    # made by: python -m vgr_trl.demo.write_folder runs/tiny
system_prompt_file: runs/tiny/no_system_prompt.txt
data_files: train=runs/tiny/train.parquet,test=runs/tiny/test.parquet
output_dir: runs/first
use_cpu: true
bf16: false
gradient_checkpointing: false

# Rewards, and their weights in the same order. accuracy: is it right? vgr: does it look at the image?
reward_funcs: [accuracy, vgr, format]
reward_weights: [1.0, 0.2, 0.2]

# One step: per_device_train_batch_size completions, num_generations per prompt.
num_generations: 8
per_device_train_batch_size: 64
max_completion_length: 16
learning_rate: 3.0e-4
max_steps: 20
logging_steps: 1
save_strategy: "no"
eval_strategy: steps
eval_steps: 10
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Write the file, which must not be there yet, and return 0."""
    parser = argparse.ArgumentParser(prog="vgr-trl init", description=__doc__)
    parser.add_argument("file", nargs="?", type=Path, default=Path("train.yaml"), help="to write (default train.yaml)")
    parser.add_argument("--laptop", action="store_true", help="for a small model on a CPU")
    flags = parser.parse_args(argv)
    text = (LAPTOP if flags.laptop else GPU).format(name=flags.file)
    try:
        with flags.file.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise ConfigError(f"{flags.file} is there already: give another name, or remove it.") from error
    except OSError as error:
        raise ConfigError(f"{flags.file} cannot be written ({error}): give another name.") from error
    print(f"Wrote {flags.file}. Next: edit it, then vgr-trl train --config {flags.file}")
    return 0
