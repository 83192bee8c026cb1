"""One of two processes is stopped (SIGSTOP): the other ends with a sentence, the launcher ends all, the run goes on."""

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
from support.checkpoints import complete_checkpoints
from support.commands import ROOT, train_command
from support.launching import children_of, environment, outputs, wait_for_line
from support.trainers import train_file

SECONDS = 30  # more than one process ever waits for the other on a machine that does much else


def start(model, files, output, more):
    flags = f"--per_device_train_batch_size 4 --save_steps 2 --ddp_timeout {SECONDS} {more}"
    launcher = "-m torch.distributed.run --standalone --nproc_per_node=2"
    return subprocess.Popen(
        train_command(model, train_file(files), output, flags, launcher), cwd=ROOT, text=True,
        env=environment(ACCELERATE_USE_CPU="true", PYTHONUNBUFFERED="1"),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


@pytest.mark.minutes
def test_a_process_that_is_stopped(model_folder, question_files, tmp_path):
    output = tmp_path / "run"
    given = model_folder, question_files, output
    run = start(*given, "--max_steps 1000")
    wait_for_line(run, "step    3/1000")
    processes = children_of(run)
    os.kill(processes[1], signal.SIGSTOP)
    ((_, errors),) = outputs(run)
    assert run.returncode != 0
    said = rf"vgr-trl train: Another of the 2 processes .* not answered for ddp_timeout={SECONDS} seconds, at step \d+"
    assert re.search(said, errors), errors[-3000:]
    assert not any(Path(f"/proc/{pid}").exists() for pid in processes)
    saved = int(complete_checkpoints(output)[-1].name.removeprefix("checkpoint-"))
    rest = start(*given, f"--max_steps {saved + 1} --resume_from_checkpoint")
    ((_, errors),) = outputs(rest)
    assert rest.returncode == 0, errors[-3000:]
    assert json.loads((output / "trainer_state.json").read_text())["global_step"] == saved + 1
