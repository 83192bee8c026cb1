"""Train a vision-language model with DAPO; the script of `accelerate launch`, the same as `vgr-trl train`.

Without a data flag the questions are lujunxi57/DDM from the hub, their images with a short side of at most 1024 pixels.
Four or five `--reward_weights` without `--reward_funcs` stand for the rewards of the scripts before this library.

accelerate launch --config_file accelerate_configs/zero2.yaml examples/train_grpo_vlm.py \
    --model_name_or_path Qwen/Qwen3-VL-4B-Instruct --data_files train=train.parquet,test=test.parquet \
    --reward_weights 2.5 1 0.5 1 --early_reward_weights 1 1 2 1 --token_weights --replay_buffer_size 64 \
    --warmup_ratio 0.05 --use_peft --lora_target_modules q_proj v_proj --dtype bfloat16 --output_dir runs/first
"""

import argparse
import os
import re
import sys

from vgr_trl.cli.__main__ import main

SOURCES = ("--dataset_name", "--dataset_path", "--data_files", "--config", "-h", "--help", "--help-all")


def with_data(flags: list[str]) -> list[str]:
    """Return the flags with the questions of the experiments, and the size of their images, where they name no data."""
    is_named = any(flag.split("=")[0] in SOURCES for flag in flags)
    return flags if is_named else ["--max_short_side", "1024", *flags, "--dataset_name", "lujunxi57/DDM"]


def earlier_rewards(flags: list[str]) -> list[str]:
    """Return `--reward_funcs` flags for four or five weights without names, as the scripts before this library gave.

    Those scripts did not scale attention rewards by accuracy. Returns an empty list if the flags name rewards, a recipe
    or a file, or give another number of weights. The main process prints the flags that are added.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("reward_funcs", "recipe", "config", "reward_weights", "early_reward_weights"):
        parser.add_argument(f"--{name}", f"--{name.replace('_', '-')}", nargs="+")
    given, _ = parser.parse_known_args(flags)
    weights = " ".join(given.reward_weights or given.early_reward_weights or ())
    count = len(re.findall(r"[^\s,()\[\]]+", weights))
    if count not in (4, 5) or given.reward_funcs or given.recipe or given.config:
        return []
    rewards = ["accuracy", "vgr", "format", *["tag_count"] * (count == 5), "length"]
    added = ["--reward_funcs", *rewards, "--attention_reward_scale", "none"]
    if os.environ.get("RANK", "0") == "0":
        print(f"{count} reward weights without reward_funcs: adding {' '.join(added)}", flush=True)
    return added


if __name__ == "__main__":
    sys.exit(main(["train", *earlier_rewards(sys.argv[1:]), *with_data(sys.argv[1:])]))
