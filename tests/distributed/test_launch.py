import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from datasets import Dataset, load_dataset

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_accelerate_launch_with_two_processes(model_folder, question_files, tmp_path):
    """Two processes train one multimodal run: a bad row and long prompts are left out alike, one process writes."""
    output = tmp_path / "run"
    no_system_prompt = tmp_path / "empty.txt"
    no_system_prompt.touch()
    questions = load_dataset("parquet", data_files=question_files.split(",")[0].removeprefix("train="), split="train")
    rows = [dict(row) for row in questions]
    rows[3]["solution"] = "J"
    for index in (5, 6):
        rows[index]["problem"] = "which colour is it? " * 30
    data = tmp_path / "rows.parquet"
    Dataset.from_list(rows, features=questions.features).to_parquet(data)
    flags = (
        f"--model_name_or_path {model_folder} --data_files {data} --output_dir {output} --use_cpu "
        f"--system_prompt_file {no_system_prompt} "
        "--bf16 false --gradient_checkpointing false --per_device_train_batch_size 2 --num_generations 4 "
        "--max_completion_length 6 --max_steps 2 --logging_steps 1 --report_to none --disable_tqdm true "
        "--max_prompt_length 100 --use_peft --lora_target_modules q_proj v_proj"
    )
    command = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--config_file", "accelerate_configs/cpu.yaml", "examples/train_grpo_vlm.py", *flags.split()],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("13 rows to") == 1, "one process describes the run"
    assert done.stderr.count("left out 2 of 15 rows of the train data") == 1
    skipped = [json.loads(line) for line in (output / "skipped.jsonl").read_text().splitlines()]
    assert [row["row"] for row in skipped] == [3]
    assert "2 per device x 2 processes x 1 accumulated = 4 completions" in " ".join(done.stdout.split())
    assert json.loads((output / "trainer_state.json").read_text())["global_step"] == 2
    assert (output / "adapter_config.json").exists()
