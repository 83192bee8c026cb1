"""SIGKILL in generation, scoring, backward, optimizer and evaluation, of one process of two and of both."""

import json
import subprocess
import sys
from pathlib import Path

import phase_worker
import pytest
from support.launching import SECONDS, environment, launch
from support.trainers import train_file

WORKER = Path(phase_worker.__file__)
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]


@pytest.fixture(scope="module")
def data(model_folder, question_files):
    return str(model_folder), train_file(question_files)


def check_same(output, whole):
    found, expected = (json.loads((folder / "result.json").read_text()) for folder in (output, whole))
    assert len(found["losses"]) == len(found["evaluations"]) == phase_worker.OPTIONS["max_steps"]
    for name, values in expected.items():
        assert found[name] == pytest.approx(values, abs=1e-5), name


@pytest.mark.minutes
@pytest.mark.parametrize("who", ["1", "all"])
def test_processes_that_are_killed_in_each_phase(who, data, tmp_path):
    """One run, which dies in another phase each time it is continued, and goes on from what is complete.

    Where one process dies, the other ends with a sentence, or by the launcher, which ends all.
    """
    launch(WORKER, *data, tmp_path / "whole", processes=2)
    said = ""
    for step, phase in enumerate(phase_worker.PHASES, start=2):
        command = [*TORCHRUN, str(WORKER), *data, str(tmp_path / "killed")]
        more = environment(ACCELERATE_USE_CPU="true", DIES=f"{phase} {step} {who}")
        run = subprocess.run(command, env=more, capture_output=True, text=True, timeout=SECONDS)
        assert run.returncode != 0
        assert "SIGKILL" in run.stderr, run.stderr[-3000:]
        said += run.stderr
    if who == "1":
        assert "ProcessError: Another of the 2 processes has ended, or" in said
    launch(WORKER, *data, tmp_path / "killed", processes=2)
    check_same(tmp_path / "killed", tmp_path / "whole")
