#!/usr/bin/env bash
# VPPO on Qwen2.5-VL-7B with verl 0.9.1, on one machine with 8 GPUs: verl's GRPO example of geo3k, and what differs from
# it marked `# vgr`. Not run on GPUs yet: its parts are tested on a CPU (docs/verl.md).
set -euo pipefail

export VERL_USE_EXTERNAL_MODULES=vgr_trl.integrations.verl.inside_verl.plugin # vgr: names, trainer and engine
export VERL_ENGINE_VENDOR=vgr                                                 # vgr: its engine

REWARD=$(python3 -c 'import vgr_trl.integrations.verl.rewards as r; print(r.__file__)') # vgr

ARGUMENTS=(
    data.train_files="${TRAIN:-$HOME/data/geo3k/train.parquet}"
    data.val_files="${TEST:-$HOME/data/geo3k/test.parquet}"
    data.train_batch_size=512
    data.max_prompt_length=1024
    data.max_response_length=2048
    data.filter_overlong_prompts=True
    data.truncation=error
    data.image_key=images
    actor_rollout_ref.model.path="${MODEL:-Qwen/Qwen2.5-VL-7B-Instruct}"
    actor_rollout_ref.model.use_remove_padding=True
    actor_rollout_ref.model.enable_gradient_checkpointing=True
    actor_rollout_ref.actor.strategy=fsdp2 # vgr: what the tests run
    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.ppo_mini_batch_size=128
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=10
    actor_rollout_ref.actor.use_kl_loss=False # vgr: VPPO has none
    actor_rollout_ref.actor.entropy_coeff=0
    actor_rollout_ref.actor.clip_ratio_high=0.28                # vgr: DAPO's
    actor_rollout_ref.actor.policy_loss.loss_mode=vgr_vppo      # vgr: with the entropy penalty
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=20
    actor_rollout_ref.rollout.tensor_model_parallel_size=2
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6
    actor_rollout_ref.rollout.n=8
    algorithm.adv_estimator=vgr_vppo              # vgr: the filter and the trajectory scale
    algorithm.use_kl_in_reward=False
    +algorithm.vgr.estimator=grpo                 # vgr: whose advantages are shaped
    +algorithm.vgr.top_p_perception_tokens=0.4    # vgr: as published
    +algorithm.vgr.trajectory_scaling_min=0.9     # vgr: as published
    +algorithm.vgr.use_entropy_penalty=True       # vgr
    reward.custom_reward_function.path="$REWARD"  # vgr
    reward.custom_reward_function.name=compute_score # vgr
    +reward.custom_reward_function.reward_kwargs.format_weight=0.1 # vgr
    trainer.v1.trainer_mode=vgr_sync              # vgr: hands signals to the estimator
    trainer.critic_warmup=0
    trainer.logger='["console","wandb"]'
    trainer.project_name=verl_vppo
    trainer.experiment_name=qwen2_5_vl_7b
    trainer.n_gpus_per_node=8
    trainer.nnodes="${NODES:-1}"
    trainer.save_freq=20
    trainer.test_freq=5
    trainer.total_epochs=15
)
exec python3 -m verl.trainer.main_ppo "${ARGUMENTS[@]}" "$@"
