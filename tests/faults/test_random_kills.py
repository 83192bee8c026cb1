"""A run that is killed at random moments and continued each time ends as the undisturbed one."""

import json
import os
import random
import subprocess
import time
from itertools import islice

import pytest
from support.checkpoints import complete_checkpoints
from support.commands import ROOT, train_command
from support.launching import environment
from support.trainers import train_file

KILLS = int(os.environ.get("KILLS", "30"))
STEPS = 6 * KILLS


def start(model, files, output, more=""):
    flags = (
        "--per_device_train_batch_size 8 --save_steps 1 --save_total_limit 3 --replay_buffer_size 4 "
        f"--rollout_log_steps 2 --max_steps {STEPS} {more}"
    )
    return subprocess.Popen(
        train_command(model, train_file(files), output, flags), cwd=ROOT, text=True,
        env=environment(PYTHONUNBUFFERED="1"), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip


@pytest.mark.minutes
def test_a_run_that_is_killed_again_and_again(model_folder, question_files, tmp_path):
    output, whole = tmp_path / "killed", tmp_path / "whole"
    given = model_folder, question_files
    undisturbed = start(*given, whole)
    undisturbed.communicate()
    assert undisturbed.returncode == 0
    moments, reached, resume = random.Random(0), 0, ""
    for _ in range(KILLS):
        with start(*given, output, resume) as run:
            if moments.random() < 0.25:  # in its start, or in its first steps
                time.sleep(moments.uniform(2, 8))
            else:
                steps = (line for line in run.stdout if line.startswith("step"))
                list(islice(steps, moments.randint(1, 6)))
                time.sleep(moments.uniform(0, 1))
            run.kill()
        found = [int(each.name.removeprefix("checkpoint-")) for each in complete_checkpoints(output)]
        assert max(found, default=0) >= reached, "what was saved stays"
        reached = max(found, default=0)
        resume = "--resume_from_checkpoint" if reached else "--resume_from_checkpoint latest"
        if reached >= STEPS - 6:
            break
    assert reached >= KILLS, "most kills hit a run that had been continued"
    last = start(*given, output, resume)
    last.communicate()
    assert last.returncode == 0
    states = [json.loads((folder / "trainer_state.json").read_text()) for folder in (output, whole)]
    found, expected = ([entry["loss"] for entry in state["log_history"] if "loss" in entry] for state in states)
    assert found == pytest.approx(expected, abs=1e-6)
