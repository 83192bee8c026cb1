#!/bin/sh
# Runs an installed vgr_trl in a new folder, as a user would: try_release.sh BIN, the folder with its `python` and `vgr-trl`.
set -eux
PATH="$1:$PATH"
export HF_HUB_OFFLINE=1
unset PYTHONPATH
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
vgr-trl env
vgr-trl demo --steps 30
vgr-trl init
python -m vgr_trl.demo.write_folder tiny
vgr-trl train --recipe vppo --model_name_or_path tiny/model --system_prompt_file none \
    --data_files train=tiny/train.parquet,test=tiny/test.parquet --output_dir runs/vppo --use_cpu --bf16 false \
    --num_generations 4 --per_device_train_batch_size 16 --max_completion_length 16 --max_steps 3 --rollout_log_steps 1
mkdir elsewhere
cd elsewhere
vgr-trl report ../runs/demo ../runs/vppo --output page.html
test -s page.html
