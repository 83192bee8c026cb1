"""Options: defaults, aliases, what their metadata allows, combinations that are refused, and options without effect."""

import math
from pathlib import Path

import pytest
from trl import TrlParser

from vgr_trl import DAPOConfig
from vgr_trl.cli.train import describe_run
from vgr_trl.options import changed_options, unused_options
from vgr_trl.utils import ConfigError


def config(tmp_path: Path, **options: object) -> DAPOConfig:
    defaults = {"use_cpu": True, "bf16": False, "per_device_train_batch_size": 8}
    return DAPOConfig(**{"output_dir": str(tmp_path), **defaults, **options})


def test_numbers_of_trl_are_checked_as_ours_are(tmp_path):
    outside = {
        "rollout_log_steps": -1, "patch_size": 0,
        "epsilon": -0.1, "learning_rate": math.nan, "temperature": 0.0, "top_p": 2.0, "num_iterations": 0,
        "gradient_accumulation_steps": 0, "max_completion_length": -3, "token_weights": 1, "replay_buffer_size": True,
        "share_prompts": "bogus", "filter_low": "0.1",
    }  # fmt: skip
    for name, value in outside.items():
        with pytest.raises(ConfigError, match=f"^{name} is "):
            config(tmp_path, **{name: value})


GAE = {"advantage_estimator": "gae"}


REFUSED = [
    {"output_dir": " "}, {"max_steps": 0}, {"warmup_ratio": 0.1, "warmup_steps": 5}, {"delta": 1.25},
    {"soft_punish_cache": 600, "max_completion_length": 512}, {"kl_coef": 0.1, "beta": 0.1}, {"plugin_options": "{"},
    {"importance_sampling_level": "sequence", "token_weights": True}, {"replay_buffer_size": 4, **GAE},
    {"kl_coef": 0.1, "use_kl_loss": False, "multi_objective_aggregation": "normalize_then_sum"},
    {"critic_warmup": 2, "weight_decay": 0.1, **GAE}, {"filter_low": 0.9, "filter_high": 0.1},
    {"filter_mode": "quantile", "filter_low": -0.1}, {"filter_mode": "quantile", "filter_high": 1.1},
    {"noisy_generations": 2, "noisy_perturbation": "mask_image", "noisy_decay": "linear"},
    {"perturbation": "remove_image", "perception_loss_weight": 0.1}, {"blind_prompt": "{question}"},
]  # fmt: skip


@pytest.mark.parametrize("options", REFUSED, ids=str)
def test_combinations_that_are_refused(tmp_path, options):
    with pytest.raises(ConfigError):
        config(tmp_path, **options)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, []), ({"filter_low": 0.1, "filter_high": 2.0}, ["filter_low", "filter_high"]),
        ({"online_filtering": True, "filter_mode": "quantile", "filter_low": 0.0, "filter_high": 1.0}, []),
        ({"multi_objective_aggregation": "normalize_then_sum"}, []), ({"kl_coef": 0.1, "use_kl_loss": False}, []),
        ({"filter_min_reward": 1.0}, ["filter_min_reward"]),
        ({"token_weights_clip": [0.5, 2.0]}, ["token_weights_clip"]),
        ({"kl_coef": 0.1, "kl_horizon": 1.0}, ["kl_horizon"]),
        ({"kl_coef": 0.1, "kl_type": "adaptive", "kl_horizon": 1.0, "kl_penalty": "kl"}, []),
        ({"dynamic_sampling": "resample", "scale_rewards": "none", **GAE}, ["dynamic_sampling", "scale_rewards"]),
        ({"vllm_mode": "server", "vllm_gpu_memory_utilization": 0.5}, ["vllm_mode", "vllm_gpu_memory_utilization"]),
        ({"patch_size": 8}, ["patch_size"]),
        ({"patch_size": 8, "perturbation": "mask_image", "perception_loss_weight": 0.01}, ["patch_size"]),
        ({"mdi_balance_ratio": 3.0, "absent": ["attention"]}, ["mdi_balance_ratio"]),
        ({"early_reward_weights": [1.0], "absent": ["changing_weights"]}, ["early_reward_weights"]),
    ],
    ids=str,
)  # fmt: skip
def test_options_without_effect(tmp_path, given, expected):
    absent = given.pop("absent", ())
    assert set(unused_options(config(tmp_path, **given), absent)) == set(expected)


def test_the_trainer_names_options_without_effect_and_the_plan_does_not_show_them_as_on(text_trainer, monkeypatch):
    warnings = []
    monkeypatch.setattr("vgr_trl.validate.features.logger.warning", warnings.append)
    trainer = text_trainer(filter_low=0.1, replay_buffer_size=8, soft_punish_cache=3, max_steps=1, check_pixels=True)
    assert "filter_low has no effect: online_filtering is False." in warnings
    assert "soft_punish_cache has no effect: there is no length reward." in warnings
    plan = describe_run(trainer, "here", None, verbose=True)
    assert ("changed", "replay_buffer_size=8") in plan
    assert ("without effect", "filter_low=0.1: online_filtering is False") in plan
    assert "token_weights_clip" not in changed_options(trainer.args)


def test_flags_and_a_file_as_users_write_them(tmp_path):
    file = tmp_path / "x.yaml"
    file.write_text("warmup_ratio: 0.1\nuse_cpu: true\nbf16: false\nearly_reward_weights: [1.0, 2.0]\n")
    flags = f"--config {file} --warmup_ratio 0.2 --output_dir {tmp_path} --reward_weights 2.5 1.0"
    flags += " --soft_punish_cache 50 --num_generations_eval 4 --share_prompts on --resume_from_checkpoint"
    (made,) = TrlParser(DAPOConfig).parse_args_and_config(flags.split())
    assert (made.warmup_steps, made.early_reward_weights, made.reward_weights) == (0.2, [1.0, 2.0], [2.5, 1.0])
    assert (made.soft_punish_cache, made.num_generations_eval, made.share_prompts) == (50, 4, "on")
    assert made.resume_from_checkpoint == "latest"
