"""A run that is killed at random moments and continued each time ends as the undisturbed one."""

import json
import os
import random
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path

import pytest
from support.checkpoints import complete_checkpoints
from support.launching import environment
from support.trainers import train_file

ROOT = Path(__file__).parents[2]
KILLS = int(os.environ.get("KILLS", "30"))
STEPS = 6 * KILLS


def start(model, files, output, empty, *more):
    flags = (
        f"examples/train_grpo_vlm.py --model_name_or_path {model} --data_files {train_file(files)} --use_cpu "
        f"--output_dir {output} --system_prompt_file {empty} --bf16 false --gradient_checkpointing false "
        "--per_device_train_batch_size 8 --num_generations 4 --max_completion_length 6 --logging_steps 1 "
        f"--report_to none --save_steps 1 --save_total_limit 3 --replay_buffer_size 4 --rollout_log_steps 2 "
        f"--max_steps {STEPS}"
    )
    return subprocess.Popen(
        [sys.executable, *flags.split(), *more],
        cwd=ROOT,
        env=environment(PYTHONUNBUFFERED="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def losses(output):
    history = json.loads((output / "trainer_state.json").read_text())["log_history"]
    return {entry["step"]: entry["loss"] for entry in history if "loss" in entry}


@pytest.mark.minutes
def test_a_run_that_is_killed_again_and_again(model_folder, question_files, tmp_path):
    empty, output, whole = tmp_path / "empty.txt", tmp_path / "killed", tmp_path / "whole"
    empty.touch()
    given = model_folder, question_files
    undisturbed = start(*given, whole, empty)
    undisturbed.communicate()
    assert undisturbed.returncode == 0
    moments, reached, resume = random.Random(0), 0, []
    for _ in range(KILLS):
        with start(*given, output, empty, *resume) as run:
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
        resume = ["--resume_from_checkpoint"] if reached else ["--resume_from_checkpoint", "latest"]
        if reached >= STEPS - 6:
            break
    assert reached >= KILLS, "most kills hit a run that had been continued"
    last = start(*given, output, empty, *resume)
    last.communicate()
    assert last.returncode == 0
    assert losses(output) == pytest.approx(losses(whole), abs=1e-6)
