"""A run whose groups are spread over processes continues with another number of them as if it had not stopped."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).with_name("resume_worker.py")
COMPARED = ("replay/size", "replay/mean_age", "replay/replaced_fraction", "dynamic_sampling/generated_groups", "reward")


def launch(processes: int, *arguments: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(
        [*command, str(SCRIPT), *arguments], env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.fixture(scope="module")
def runs(model_folder, question_files, tmp_path_factory):
    """How far weights moved and history of eight steps by processes before and after the fourth step."""
    folder = tmp_path_factory.mktemp("resume")
    common = [str(model_folder), question_files.split(",")[0].removeprefix("train=")]
    found = {}
    for before, after in ((1, 2), (2, 1)):
        first, rest = folder / str(before), folder / f"{before}-{after}"
        launch(before, *common, str(first), str(4 // before), "8")
        launch(after, *common, str(rest), str(4 // after), "8", str(first / "checkpoint-4"))
        for name, output in ((before, first), ((before, after), rest)):
            found[name] = torch.load(output / "moves.pt"), json.loads((output / "history.json").read_text())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("run", [2, (1, 2), (2, 1)], ids=str)
def test_another_number_of_processes_continues_the_run(run, runs):
    (moves, history), (expected_moves, expected) = runs[run], runs[1]
    assert len(history) == len(expected) == 8
    for name in COMPARED:
        assert [entry[name] for entry in history] == pytest.approx([entry[name] for entry in expected]), name
    assert (moves - expected_moves).abs().max() < 2e-4 * expected_moves.abs().max()
    assert expected_moves.abs().max() > 1e-4
    for name in ("replay/replaced_fraction", "dynamic_sampling/generated_groups"):
        assert sum(entry[name] for entry in expected[4:]) > 0, "something depends on what the checkpoint brought"
