"""A run continued from any of its checkpoints sees the prompts in the order of the run that was not interrupted."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("order_worker.py")
CASES = {
    "whole batches": (3, 7),
    "parts of a batch": (3, 18),
    "windows across batches": (3, 4),
    "batches used twice": (5,),
    "replay": (6,),
}


@pytest.fixture(scope="module", params=[1, 2], ids=["one process", "two processes"])
def launch(request, model_folder, question_files, tmp_path_factory):
    output = tmp_path_factory.mktemp("order")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={request.param}"]
    questions = question_files.split(",")[0].removeprefix("train=")

    def launched(name, *more):
        done = subprocess.run(
            [*command, str(SCRIPT), str(model_folder), questions, str(output), str(request.param), *more],
            env={**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"},
            capture_output=True,
            text=True,
            timeout=900,
        )
        if done.returncode != 0:
            return done.stderr[-4000:]
        return json.loads((output / name).read_text())

    return launched


@pytest.fixture(scope="module")
def results(launch):
    found = launch("results.json")
    assert isinstance(found, dict), found
    return found


@pytest.mark.slow
def test_a_run_that_is_killed_in_each_epoch_ends_as_the_undisturbed_one(launch, results):
    """24 steps of 3 epochs; killed at the end of 5 and of 13, before they are saved."""
    for step in ("5", "13"):
        assert "SIGKILL" in launch("killed.json", step)
    found, whole = launch("killed.json", "0"), results["parts of a batch"]["whole"]
    assert isinstance(found, dict), found
    assert len(whole["losses"]) > 14
    assert found["losses"] == pytest.approx(whole["losses"], abs=1e-7)
    assert found["weights"] == pytest.approx(whole["weights"], abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "step"), [(case, step) for case, steps in CASES.items() for step in steps])
def test_a_continued_run_is_the_undisturbed_one(case, step, results):
    whole, rest = results[case]["whole"], results[case][str(step)]
    begun = len(whole["prompts"]) - len(rest["prompts"])
    assert len({tuple(batch) for batch in whole["prompts"]}) > len(whole["prompts"]) // 2, "epochs have other orders"
    assert rest["prompts"] == whole["prompts"][begun:]
    assert rest["losses"] == pytest.approx(whole["losses"], abs=1e-7)
    assert rest["weights"] == pytest.approx(whole["weights"], abs=1e-5)
