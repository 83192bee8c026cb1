"""`--dry_run`: what it shows, what it estimates, on one process and on two, and that nothing stays."""

import re
from pathlib import Path

from support.launching import launch

from vgr_trl.cli.__main__ import main
from vgr_trl.cli.plan import estimates

FLAGS = """--use_cpu true --bf16 false --num_generations 4 --max_completion_length 6 --num_train_epochs 3
    --token_weights --output_dir run --gradient_accumulation_steps 4"""


def check(printed, completions):
    assert len(re.findall(r"^prompt \d: \d+x\d+ px \(\d+x\d+ tokens\); right: ", printed, re.M)) == 3
    assert len(re.findall("^  completion$", printed, re.M)) == 6
    assert len(re.findall("accuracy_reward .*vgr_reward .*; reward .*; advantage", printed)) == 6
    assert len(re.findall("^    late layers: vgr [0-9.]+, aei_vision", printed, re.M)) == 6
    assert "measured: 12 completions of at most 6 tokens" in printed
    assert f"with the {completions} completions of a whole rollout" in printed


def test_three_prompts_are_shown_and_nothing_is_written(model_folder, question_files, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    flags = f"""train --dry_run --model_name_or_path {model_folder} --data_files {question_files} {FLAGS}
        --per_device_train_batch_size 4 --eval_strategy steps --save_steps 1 --log_completions
        --rollout_log_path rollouts.md"""
    assert main(flags.split()) == 0
    printed = capsys.readouterr().out
    check(printed, 16)
    assert "for 12 steps" in printed, "16 rows in rollouts of 4 prompts, 3 epochs"
    assert list(tmp_path.iterdir()) == []
    assert main("train --dry_run --use_cpu true --bf16 false".split()) == 1
    assert "model_name_or_path is missing" in capsys.readouterr().err


def test_two_processes_show_what_one_run_would_take(model_folder, question_files, tmp_path, monkeypatch):
    """2 completions on each process, groups of 4: three rounds are three prompts, each of which is on both."""
    printed, work, left = (tmp_path / name for name in ("printed", "work", "temporary"))
    for folder in (printed, work, left):
        folder.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setenv("TMPDIR", str(left))
    flags = f"--model_name_or_path {model_folder} --data_files {question_files} {FLAGS} --per_device_train_batch_size 2"
    launch(Path(__file__).with_name("dry_run_worker.py"), printed, *flags.split(), processes=2)
    first, second = ((printed / f"printed_{rank}.txt").read_text() for rank in (0, 1))
    assert not re.search("prompt|completion", second)
    check(first, 16)
    assert "for 12 steps" in first
    assert list(work.iterdir()) == []
    assert [path.name for path in left.iterdir() if path.name.startswith("vgr_trl")] == []


def test_estimates_by_hand():
    """2 s for 8 completions: 8 s for 32, 80 s for 10 steps."""
    lines = estimates(completions=32, per_step=32, steps=10, seconds=2.0 / 8, peak=5 * 2**29)
    assert "memory: about 2.50 GiB per process with the 32 completions" in lines
    assert "time per step: at most about 8 s (32 completions)" in lines
    assert "total: at most about 80 s for 10 steps" in lines
    assert "total: not known" in estimates(32, 32, 0, 0.25, 0)
