#!/usr/bin/env bash
# 1. No attention reward: right answers, form and length. Attention is measured and logged all the same.
set -euo pipefail
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/common.sh"

accelerate launch "${LAUNCH[@]}" "$TRAIN" "${COMMON[@]}" \
    --reward_funcs accuracy vgr format length --attention_reward_scale none \
    --reward_weights 2.5 0 0.5 1 \
    --early_reward_weights 1 0 2 1 \
    --filter_min_reward 1.5 \
    "${OVERRIDES[@]}"
