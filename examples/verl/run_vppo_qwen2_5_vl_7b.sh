#!/usr/bin/env bash
# VPPO on Qwen2.5-VL-7B with verl 0.9.1, on one machine with 8 GPUs: verl's example grpo_trainer/run_qwen2_5_vl_7b_fsdp.sh,
# each line that differs from it marked `# vgr`. Not run on GPUs yet: its parts are tested on a CPU (docs/verl.md).
set -euo pipefail

export VERL_USE_EXTERNAL_MODULES=vgr_trl.integrations.verl.inside_verl.plugin # vgr: names, trainer and engine
export VERL_ENGINE_VENDOR=vgr                                                 # vgr: its engine

REWARD=$(python3 -c 'import vgr_trl.integrations.verl.credit as r; print(r.__file__)') # vgr

ARGUMENTS=(
    algorithm.adv_estimator=vgr_vppo                               # vgr: the filter and the trajectory scale
    +algorithm.vgr.estimator=grpo                                  # vgr: whose advantages are shaped
    +algorithm.vgr.top_p_perception_tokens=0.4                     # vgr: as published
    +algorithm.vgr.trajectory_scaling_min=0.9                      # vgr: as published
    +algorithm.vgr.use_entropy_penalty=True                        # vgr: as published
    algorithm.use_kl_in_reward=False
    data.train_files="$HOME/data/geo3k/train.parquet"
    data.val_files="$HOME/data/geo3k/test.parquet"
    data.image_key=images
    data.train_batch_size="${TRAIN_BATCH_SIZE:-512}"
    data.max_prompt_length=1024
    data.max_response_length=2048
    data.filter_overlong_prompts=True
    data.truncation=error
    actor_rollout_ref.model.path="${MODEL_PATH:-Qwen/Qwen2.5-VL-7B-Instruct}"
    actor_rollout_ref.model.use_remove_padding=True
    actor_rollout_ref.model.enable_gradient_checkpointing=True
    actor_rollout_ref.model.use_fused_kernels=False                # vgr: not tested with them
    actor_rollout_ref.actor.strategy=fsdp2
    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.ppo_mini_batch_size=128
    actor_rollout_ref.actor.use_dynamic_bsz=True
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24576
    actor_rollout_ref.actor.policy_loss.loss_mode=vgr_vppo         # vgr: with the entropy penalty
    actor_rollout_ref.actor.clip_ratio_high=0.28                   # vgr: DAPO's
    actor_rollout_ref.actor.use_kl_loss=False                      # vgr: VPPO has none
    actor_rollout_ref.actor.kl_loss_coef=0.01
    actor_rollout_ref.actor.kl_loss_type=low_var_kl
    actor_rollout_ref.actor.entropy_coeff=0
    actor_rollout_ref.actor.fsdp_config.param_offload=False
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=False
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.tensor_model_parallel_size=2
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6
    actor_rollout_ref.rollout.n=8                                  # vgr: as published
    actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True
    actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=24576
    actor_rollout_ref.rollout.multi_stage_wake_up=True
    actor_rollout_ref.rollout.enable_chunked_prefill=False
    actor_rollout_ref.rollout.enforce_eager=False
    actor_rollout_ref.rollout.free_cache_engine=True
    actor_rollout_ref.ref.log_prob_use_dynamic_bsz=True
    actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=24576
    actor_rollout_ref.ref.fsdp_config.param_offload=True
    reward.custom_reward_function.path="$REWARD"                   # vgr
    reward.custom_reward_function.name=compute_score               # vgr
    +reward.custom_reward_function.reward_kwargs.format_weight=0.1 # vgr
    trainer.v1.trainer_mode=vgr_sync                               # vgr: hands signals to the estimator
    trainer.balance_batch=True
    trainer.logger='["console","wandb"]'
    trainer.project_name=verl_vppo_geo3k                           # vgr
    trainer.experiment_name=qwen2_5_vl_7b_vllm_fsdp
    trainer.n_gpus_per_node="${NGPUS_PER_NODE:-8}"
    trainer.nnodes="${NNODES:-1}"
    trainer.save_freq=20
    trainer.test_freq=5
    trainer.total_epochs=15
)
exec python3 -m verl.trainer.main_ppo "${ARGUMENTS[@]}" "$@"
