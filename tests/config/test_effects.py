"""Options that were given but steer nothing are named with the reason, and are not shown as on."""

import pytest

from vgr_trl import DAPOConfig
from vgr_trl.cli.train import describe_run
from vgr_trl.config_checks import Circumstances, changed_options, options_without_effect


def idle(tmp_path, attention=True, changes=True, evaluates=True, rewards=("soft_overlong_punishment_reward",), **given):
    config = DAPOConfig(str(tmp_path), use_cpu=True, bf16=False, **given)
    return options_without_effect(config, Circumstances(attention, False, False, changes, evaluates, list(rewards)))


NOTHING_PERTURBED = "nothing is measured on perturbed images"
FILTER = {"enable_perception_filtering": True}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {}),
        ({"filter_low": 0.1}, {"filter_low": "online_filtering is False"}),
        ({"filter_low": 0.1, "online_filtering": True}, {}),
        ({"filter_key": "overall", "filter_high": 2.0}, dict.fromkeys(
            ("filter_key", "filter_high"), "online_filtering is False")),
        ({"filter_min_reward": 1.0}, {"filter_min_reward": "replay_buffer_size is 0"}),
        ({"replay_max_age": 3, "replay_buffer_size": 8}, {}),
        ({"dynamic_sampling_max_rounds": 2}, {"dynamic_sampling_max_rounds": "dynamic_sampling is None"}),
        ({"dynamic_sampling_max_rounds": 2, "dynamic_sampling": "resample"}, {}),
        ({"replay_var_epsilon": 0.1, "enable_trajectory_reweighting": True}, {}),
        ({"token_weights_clip": [0.5, 2.0]}, {"token_weights_clip": "token_weights is False"}),
        ({"token_weights_clip": [0.2, 3.0]}, {}),
        ({"token_weights_clip": [0.5, 2.0], "perception_weighting": "soft", **FILTER}, {}),
        ({"token_weights_topk_ratio": 0.5, "token_weights": True}, {}),
        ({"top_p_perception_tokens": 0.4}, {"top_p_perception_tokens": "enable_perception_filtering is False"}),
        ({"top_p_perception_tokens": 0.4, **FILTER}, {}),
        ({"top_p_perception_tokens": 0.4, "perception_weighting": "soft", **FILTER},
         {"top_p_perception_tokens": "perception_weighting is soft, which keeps all tokens"}),
        ({"top_p_entropy_tokens": 0.4}, {"top_p_entropy_tokens": "enable_entropy_filtering is False"}),
        ({"trajectory_scaling_min": 0.5}, {"trajectory_scaling_min": "enable_trajectory_reweighting is False"}),
        ({"entropy_penalty_coef": 0.5}, {"entropy_penalty_coef": "use_entropy_penalty is False"}),
        ({"kl_penalty": "kl", "kl_target": 1.0}, dict.fromkeys(("kl_penalty", "kl_target"), "kl_coef is 0.0")),
        ({"kl_coef": 0.1, "kl_horizon": 1.0}, {"kl_horizon": "kl_type is fixed"}),
        ({"kl_coef": 0.1, "kl_type": "adaptive", "kl_horizon": 1.0, "kl_penalty": "kl"}, {}),
        ({"use_bias_correction_kl": False, "kl_coef": 0.1}, {"use_bias_correction_kl": "beta is 0.0"}),
        ({"lam": 0.9, "critic_warmup": 2}, dict.fromkeys(("lam", "critic_warmup"), "advantage_estimator is grpo")),
        ({"lam": 0.9, "critic_warmup": 2, "advantage_estimator": "gae"}, {}),
        ({"advantage_estimator": "gae", "dynamic_sampling": "resample", "scale_rewards": "none"},
         {"dynamic_sampling": "advantage_estimator is gae, by which no group is dead, and online_filtering is False",
          "scale_rewards": "advantage_estimator is gae"}),
        ({"advantage_estimator": "gae", "dynamic_sampling": "resample", "online_filtering": True}, {}),
        ({"vllm_mode": "server", "vllm_gpu_memory_utilization": 0.5}, dict.fromkeys(
            ("vllm_mode", "vllm_gpu_memory_utilization"), "use_vllm is False")),
        ({"vllm_mode": "server", "use_vllm": True}, {}),
        ({"ref_model_sync_steps": 8}, {"ref_model_sync_steps": "sync_ref_model is False"}),
        ({"entropy_target": 0.4, "use_adaptive_entropy": False}, {"entropy_target": "use_adaptive_entropy is False"}),
        ({"num_completions_to_print": 2}, {"num_completions_to_print": "log_completions is False"}),
        ({"sapo_temperature_neg": 2.0, "loss_type": "sapo"}, {}),
        ({"sapo_temperature_neg": 2.0, "vespo_k_pos": 3.0}, dict.fromkeys(
            ("sapo_temperature_neg", "vespo_k_pos"), "loss_type is dapo")),
        ({"patch_size": 8}, {"patch_size": NOTHING_PERTURBED}),
        ({"patch_size": 8, "der_loss_weight2": 0.03}, {}),
        ({"patch_size": 8, "perturbation": "mask_image", "perception_loss_weight": 0.01},
         {"patch_size": "images are perturbed by mask_image"}),
        ({"rollout_log_samples": 8, "rollout_log_steps": 0}, {"rollout_log_samples": "rollout_log_steps is 0"}),
        ({"rollout_log_max_megabytes": 8, "rollout_log_steps": 0},
         {"rollout_log_max_megabytes": "rollout_log_steps is 0"}),
        ({"rollout_log_max_megabytes": 8, "rollout_log_steps": 0, "log_completions": True}, {}),
        ({"prompt_preview_length": 5, "markdown_logs": False},
         {"prompt_preview_length": "no Markdown log is written"}),
        ({"prompt_preview_length": 5, "markdown_logs": False, "rollout_log_path": "a.md"}, {}),
        ({"prompt_preview_length": 5}, {}),
        ({"epsilon": 0.1, "loss_type": "cispo"}, {"epsilon": "loss_type is cispo"}),
        ({"epsilon": 0.1, "epsilon_high": None, "loss_type": "cispo"}, {}),
        ({"mdi_balance_ratio": 3.0, "attention": False}, {"mdi_balance_ratio": "attention is not measured"}),
        (
            {"hidden_similarity_layer": 2},
            {"hidden_similarity_layer": "no reward, rule of credit or signal reads the similarity"},
        ),
        ({"mdi_balance_ratio": 3.0}, {}),
        ({"early_reward_weights": [1.0], "changes": False}, {"early_reward_weights": "they equal reward_weights"}),
        ({"eval_num_generations": 4, "evaluates": False}, {"eval_num_generations": "there are no data to evaluate on"}),
        ({"soft_punish_cache": 5, "rewards": ["accuracy_reward"]}, {"soft_punish_cache": "there is no length reward"}),
        ({"soft_punish_cache": 5}, {}),
    ],
    ids=str,
)  # fmt: skip
def test_what_has_no_effect_and_why(tmp_path, given, expected):
    assert idle(tmp_path, **given) == expected


def test_a_trainer_names_them_at_the_start_and_the_plan_does_not_show_them_as_on(text_trainer, monkeypatch):
    warnings = []
    monkeypatch.setattr("vgr_trl.prepare.logger.warning", warnings.append)
    trainer = text_trainer(filter_low=0.1, replay_buffer_size=8, max_steps=1)
    assert "filter_low is without effect because online_filtering is False." in warnings
    plan = dict(describe_run(trainer, "here", None))
    assert plan["on"] == "replay_buffer_size=8"
    assert plan["without effect"] == "filter_low=0.1 because online_filtering is False"
    assert set(changed_options(trainer.args)) >= {"filter_low", "replay_buffer_size"}
    assert "token_weights_clip" not in changed_options(trainer.args)
    assert "on" not in dict(describe_run(text_trainer(max_steps=1), "here", None))
