import os
from pathlib import Path
from unittest.mock import Mock

import pytest
import yaml
from transformers import AutoProcessor
from trl import ModelConfig

from vgr_trl.cli.__main__ import main
from vgr_trl.cli.arguments import DataArguments, RewardArguments, load_processor, parse
from vgr_trl.dapo_config import SPELLINGS, DAPOConfig
from vgr_trl.errors import ConfigError
from vgr_trl.trainer import DAPOTrainer

TABLE = yaml.safe_load(Path(__file__).with_name("arguments.yaml").read_text(encoding="utf-8"))


@pytest.fixture
def options_of(tmp_path):
    def options_of(text, *flags):
        file = tmp_path / "mine.yaml"
        file.write_text(text + "\n")
        flags = ["--output_dir", str(tmp_path), "--bf16", "false", "--use_cpu", "--config", str(file), *flags]
        return parse((DataArguments, RewardArguments, DAPOConfig, ModelConfig), "train", flags)

    return options_of


@pytest.mark.parametrize(("flags", "message"), TABLE["wrong flags"].items())
def test_wrong_flags_are_one_sentence(capsys, flags, message):
    assert main(["train", *flags.split()]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert "usage" not in error


@pytest.mark.parametrize("text", TABLE["wrong files"])
def test_wrong_values_of_a_file_are_refused(options_of, text):
    with pytest.raises(ConfigError):
        options_of(text)


def test_values_of_a_file_as_yaml_reads_them_and_flags_before_them(options_of, monkeypatch):
    monkeypatch.setenv("MY_PROJECT", "before")
    text = TABLE["file"]
    data, rewards, config, _ = options_of(text)
    assert (config.beta, config.learning_rate, config.max_prompt_length) == (1, 1e-4, None)
    assert (config.report_to, config.max_steps, config.scale_rewards) == ([], 3, "none")
    assert data.data_files == "train=a.jsonl,test=b.jsonl"
    assert config.generation_kwargs == {"num_beams": 1}
    assert config.reward_weights == [1, -1e-5, 1, 1]
    assert (config.share_prompts, config.shuffle_dataset, config.logging_steps) == ("on", False, 1)
    assert (rewards.reward_funcs, config.credit_rules) == (["accuracy"], ["token_weights"])
    assert os.environ["MY_PROJECT"] == "mine"
    flags = ["--data_files", "train=b.jsonl", "test=c.jsonl", "--data_files=test=d.jsonl", "--max-prompt-length", "9"]
    flags += ["--greater_is_better", "--compute_attention_metrics", "false"]
    data, _, config, _ = options_of(text, *flags)
    assert data.data_files == "train=b.jsonl,test=c.jsonl,test=d.jsonl"
    assert (config.beta, config.max_prompt_length) == (1, 9)
    assert (config.greater_is_better, config.compute_attention_metrics) == (True, False)


def test_help_lists_every_flag_once_and_ours_by_stage(capsys):
    def help_of(*flags):
        with pytest.raises(SystemExit):
            main([*flags])
        return capsys.readouterr().out

    listed = [line.split()[0] for line in help_of("train", "--help-all").splitlines() if line.startswith("  --")]
    assert len(listed) == len(set(listed))
    assert {"--push_to_hub", "--learning_rate", "--token_weights", "--dry_run", "--lora_r"} <= set(listed)
    text = help_of("train", "--help")
    assert text.index("\n  data ") < text.index("\n  credit ") < text.index("\n  trl ")
    stage = help_of("train", "--help", "kl")
    assert "--kl_horizon " in stage
    assert "--token_weights" not in stage


@pytest.mark.parametrize(
    "error", [ImportError("it requires the Torchvision library"), AttributeError("_extra_content")]
)
def test_a_processor_without_torchvision_is_refused_before_the_model_is_loaded(tmp_path, monkeypatch, error):
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_5_vl"}')
    monkeypatch.setattr(AutoProcessor, "from_pretrained", Mock(side_effect=error))
    monkeypatch.setattr("vgr_trl.validate.options.is_torchvision_available", lambda: False)
    with pytest.raises(ConfigError, match=r"needs torchvision: .*pip install torch torchvision"):
        load_processor(str(tmp_path))
    options = DAPOConfig(str(tmp_path / "run"), use_cpu=True, bf16=False)
    with pytest.raises(ConfigError, match=r"needs torchvision: .*pip install torch torchvision"):
        DAPOTrainer(str(tmp_path), [], options)


def test_a_model_without_a_chat_template_is_refused(model_folder, tmp_path):
    processor = load_processor(str(model_folder))
    processor.chat_template = processor.tokenizer.chat_template = None
    processor.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="has no chat template"):
        load_processor(str(tmp_path))


def test_spellings_of_other_scripts_set_the_options_they_stand_for(options_of, tmp_path, capsys):
    given = {
        **dict.fromkeys(("eval_num_generations", "prompt_preview_chars", "completion_preview_chars"), 4),
        **dict.fromkeys(("clip_ratio_low", "clip_ratio_high"), 0.4), "clip_ratio_dual": 3.0,
        **{"late_reward_weights": [2.0], "token_weight_clip": [0.5, 2.0]}, "loss_avg_mode": "seq",
        **{"enable_token_weights": True, "token_weight_smooth_sigma": 1.0, "token_weight_last_k_layers": 1},
    }  # fmt: skip
    assert {"out_dir", *given} == SPELLINGS.keys()
    words = "--early_reward_weights 1 --use_segmented_reward_weights true".split()
    for name, value in given.items():
        words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    by_flags = options_of("max_steps: 1\nloss_avg_mode: token", *words)[2]
    other = {"use_segmented_reward_weights": False, "early_reward_weights": [1.0], "use_cpu": True, "bf16": False}
    in_python = DAPOConfig(out_dir=str(tmp_path), **given, **other)
    assert "token_weight_clip sets token_weights_clip" in capsys.readouterr().err
    assert (by_flags.early_reward_weights, in_python.early_reward_weights) == ([1], None)
    assert in_python.output_dir == str(tmp_path)
    for made in (by_flags, in_python):
        assert made.loss_type == "grpo"
        assert all(vars(made)[SPELLINGS[name]] == value for name, value in given.items() if name != "loss_avg_mode")
    assert options_of("loss_avg_mode: token")[2].loss_type == "dapo"
    for flags in (["--loss_avg_mode=seq", "--loss_type", "bnpo"], ["--use_segmented_reward_weights"]):
        with pytest.raises(ConfigError):
            parse([DAPOConfig], "train", flags)
    with pytest.raises(ConfigError):
        options_of("out_dir: x\noutput_dir: y")
    with pytest.raises(ConfigError):
        DAPOConfig(out_dir="x", output_dir="y", use_cpu=True)


@pytest.mark.parametrize("word", ["=False", "=0", " no"])
def test_a_flag_switches_early_reward_weights_off(options_of, word):
    flags = f"--use_segmented_reward_weights{word}".split()
    file = "use_segmented_reward_weights: true\nearly_reward_weights: [1.0, 0.0]"
    assert options_of(file, *flags)[2].early_reward_weights is None
    assert options_of("beta: 0", *flags, "--early_reward_weights", "1", "0")[2].early_reward_weights is None
