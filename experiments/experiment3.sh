#!/usr/bin/env bash
# 3. Both: right answers and attention to the image, with form and length.
set -euo pipefail
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/common.sh"

accelerate launch "${LAUNCH[@]}" "$TRAIN" "${COMMON[@]}" \
    --reward_funcs accuracy vgr format length --attention_reward_scale none \
    --reward_weights 2.5 1 0.5 1 \
    --early_reward_weights 1 1 2 1 \
    --filter_min_reward 2.0 \
    "${OVERRIDES[@]}"
