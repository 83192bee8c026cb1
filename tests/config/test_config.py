"""Options: defaults, aliases, what their metadata allows, combinations that are refused, and options without effect."""

import math
import re
from pathlib import Path

import pytest
from trl import TrlParser

from vgr_trl.cli.plan import describe_run
from vgr_trl.dapo_config import DAPOConfig
from vgr_trl.errors import ConfigError
from vgr_trl.options import changed_options, unused_options


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


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"output_dir": " "}, "output_dir"), ({"max_steps": 0}, "nothing would be trained"),
        ({"warmup_ratio": 0.1, "warmup_steps": 5}, "warmup_steps"),
        ({"soft_punish_cache": 600, "max_completion_length": 512}, "max_completion_length, 512"),
        ({"delta": 1.25}, "delta"),
        ({"importance_sampling_level": "sequence", "token_weights": True}, "ignore token weights"),
        ({"kl_coef": 0.1, "beta": 0.1}, "kl_coef, or beta"), ({"replay_buffer_size": 4, **GAE}, "earlier critic"),
        ({"kl_coef": 0.1, "use_kl_loss": False, "multi_objective_aggregation": "normalize_then_sum"}, "or use_kl_loss"),
        ({"critic_warmup": 2, "weight_decay": 0.1, **GAE}, "weight_decay"),
        ({"filter_low": 0.9, "filter_high": 0.1}, "filter_low < filter_high"),
        ({"filter_mode": "quantile", "filter_low": -0.1}, "quantile in [0, 1]"),
        ({"filter_mode": "quantile", "filter_high": 1.1}, "quantile in [0, 1]"),
        ({"noisy_generations": 2, "noisy_perturbation": "mask_image", "noisy_decay": "linear"}, "no strength"),
        ({"perturbation": "remove_image", "perception_loss_weight": 0.1}, "same prompts"),
        ({"blind_prompt": "{question}"}, "{description}"),
        ({"plugin_options": "{"}, "give a JSON object"),
    ],
    ids=str,
)  # fmt: skip
def test_combinations_that_are_refused(tmp_path, options, word):
    with pytest.raises(ConfigError, match=re.escape(word)):
        config(tmp_path, **options)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {}),
        ({"filter_low": 0.1, "filter_high": 2.0}, dict.fromkeys(
            ("filter_low", "filter_high"), "online_filtering is False")),
        ({"online_filtering": True, "filter_mode": "quantile", "filter_low": 0.0, "filter_high": 1.0}, {}),
        ({"multi_objective_aggregation": "normalize_then_sum"}, {}), ({"kl_coef": 0.1, "use_kl_loss": False}, {}),
        ({"filter_min_reward": 1.0}, {"filter_min_reward": "replay_buffer_size is 0"}),
        ({"token_weights_clip": [0.5, 2.0]},
         {"token_weights_clip": "token_weights is False and enable_perception_filtering is False"}),
        ({"kl_coef": 0.1, "kl_horizon": 1.0}, {"kl_horizon": "kl_type is fixed"}),
        ({"kl_coef": 0.1, "kl_type": "adaptive", "kl_horizon": 1.0, "kl_penalty": "kl"}, {}),
        ({"dynamic_sampling": "resample", "scale_rewards": "none", **GAE},
         {"dynamic_sampling": "advantage_estimator is gae and online_filtering is False",
          "scale_rewards": "advantage_estimator is gae"}),
        ({"vllm_mode": "server", "vllm_gpu_memory_utilization": 0.5}, dict.fromkeys(
            ("vllm_mode", "vllm_gpu_memory_utilization"), "use_vllm is False")),
        ({"patch_size": 8}, {"patch_size": "nothing is measured on perturbed images"}),
        ({"patch_size": 8, "perturbation": "mask_image", "perception_loss_weight": 0.01},
         {"patch_size": "images are perturbed by mask_image"}),
        ({"mdi_balance_ratio": 3.0, "absent": ["attention"]}, {"mdi_balance_ratio": "attention is not measured"}),
        ({"early_reward_weights": [1.0], "absent": ["changing_weights"]},
         {"early_reward_weights": "they equal reward_weights"}),
    ],
    ids=str,
)  # fmt: skip
def test_options_without_effect(tmp_path, given, expected):
    absent = given.pop("absent", ())
    assert unused_options(config(tmp_path, **given), absent) == expected


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
