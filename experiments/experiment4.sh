#!/usr/bin/env bash
# 4. As 3, but attention is rewarded among right answers only (hard negatives); one epoch.
set -euo pipefail
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/common.sh"

accelerate launch "${LAUNCH[@]}" "$TRAIN" "${COMMON[@]}" \
    --reward_funcs accuracy vgr format length --attention_reward_scale none \
    --vgr_hard_negative \
    --reward_weights 2.5 1 0.5 1 \
    --early_reward_weights 1 1 2 1 \
    --filter_min_reward 1.0 \
    --num_train_epochs 1 \
    "${OVERRIDES[@]}"
