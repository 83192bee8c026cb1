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
from support.launching import children_of, environment, outputs, wait_for_line
from support.trainers import train_file

ROOT = Path(__file__).parents[2]
SECONDS = 30  # more than one process ever waits for the other on a machine that does much else


def start(model, files, output, empty, *more):
    flags = (
        "-m torch.distributed.run --standalone --nproc_per_node=2 "
        f"examples/train_grpo_vlm.py --model_name_or_path {model} --data_files {train_file(files)} --use_cpu "
        f"--output_dir {output} --system_prompt_file {empty} --bf16 false --gradient_checkpointing false "
        "--per_device_train_batch_size 4 --num_generations 4 --max_completion_length 6 --logging_steps 1 "
        f"--report_to none --save_steps 2 --ddp_timeout {SECONDS}"
    )
    return subprocess.Popen(
        [sys.executable, *flags.split(), *more],
        cwd=ROOT,
        env=environment(ACCELERATE_USE_CPU="true", PYTHONUNBUFFERED="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.minutes
def test_a_process_that_is_stopped(model_folder, question_files, tmp_path):
    empty, output = tmp_path / "empty.txt", tmp_path / "run"
    empty.touch()
    given = model_folder, question_files, output, empty
    run = start(*given, "--max_steps", "1000")
    wait_for_line(run, "step    3/1000")
    processes = children_of(run)
    os.kill(processes[1], signal.SIGSTOP)
    began = time.monotonic()
    ((_, errors),) = outputs(run)
    assert run.returncode != 0
    assert time.monotonic() - began > SECONDS - 1
    said = rf"vgr-trl train: Another of the 2 processes has not answered for ddp_timeout={SECONDS} seconds at step \d+"
    assert re.search(said, errors), errors[-3000:]
    assert not any(Path(f"/proc/{pid}").exists() for pid in processes)
    saved = int(complete_checkpoints(output)[-1].name.removeprefix("checkpoint-"))
    rest = start(*given, "--max_steps", str(saved + 1), "--resume_from_checkpoint")
    ((_, errors),) = outputs(rest)
    assert rest.returncode == 0, errors[-3000:]
    assert json.loads((output / "trainer_state.json").read_text())["global_step"] == saved + 1
