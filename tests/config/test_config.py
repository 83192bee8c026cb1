import re
from pathlib import Path
from typing import get_type_hints

import pytest
from trl import TrlParser

from vgr_trl import DAPOConfig
from vgr_trl import dapo_config as dapo
from vgr_trl.config import ALIASES
from vgr_trl.utils import ConfigError, VGRError


def config(tmp_path: Path, **options: object) -> DAPOConfig:
    defaults = {"use_cpu": True, "bf16": False, "per_device_train_batch_size": 8}
    return DAPOConfig(output_dir=str(tmp_path), **{**defaults, **options})


def test_defaults_are_those_of_dapo(tmp_path):
    made = config(tmp_path)
    assert (made.loss_type, made.epsilon, made.epsilon_high, made.beta) == ("dapo", 0.2, 0.28, 0.0)
    assert made.num_generations_eval is None
    assert made.warmup_steps == 0


def test_defaults_of_the_users_notes(tmp_path):
    made = config(tmp_path)
    assert (made.top_p_perception_tokens, made.trajectory_scaling_min) == (0.2, 0.8)


def test_aliases_set_the_fields_they_stand_for(tmp_path):
    made = config(tmp_path, eval_num_generations=4, warmup_ratio=0.05)
    assert made.num_generations_eval == 4
    again = config(tmp_path, prompt_preview_chars=300, completion_preview_chars=50)
    assert (again.prompt_preview_length, again.completion_preview_length) == (300, 50)
    assert DAPOConfig(out_dir=str(tmp_path / "x"), use_cpu=True, bf16=False).output_dir == str(tmp_path / "x")
    assert config(tmp_path, loss_type="cispo", epsilon_high=5.0, delta=3.0).delta == 3.0  # which its loss never reads
    clips = config(tmp_path, clip_ratio_low=0.1, clip_ratio_high=0.3, clip_ratio_dual=3.0)
    assert (clips.epsilon, clips.epsilon_high, clips.delta) == (0.1, 0.3, 3.0)
    modes = {mode: config(tmp_path, loss_avg_mode=mode).loss_type for mode in ("token", "seq", "sequence")}
    assert modes == {"token": "dapo", "seq": "grpo", "sequence": "grpo"}
    assert {*ALIASES, *ALIASES.values()} <= set(DAPOConfig.__dataclass_fields__)
    assert made.get_warmup_steps(1000) == 50


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"warmup_ratio": 1.0}, "warmup_ratio is 1.0: give a share of all steps in [0, 1)."),
        ({"warmup_ratio": -0.1}, "warmup_ratio is -0.1: give a share of all steps in [0, 1)."),
        ({"warmup_ratio": 0.1, "warmup_steps": 5}, "warmup_ratio is 0.1 and warmup_steps is 5: give one of them."),
        (
            {"eval_num_generations": 4, "num_generations_eval": 2},
            "eval_num_generations is 4 and num_generations_eval, of which it is an alias, is 2: give one of them",
        ),
        (
            {"prompt_preview_chars": 4, "prompt_preview_length": 5},
            "prompt_preview_chars is 4 and prompt_preview_length",
        ),
        ({"loss_avg_mode": "batch"}, "loss_avg_mode is 'batch': give token, sequence or seq."),
        ({"loss_avg_mode": "seq", "loss_type": "bnpo"}, "loss_avg_mode is seq, which means loss_type grpo, and"),
        ({"clip_ratio_dual": 1.25}, "delta (clip_ratio_dual) is 1.25, which would clip ratios of up to 1.28"),
        ({"filter_mode": "share"}, "filter_mode is 'share': give bounds or quantile."),
        ({"filter_mode": "quantile", "filter_high": 2.0}, "filter_high is 2.0: give a number in [0, 1], a quantile."),
        ({"vgr_hard_negative": "yes"}, "vgr_hard_negative is 'yes': give True or False."),
        ({"attention_reward_scale": "std"}, "attention_reward_scale is 'std': give none or accuracy."),
        ({"eval_num_generations": 0}, "num_generations_eval is 0: give an integer of at least 1."),
        ({"max_prompt_length": 0}, "max_prompt_length is 0: give an integer of at least 1."),
        ({"max_completion_length": -3}, "max_completion_length is -3: give an integer of at least 1."),
        ({"beta": -0.1}, "beta is -0.1: give a number of at least 0."),
        ({"epsilon_high": float("nan")}, "epsilon_high is nan: give a number of at least 0."),
        ({"temperature": 0.0}, "temperature is 0.0: give a number above 0."),
        ({"temperature": float("inf")}, "temperature is inf: give a number above 0."),
        ({"min_p": None, "top_p": 2.0}, "top_p is 2.0: give a number in (0, 1]."),
        ({"learning_rate": None}, "learning_rate is None: give a number of at least 0."),
        ({"temperature": None}, "temperature is None: give a number above 0."),
        ({"num_train_epochs": None}, "num_train_epochs is None: give a number, or leave it out for its default, 3.0."),
        ({"max_steps": None}, "max_steps is None: give an integer, or leave it out for its default, -1."),
        ({"seed": None}, "seed is None: give an integer, or leave it out for its default, 42."),
        ({"gradient_accumulation_steps": None}, "gradient_accumulation_steps is None: give an integer of at least 1."),
        ({"top_k": -1}, "top_k is -1: give a number of at least 0, where 0 keeps all tokens."),
        ({"learning_rate": float("nan")}, "learning_rate is nan: give a number of at least 0."),
        ({"weight_decay": float("nan")}, "weight_decay is nan: give a number of at least 0."),
        ({"max_grad_norm": float("nan")}, "max_grad_norm is nan: give a number of at least 0, where 0 clips nothing."),
        ({"adam_beta2": 1.0}, "adam_beta2 is 1.0: give a number in [0, 1)."),
        ({"adam_epsilon": -1e-8}, "adam_epsilon is -1e-08: give a number of at least 0."),
        ({"repetition_penalty": -1.0}, "repetition_penalty is -1.0: give a number above 0."),
        ({"min_p": 2.0}, "min_p is 2.0: give a number in [0, 1]."),
        ({"loss_type": "bogus"}, "loss_type is 'bogus': give dapo, grpo, dr_grpo"),
        ({"num_iterations": 0}, "num_iterations is 0: give an integer of at least 1."),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps is 0: give an integer of at least 1."),
        ({"max_prompt_length": "50"}, "max_prompt_length is '50': give an integer of at least 1."),
        ({"max_prompt_length": 99.5}, "max_prompt_length is 99.5: give an integer of at least 1."),
        ({"warmup_ratio": "0.1"}, "warmup_ratio is 0.1: give a share of all steps in [0, 1)."),
        ({"online_filtering": "no"}, "online_filtering is 'no': give True or False."),
        ({"enable_perception_filtering": "false"}, "enable_perception_filtering is 'false': give True or False."),
        ({"use_entropy_penalty": None}, "use_entropy_penalty is None: give True or False."),
        ({"noise_std": 1e7}, "noise_std is 10000000.0: give a number in [0, 1e6]."),
        ({"blur_radius": 1e29}, "blur_radius is 1e+29: give a number in [0, 1e6]."),
        ({"token_weights_clip": [2, 3]}, "token_weights_clip is [2, 3]: give two numbers low <= 1 <= high"),
        ({"share_prompts": "yes"}, "share_prompts is 'yes': give auto, on or off."),
        ({"skip_padding": "yes"}, "skip_padding is 'yes': give auto or off."),
        ({"num_generations": 0}, "num_generations is 0: give an integer of at least 2."),
        ({"num_generations": None}, "num_generations is None: give an integer of at least 2."),
        ({"save_steps": 0}, "save_steps is 0: give a number above 0, or save_strategy no."),
        ({"eval_strategy": "steps", "eval_steps": 0}, "eval_steps is 0: give a number above 0, or eval_strategy no."),
        ({"credit_rules": "vgpo"}, "credit_rules is 'vgpo': give a list, ['vgpo']."),
        ({"signals": "entropies"}, "signals is 'entropies': give a list, ['entropies']."),
        (
            {"further_perturbations": "mask_image"},
            "further_perturbations is 'mask_image': give a list, ['mask_image'].",
        ),
        ({"max_steps": 0}, "so nothing would be trained: give max_steps of at least 1, or more epochs."),
        (
            {"soft_punish_cache": 600, "max_completion_length": 512},
            "soft_punish_cache is 600: give a number of tokens in [0, max_completion_length = 512].",
        ),
    ],
)
def test_refuses_values_out_of_range(tmp_path, options, message):
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        config(tmp_path, **options)
    assert isinstance(caught.value, VGRError)
    assert isinstance(caught.value, ValueError)


def test_none_is_a_number_only_where_the_type_says_so(tmp_path):
    numbers = [name for name, hint in get_type_hints(DAPOConfig).items() if hint in (int, float)]
    assert {"warmup_steps", "save_steps", "max_grad_norm", "mdi_balance_ratio"} <= {*numbers}
    for name in numbers:
        with pytest.raises(ConfigError, match=f"{name} is None"):
            config(tmp_path, **{name: None})
    assert config(tmp_path, epsilon_high=None, min_p=None).epsilon_high is None


def test_on_and_off_may_be_what_yaml_reads_them_as(tmp_path):
    assert config(tmp_path, share_prompts=False).share_prompts == "off"
    assert config(tmp_path, share_prompts=True).share_prompts == "on"
    assert config(tmp_path, skip_dead_rows=False).skip_dead_rows == "off"


@pytest.mark.parametrize("launched", [True, False])
def test_deepspeed_that_is_not_installed_is_told_before_it_is_looked_for(tmp_path, monkeypatch, launched):
    monkeypatch.setattr(dapo, "find_spec", lambda name: None)
    file = tmp_path / "zero2.json"
    file.write_text('{"zero_optimization": {"stage": 2}}')
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", str(launched).lower())
    with pytest.raises(ConfigError, match=r'not installed: pip install "vgr_trl\[deepspeed\]"'):
        config(tmp_path, deepspeed=None if launched else str(file))


def test_refuses_an_output_dir_without_a_name():
    with pytest.raises(ConfigError, match="output_dir is empty: give a folder, or leave it out"):
        DAPOConfig(output_dir=" ", use_cpu=True, bf16=False)


def test_weights_that_are_clipped_to_1_are_within_the_range(tmp_path):
    assert config(tmp_path, token_weights_clip=[1, 1]).token_weights_clip == [1, 1]


def test_flags_as_users_write_them(tmp_path):
    flags = "--reward_weights 2.5 1.0 0.5 1.0 --early_reward_weights 1.0 1.0 2.0 1.0 --warmup_ratio 0.05 --use_cpu"
    flags += " --bf16 false --soft_punish_cache 50 --max_prompt_length 1024 --eval_num_generations 4"
    (made,) = TrlParser(DAPOConfig).parse_args_and_config([*flags.split(), "--output_dir", str(tmp_path)])
    assert made.reward_weights == [2.5, 1.0, 0.5, 1.0]
    assert made.early_reward_weights == [1.0, 1.0, 2.0, 1.0]
    assert (made.warmup_steps, made.soft_punish_cache, made.max_prompt_length) == (0.05, 50, 1024)
    assert made.num_generations_eval == 4


def test_a_flag_overrides_the_config_file(tmp_path):
    file = tmp_path / "x.yaml"
    file.write_text("warmup_ratio: 0.1\nuse_cpu: true\nbf16: false\nearly_reward_weights: [1.0, 2.0]\n")
    flags = ["--config", str(file), "--warmup_ratio", "0.2", "--output_dir", str(tmp_path)]
    (made,) = TrlParser(DAPOConfig).parse_args_and_config(flags)
    assert (made.warmup_steps, made.early_reward_weights) == (0.2, [1.0, 2.0])


@pytest.mark.parametrize(("flags", "value"), [([], None), (["--resume_from_checkpoint"], "latest")])
def test_resume_without_a_path_means_the_latest(tmp_path, flags, value):
    fixed = ["--use_cpu", "--bf16", "false", "--output_dir", str(tmp_path)]
    (made,) = TrlParser(DAPOConfig).parse_args_and_config([*fixed, *flags])
    assert made.resume_from_checkpoint == value
