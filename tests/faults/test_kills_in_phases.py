"""SIGKILL in generation, scoring, backward, optimizer and evaluation."""

import json
import signal
from pathlib import Path

import phase_worker
import pytest
from support.launching import launch
from support.trainers import train_file

WORKER = Path(phase_worker.__file__)


def last(output):
    return json.loads((output / "result.json").read_text())


@pytest.fixture(scope="module")
def data(model_folder, question_files):
    return str(model_folder), train_file(question_files)


def check_same(output, whole):
    found = last(output)
    assert len(found["losses"]) == phase_worker.OPTIONS["max_steps"]
    assert len(found["evaluations"]) == phase_worker.OPTIONS["max_steps"]
    for name, values in last(whole).items():
        assert found[name] == pytest.approx(values, abs=1e-5), name


@pytest.mark.minutes
def test_a_process_that_is_killed_in_each_phase(data, tmp_path):
    """One run, which dies in another phase each time it is continued, and goes on from what is complete."""
    launch(WORKER, *data, tmp_path / "whole", processes=1)
    for step, phase in enumerate(phase_worker.PHASES, start=2):
        engine = {"ACCELERATE_USE_CPU": "true", "DIES": f"{phase} {step} all"}
        launch(WORKER, *data, tmp_path / "killed", processes=1, engine=engine, status=-signal.SIGKILL)
    launch(WORKER, *data, tmp_path / "killed", processes=1)
    check_same(tmp_path / "killed", tmp_path / "whole")
