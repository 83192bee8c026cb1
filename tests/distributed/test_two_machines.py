"""Two launchers on one machine, each as if it were a machine of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.launching import environment, outputs
from support.trainers import train_file

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_two_machines_train_one_run(model_folder, question_files, tmp_path, port):
    (tmp_path / "empty.txt").touch()
    launcher = (
        "-m accelerate.commands.launch --config_file accelerate_configs/two_machines.yaml --mixed_precision no "
        f"--num_processes 2 --main_process_ip 127.0.0.1 --main_process_port {port}"
    )
    flags = (
        f"--model_name_or_path {model_folder} --data_files {train_file(question_files)} --ddp_backend gloo "
        f"--system_prompt_file {tmp_path / 'empty.txt'} --bf16 false --gradient_checkpointing false "
        "--per_device_train_batch_size 2 --num_generations 4 --max_completion_length 6 --max_steps 2 --report_to none "
        "--disable_tqdm true"
    )
    started = [
        subprocess.Popen(
            [sys.executable, *launcher.split(), "--machine_rank", str(rank), "examples/train_grpo_vlm.py",
             *flags.split(), "--output_dir", str(tmp_path / f"run{rank}")],
            cwd=ROOT,
            env=environment(DS_ACCELERATOR="cpu", COLUMNS="200"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    said = outputs(*started)
    assert [process.returncode for process in started] == [0, 0], [error[-3000:] for _, error in said]
    plan = " ".join(said[0][0].split())
    assert "processes 2 on 2 machines, DeepSpeed ZeRO-2, on cpu, no mixed precision" in plan
    assert "2 per device x 2 processes x 1 accumulated = 4 completions" in plan
    assert json.loads((tmp_path / "run0" / "trainer_state.json").read_text())["global_step"] == 2
    assert not (tmp_path / "run1" / "trainer_state.json").exists(), "one process writes"
