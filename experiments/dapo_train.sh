#!/usr/bin/env bash
# As experiment 4, but only low-rank adapters on q_proj and v_proj are trained.
set -euo pipefail
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/common.sh"

accelerate launch "${LAUNCH[@]}" "$TRAIN" "${COMMON[@]}" \
    --use_peft \
    --lora_target_modules q_proj v_proj \
    --reward_funcs accuracy vgr format length --attention_reward_scale none \
    --vgr_hard_negative \
    --reward_weights 2.5 1 0.5 1 \
    --early_reward_weights 1 1 2 1 \
    --filter_min_reward 1.0 \
    --num_train_epochs 1 \
    "${OVERRIDES[@]}"
