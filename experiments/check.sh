#!/usr/bin/env bash
# Before a long run: are the data read, does the model fit, does a step work with every signal on, does a checkpoint resume?
#
#   experiments/check.sh experiments/experiment3.sh [FLAG …]   with the flags and variables of the run
#
# One line per check; at the first that fails its cause, and status 1. Batch sizes and lengths are those of the run. A
# checkpoint is saved in a new folder in CHECK_FOLDER (runs), so that this disk is checked too; the folder goes if all is well.
set -euo pipefail
if [[ ! -f "${1:-}" ]]; then
    echo "check: give the script of a run, for example experiments/check.sh experiments/experiment3.sh" >&2
    exit 2
fi
run="$1"
given=("${@:2}")
mkdir -p "${CHECK_FOLDER:-runs}"
folder="$(mktemp -d "${CHECK_FOLDER:-runs}/check-XXXXXX")"
log="$folder/log.txt"

train() { bash "$run" "${given[@]}" --output_dir "$folder/run" "$@" >"$log" 2>&1; }
said() { tr -s ' \n' ' ' <"$log" | sed -nE "s/.*$1.*/\1/p"; } # also where the table of the run breaks lines
passed() { printf '%-13s ok      %s\n' "$@"; }
failed() { # with the last error that was printed, or else the last line
    local errors='^(\[rank[0-9]+\]: *)?(vgr-trl [a-z]+: |[A-Za-z_.]+Error: )' launcher='CalledProcessError|ChildFailedError'
    local cause="${2:-$(grep -E "$errors" "$log" | grep -vE "$launcher" | tail -n 1)}"
    printf '%-13s FAILED  %s\n' "$1" "${cause:-$(tail -n 1 "$log")}"
    echo "All that was printed is in $log."
    exit 1
}

if ! train --dry_run; then
    [[ -z "$(said '(: training )')" ]] && failed "start"
    failed "step, memory"
fi
passed "data" "$(said ': (training [^:]*, evaluation .*) rewards ')"
grep -o 'Skipped .*' "$log" | sed 's/^/                      /' || true
passed "model" "$(said '(trains [0-9,]+ of [0-9,]+ parameters)')"
passed "step, memory" "$(sed -n 's/^measured: //p' "$log")"
passed "whole run" "$(sed -n 's/^total: //p' "$log")"

everything=(
    --compute_attention_metrics true
    --token_weights true
    --enable_perception_filtering true
    --enable_entropy_filtering true
    --enable_trajectory_reweighting true
    --replay_buffer_size 64
    --eval_strategy steps
    --eval_steps 1
    --max_test_rows 16
    --save_strategy steps
    --save_steps 1
    --save_total_limit 1
    --load_best_model_at_end false
    --push_to_hub false
    --logging_steps 1
    --report_to none
)
train "${everything[@]}" --max_steps 1 || failed "every signal"
measured="$(python - "$folder/run/trainer_state.json" <<'EOF'
import json, math, sys

logged = {name: value for entry in json.load(open(sys.argv[1]))["log_history"] for name, value in entry.items()}
shown = {
    "gradient": "grad_norm",
    "VGR": "attention/all/vgr",
    "dependency": "sensitivity_score_mean",
    "tokens with credit": "combined_token_fraction",
    "largest token weight": "token_weight_max",
    "groups to replay": "replay/size",
    "reward in evaluation": "eval_reward",
}
values = {title: logged.get(name, math.nan) for title, name in shown.items()}
print(", ".join(f"{title} {value:.3g}" for title, value in values.items()))
sys.exit(not all(map(math.isfinite, values.values())))
EOF
)" || failed "every signal" "not all are finite: $measured"
passed "every signal" "$measured"

train "${everything[@]}" --max_steps 2 --resume_from_checkpoint latest || failed "checkpoint"
[[ -n "$(said '(continued from )')" ]] || failed "checkpoint" "the run began anew beside a checkpoint"
passed "checkpoint" "saved after step 1, resumed, saved after step 2"
rm -r "$folder"
