"""`--dry_run`: what it shows, what it estimates, and that nothing stays."""

import re

import pytest

from vgr_trl import DAPOConfig
from vgr_trl.cli.__main__ import main
from vgr_trl.cli.train import Whole, estimates


def test_three_prompts_are_shown_and_nothing_is_written(model_folder, question_files, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    flags = f"""train --dry_run --model_name_or_path {model_folder} --data_files {question_files} --output_dir run
        --use_cpu true --bf16 false --num_generations 4 --per_device_train_batch_size 4 --gradient_accumulation_steps 4
        --max_completion_length 6 --num_train_epochs 3 --token_weights --eval_strategy steps --save_steps 1
        --log_completions --rollout_log_path rollouts.md"""
    assert main(flags.split()) == 0
    printed = capsys.readouterr().out
    assert len(re.findall(r"^prompt \d: \d+x\d+ px \(\d+x\d+ tokens\); right: ", printed, re.M)) == 3
    assert len(re.findall("^  completion$", printed, re.M)) == 6
    assert len(re.findall("accuracy_reward .*vgr_reward .*; reward .*; advantage", printed)) == 6
    assert len(re.findall("^    late layers: vgr [0-9.]+, aei_vision", printed, re.M)) == 6
    assert "measured: 12 completions of at most 6 tokens" in printed
    assert "for 12 steps" in printed, "16 rows in rollouts of 4 prompts, 3 epochs"
    assert list(tmp_path.iterdir()) == []
    assert main("train --dry_run --use_cpu true --bf16 false".split()) == 1
    assert "model_name_or_path is missing" in capsys.readouterr().err


def test_estimates_by_hand(tmp_path):
    """2 s for 8 completions: 8 s for 32; 5 rollouts of 4 prompts of 20 rows, 2 epochs, 1 step each: 10 steps, 80 s."""
    config = DAPOConfig(str(tmp_path), use_cpu=True, bf16=False, per_device_train_batch_size=8, num_generations=8)
    whole = Whole(completions=32, per_step=32, rows=20, max_steps=-1, epochs=2, passes=1.0, prompts=4)
    lines = "\n".join(estimates(whole, config, 2.0, peak=2**30, row_bytes=2**26))
    assert "memory 1.00 GiB per process" in lines
    assert "memory: about 2.50 GiB per process with the 32 completions" in lines  # 24 rows more, of 1/16 GiB
    assert "time per step: at most about 8 s (32 completions)" in lines
    assert "total: at most about 80 s for 10 steps" in lines


@pytest.mark.parametrize(("rows", "max_steps", "steps"), [(None, -1, None), (None, 7, 7), (20, -1, 10)])
def test_steps_of_the_whole_run(rows, max_steps, steps):
    assert Whole(32, 32, rows, max_steps, 2, 1.0, 4).steps == steps
