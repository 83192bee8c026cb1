"""A run continued from any of its checkpoints sees the prompts in the order of the run that was not interrupted."""

import json
import signal
from pathlib import Path

import order_worker
import pytest
from order_worker import CASES, KILLED
from support.launching import launch
from support.trainers import train_file


@pytest.fixture(scope="module")
def data(model_folder, question_files):
    return str(model_folder), train_file(question_files)


@pytest.fixture(scope="module", params=[1, 2], ids=["one process", "two processes"])
def started(request, data, tmp_path_factory):
    """Folder, and a function that runs the worker there in one process or two."""
    output = tmp_path_factory.mktemp("order")

    def start(*more, status=0):
        launch(Path(order_worker.__file__), *data, output, *more, processes=request.param, status=status)

    return output, start, request.param


@pytest.fixture(scope="module")
def results(started, data):
    output, start, processes = started
    if processes == 1:
        return order_worker.train_all(data, output)
    start()
    return json.loads((output / "results.json").read_text())


@pytest.mark.slow
def test_a_run_that_is_killed_in_each_epoch_ends_as_the_undisturbed_one(started, results):
    """24 steps of 3 epochs; killed at the end of 5 and of 13, before they are saved."""
    output, start, _ = started
    for step in (5, 13):
        start(step, status=-signal.SIGKILL)
    start(0)
    found, whole = json.loads((output / "killed.json").read_text()), results[KILLED]["whole"]
    assert len(whole["losses"]) > 14
    assert found["losses"] == pytest.approx(whole["losses"], abs=1e-7)
    assert found["weights"] == pytest.approx(whole["weights"], abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "step"), [(case, step) for case, (_, _, steps) in CASES.items() for step in steps])
def test_a_continued_run_is_the_undisturbed_one(case, step, results):
    whole, rest = results[case]["whole"], results[case][str(step)]
    begun = len(whole["prompts"]) - len(rest["prompts"])
    assert len({tuple(batch) for batch in whole["prompts"]}) > len(whole["prompts"]) // 2, "epochs have other orders"
    assert rest["prompts"] == whole["prompts"][begun:]
    assert rest["losses"] == pytest.approx(whole["losses"], abs=1e-7)
    assert rest["weights"] == pytest.approx(whole["weights"], abs=1e-5)
