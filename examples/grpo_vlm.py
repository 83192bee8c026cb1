"""Train with a balance of image and instruction as a reward: right answer, form and MDI weigh 4 : 1 : 1.

accelerate launch --config_file accelerate_configs/deepspeed_zero3.yaml examples/grpo_vlm.py \
    --model_name_or_path Qwen/Qwen3-VL-4B-Instruct --dataset_name HuggingFaceM4/A-OKVQA --dtype bfloat16 \
    --max_prompt_length 2048 --max_completion_length 1024 --log_completions --output_dir runs/mdi

Takes every flag of `vgr-trl train`; those given here override the rewards and weights, `--recipe NAME` replaces them.
"""

import sys

from vgr_trl.cli.__main__ import main

MDI = ["--reward_funcs", "accuracy", "format", "mdi", "--reward_weights", "4", "1", "1"]
MDI += ["--attention_reward_scale", "none"]
MDI += ["--mask_truncated_completions", "true", "--compute_attention_metrics", "true", "--max_short_side", "1024"]
MDI += ["--logging_steps", "1", "--rollout_log_steps", "1", "--colorize_output"]  # every step, on the terminal too

if __name__ == "__main__":
    own = [] if any(flag.split("=")[0] == "--recipe" for flag in sys.argv) else MDI
    sys.exit(main(["train", *own, *sys.argv[1:]]))
