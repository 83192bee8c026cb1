#!/usr/bin/env bash
# VPPO with EasyR1 at b44b311, in whose folder it is run: its example qwen2_5_vl_7b_geo3k_grpo.sh, each line that differs
# from it marked `# vgr`. Not run on GPUs yet: its parts are tested on a CPU (docs/verl.md).
set -euo pipefail

REWARD=$(python3 -c 'import vgr_trl.integrations.verl.credit as r; print(r.__file__)') # vgr

ARGUMENTS=(
    config=examples/config.yaml
    data.train_files=hiyouga/geometry3k@train
    data.val_files=hiyouga/geometry3k@test
    worker.actor.model.model_path="${MODEL_PATH:-Qwen/Qwen2.5-VL-7B-Instruct}"
    worker.reward.reward_function="$REWARD:compute_scores" # vgr
    algorithm.disable_kl=true                              # vgr: VPPO has none
    vgr.preset=vgr_vppo                                    # vgr: the filter and the trajectory scale
    vgr.top_p_perception_tokens=0.4                        # vgr: as published
    vgr.trajectory_scaling_min=0.9                         # vgr: as published
    vgr.use_entropy_penalty=true                           # vgr: as published
    trainer.experiment_name=qwen2_5_vl_7b_geo_vppo         # vgr
    trainer.n_gpus_per_node=8
)
exec python3 -m vgr_trl.integrations.verl.inside_easyr1.main "${ARGUMENTS[@]}" "$@" # vgr: instead of verl.trainer.main
