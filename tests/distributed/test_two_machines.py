import json
import subprocess

import pytest
from support.commands import ROOT, train_command
from support.launching import environment, outputs
from support.trainers import train_file


@pytest.mark.minutes
def test_two_machines_train_one_run(model_folder, question_files, tmp_path, port):
    launcher = (
        "-m accelerate.commands.launch --config_file accelerate_configs/two_machines.yaml --mixed_precision no "
        f"--num_processes 2 --main_process_ip 127.0.0.1 --main_process_port {port} --machine_rank"
    )
    flags = "--use_cpu false --ddp_backend gloo --per_device_train_batch_size 2 --max_steps 2 --disable_tqdm true"
    data, pipes = (model_folder, train_file(question_files)), {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    started = [
        subprocess.Popen(
            train_command(*data, tmp_path / f"run{rank}", flags, f"{launcher} {rank}"), cwd=ROOT, text=True, **pipes,
            env=environment(DS_ACCELERATOR="cpu", COLUMNS="200"),
        )
        for rank in range(2)
    ]  # fmt: skip
    said = outputs(*started)
    assert [process.returncode for process in started] == [0, 0], [error[-3000:] for _, error in said]
    plan = " ".join(said[0][0].split())
    assert "2 processes on 2 machines, DeepSpeed ZeRO-2, CPU, no mixed precision" in plan
    assert "2 steps of 4 completions" in plan
    assert json.loads((tmp_path / "run0" / "trainer_state.json").read_text())["global_step"] == 2
    assert not (tmp_path / "run1" / "trainer_state.json").exists(), "one process writes"
