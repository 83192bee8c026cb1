"""A run whose model was not written, though all steps are behind it, writes it when it is started again."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from support.launching import environment
from support.trainers import train_file

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_model_is_written_and_a_finished_run_is_refused(model_folder, question_files, tmp_path):
    empty, output = tmp_path / "empty.txt", tmp_path / "run"
    empty.touch()
    flags = (
        f"examples/train_grpo_vlm.py --model_name_or_path {model_folder} --data_files {train_file(question_files)} "
        f"--use_cpu --output_dir {output} --system_prompt_file {empty} --bf16 false --gradient_checkpointing false "
        "--per_device_train_batch_size 4 --num_generations 4 --max_completion_length 4 --max_steps 2 --save_steps 1 "
        "--report_to none --resume_from_checkpoint"
    )

    def start():
        command = [sys.executable, *flags.split()]
        return subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)

    assert start().returncode == 0
    weights = {name: value.clone() for name, value in load_file(output / "model.safetensors").items()}
    metrics = json.loads((output / "metrics.json").read_text())
    finished = start()
    assert finished.returncode == 1
    assert "The run is finished: " in finished.stderr
    (output / "metrics.json").unlink()  # as of a run that is killed while it writes its model
    (output / "model.safetensors").write_bytes(b"torn")
    again = start()
    assert again.returncode == 0, again.stderr[-3000:]
    assert load_file(output / "model.safetensors").keys() == weights.keys()
    assert all(bool((value == weights[name]).all()) for name, value in load_file(output / "model.safetensors").items())
    assert json.loads((output / "metrics.json").read_text()) == metrics
    assert json.loads((output / "trainer_state.json").read_text())["global_step"] == 2
