#!/usr/bin/env bash
# Perception: credit for the 20 % of tokens that depend most on the image, and for completions that depend on it.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

accelerate launch "${LAUNCH[@]}" "$TRAIN" "${COMMON[@]}" \
    --reward_funcs accuracy format length \
    --reward_weights 2.5 0.5 1 \
    --early_reward_weights 1 2 1 \
    --enable_perception_filtering \
    --top_p_perception_tokens 0.2 \
    --enable_trajectory_reweighting \
    --trajectory_scaling_min 0.8 \
    --use_entropy_penalty \
    --entropy_penalty_coef 0.06 \
    "${OVERRIDES[@]}"
