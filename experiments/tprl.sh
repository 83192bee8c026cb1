#!/usr/bin/env bash
# Perception: credit for the 20 % of tokens that depend most on the image and the 20 % that are most uncertain, and for
# completions that depend on the image. No replay buffer.
set -euo pipefail
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/common.sh"

accelerate launch "${LAUNCH[@]}" "$TRAIN" "${COMMON[@]}" \
    --reward_funcs accuracy format length \
    --reward_weights 2.5 0.5 1 \
    --enable_perception_filtering \
    --top_p_perception_tokens 0.2 \
    --enable_entropy_filtering \
    --top_p_entropy_tokens 0.2 \
    --enable_trajectory_reweighting \
    --trajectory_scaling_min 0.8 \
    --perturbation blacken_patches \
    --patch_size 14 \
    --black_prob 0.5 \
    --perturb_per completion \
    --replay_buffer_size 0 \
    "${OVERRIDES[@]}"
