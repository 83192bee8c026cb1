"""A run whose groups are spread over processes continues with another number of them as if it had not stopped."""

import json
from pathlib import Path

import pytest
import resume_worker
import torch
from support.launching import launch
from support.trainers import train_file

COMPARED = ("replay/size", "replay/mean_age", "replay/replaced_fraction", "dynamic_sampling/generated_groups", "reward")


@pytest.fixture(scope="module")
def runs(model_folder, question_files, tmp_path_factory):
    """How far weights moved and history of eight steps, by processes before and after the fourth step."""
    folder, data = tmp_path_factory.mktemp("resume"), (model_folder, train_file(question_files))
    found = {"one": resume_worker.run(*data, folder / "one", 4)}
    launch(Path(resume_worker.__file__), *data, folder, folder / "one" / "checkpoint-4", processes=2)
    moved, histories = torch.load(folder / "moves.pt"), json.loads((folder / "history.json").read_text())
    found |= {name: (moved[name], histories[name]) for name in moved}
    checkpoint = str(folder / "two" / "checkpoint-4")
    return found | {"two-one": resume_worker.run(*data, folder / "two-one", 4, checkpoint=checkpoint)}


@pytest.mark.slow
@pytest.mark.parametrize("run", ["two", "one-two", "two-one"])
def test_another_number_of_processes_continues_the_run(run, runs):
    (moves, history), (expected_moves, expected) = runs[run], runs["one"]
    assert len(history) == len(expected) == 8
    for name in COMPARED:
        assert [entry[name] for entry in history] == pytest.approx([entry[name] for entry in expected]), name
    assert (moves - expected_moves).abs().max() < 2e-4 * expected_moves.abs().max()
    assert expected_moves.abs().max() > 1e-4
    for name in ("replay/replaced_fraction", "dynamic_sampling/generated_groups"):
        assert sum(entry[name] for entry in expected[4:]) > 0, "something depends on what the checkpoint brought"
