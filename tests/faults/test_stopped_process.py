"""One of two processes is stopped (SIGSTOP): the other ends with a sentence, the launcher ends all, the run goes on."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.checkpoints import complete_checkpoints
from support.launching import environment, outputs
from support.trainers import train_file

ROOT = Path(__file__).parents[2]


def start(model, files, output, empty, *more):
    flags = (
        "-m torch.distributed.run --standalone --nproc_per_node=2 "
        f"examples/train_grpo_vlm.py --model_name_or_path {model} --data_files {train_file(files)} --use_cpu "
        f"--output_dir {output} --system_prompt_file {empty} --bf16 false --gradient_checkpointing false "
        "--per_device_train_batch_size 4 --num_generations 4 --max_completion_length 6 --logging_steps 1 "
        "--report_to none --save_steps 2 --ddp_timeout 10"
    )
    return subprocess.Popen(
        [sys.executable, *flags.split(), *more],
        cwd=ROOT,
        env=environment(ACCELERATE_USE_CPU="true", PYTHONUNBUFFERED="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def children(pid):
    found = subprocess.run(["ps", "--ppid", str(pid), "-o", "pid="], capture_output=True, text=True)
    return [int(each) for each in found.stdout.split()]


@pytest.mark.minutes
def test_a_process_that_is_stopped(model_folder, question_files, tmp_path):
    empty, output = tmp_path / "empty.txt", tmp_path / "run"
    empty.touch()
    given = model_folder, question_files, output, empty
    run = start(*given, "--max_steps", "1000")
    for line in run.stdout:
        if line.startswith("step    3/1000"):
            break
    processes = children(run.pid)
    os.kill(processes[1], signal.SIGSTOP)
    began = time.monotonic()
    ((_, errors),) = outputs(run)
    assert run.returncode != 0
    assert 9 < time.monotonic() - began < 120, "ddp_timeout, and what the launcher waits for a stopped process"
    said = r"vgr-trl train: Another of the 2 processes has not answered for ddp_timeout=10 seconds at step \d+: see"
    assert re.search(said, errors), errors[-3000:]
    assert not any(Path(f"/proc/{pid}").exists() for pid in processes)
    saved = int(complete_checkpoints(output)[-1].name.removeprefix("checkpoint-"))
    rest = start(*given, "--max_steps", str(saved + 1), "--resume_from_checkpoint")
    ((_, errors),) = outputs(rest)
    assert rest.returncode == 0, errors[-3000:]
    assert json.loads((output / "trainer_state.json").read_text())["global_step"] == saved + 1
