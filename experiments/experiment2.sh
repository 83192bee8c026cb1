#!/usr/bin/env bash
# 2. No accuracy reward: attention to the image, form and length.
set -euo pipefail
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/common.sh"

accelerate launch "${LAUNCH[@]}" "$TRAIN" "${COMMON[@]}" \
    --reward_funcs accuracy vgr format length --attention_reward_scale none \
    --reward_weights 0 2.5 0.5 1 \
    --early_reward_weights 0 1 2 1 \
    --filter_min_reward 1.5 \
    "${OVERRIDES[@]}"
