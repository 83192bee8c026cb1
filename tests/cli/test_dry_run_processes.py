"""`--dry_run` on two processes: one of them tells what came out, sizes are those of both, nothing stays."""

import re
from pathlib import Path

from support.launching import launch


def test_two_processes_show_what_one_run_would_take(model_folder, question_files, tmp_path, monkeypatch):
    printed, work, left = (tmp_path / name for name in ("printed", "work", "temporary"))
    for folder in (printed, work, left):
        folder.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setenv("TMPDIR", str(left))
    flags = f"""--model_name_or_path {model_folder} --data_files {question_files} --output_dir run
        --use_cpu true --bf16 false --num_generations 4 --per_device_train_batch_size 2 --gradient_accumulation_steps 4
        --max_completion_length 6 --num_train_epochs 3 --token_weights"""
    launch(Path(__file__).with_name("dry_run_worker.py"), printed, *flags.split(), processes=2)
    first, second = ((printed / f"printed_{rank}.txt").read_text() for rank in (0, 1))
    assert not re.search("prompt|completion", second)
    # 2 completions on each process, groups of 4: three rounds are three prompts, each of which is on both.
    assert len(re.findall(r"^prompt \d: \d+x\d+ px \(\d+x\d+ tokens\); right: ", first, re.M)) == 3
    assert len(re.findall("^  completion$", first, re.M)) == 6
    assert "measured: 12 completions of at most 6 tokens" in first
    assert "for 12 steps" in first, "16 rows in rollouts of 4 prompts, 3 epochs"
    assert "with the 16 completions of a whole rollout" in first
    assert list(work.iterdir()) == []
    assert [path.name for path in left.iterdir() if path.name.startswith("vgr_trl")] == []
