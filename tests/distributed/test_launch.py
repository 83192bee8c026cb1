import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_accelerate_launch_with_two_processes(model_folder, question_files, tmp_path):
    """Two processes train one multimodal run; one of them writes; the long prompts are the same on both."""
    output = tmp_path / "run"
    flags = (
        f"--model_name_or_path {model_folder} --data_files {question_files} --output_dir {output} --use_cpu "
        "--bf16 false --gradient_checkpointing false --per_device_train_batch_size 2 --num_generations 4 "
        "--max_completion_length 6 --max_steps 2 --logging_steps 1 --report_to none --disable_tqdm true "
        "--max_prompt_length 600 --use_peft --lora_target_modules q_proj v_proj"
    )
    command = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--config_file", "accelerate_configs/cpu.yaml", "examples/train_grpo_vlm.py", *flags.split()],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("16 rows to") == 1, "one process describes the run"
    assert "2 per device x 2 processes x 1 accumulated = 4 completions" in " ".join(done.stdout.split())
    assert json.loads((output / "trainer_state.json").read_text())["global_step"] == 2
    assert (output / "adapter_config.json").exists()
