#!/usr/bin/env bash
# Balance between image and instruction as a reward: accuracy, form and MDI weigh 4 : 1 : 1. The 3B model under ZeRO-3.
set -euo pipefail
ACCELERATE_CONFIG="${ACCELERATE_CONFIG:-zero3}"
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/common.sh"

accelerate launch "${LAUNCH[@]}" "$TRAIN" "${COMMON[@]}" \
    --model_name_or_path Qwen/Qwen2.5-VL-3B-Instruct \
    --reward_funcs accuracy format mdi --attention_reward_scale none \
    --reward_weights 4 1 1 \
    --mdi_balance_ratio 2.0 \
    --rollout_log_steps 1 \
    --colorize_output \
    "${OVERRIDES[@]}"
