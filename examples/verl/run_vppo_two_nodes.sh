#!/usr/bin/env bash
# The same on two machines with 8 GPUs each. On the first:  ROLE=head ./run_vppo_two_nodes.sh
# On the second, beforehand:                                ROLE=worker HEAD=<address> ./run_vppo_two_nodes.sh
# Ray's workers have the environment that `ray start` had, so the lines marked `# vgr` stand in front of it on both.
set -euo pipefail

export VERL_USE_EXTERNAL_MODULES=vgr_trl.integrations.verl.inside_verl.plugin # vgr
export VERL_ENGINE_VENDOR=vgr                                                 # vgr

if [ "${ROLE:?give head or worker}" = worker ]; then
    exec ray start --address="${HEAD:?give the address of the head}:6379" --num-gpus=8 --block
fi
ray start --head --port=6379 --num-gpus=8
echo "Start the second machine; training begins when it is there."
until [ "$(ray status | grep -c node_)" -ge 2 ]; do sleep 2; done
NNODES=2 TRAIN_BATCH_SIZE=1024 exec "$(dirname "$0")/run_vppo_qwen2_5_vl_7b.sh" "$@"
