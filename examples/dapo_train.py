"""Train low-rank adapters with hard negatives; the same as `vgr-trl train` with these flags in front.

accelerate launch --config_file accelerate_configs/deepspeed_zero2.yaml examples/dapo_train.py \
    --model_name_or_path Qwen/Qwen3-VL-8B-Instruct --data_files train=train.parquet,test=test.parquet \
    --lora_target_modules "q_proj", "v_proj" --dtype bfloat16 --output_dir runs/dapo
"""

import runpy
import sys
from pathlib import Path

from vgr_trl.cli.__main__ import main

earlier_rewards = runpy.run_path(str(Path(__file__).resolve().with_name("train_grpo_vlm.py")))["earlier_rewards"]

DAPO = ["--use_peft", "--vgr_hard_negative", "--max_short_side", "1024"]
DAPO += ["--reward_weights", "2.5", "1", "0.5", "1", "--early_reward_weights", "1", "1", "2", "1"]

if __name__ == "__main__":
    own = [] if any(flag.split("=")[0] == "--recipe" for flag in sys.argv) else DAPO
    flags = [*own, *sys.argv[1:]]
    sys.exit(main(["train", *earlier_rewards(flags), *flags]))
